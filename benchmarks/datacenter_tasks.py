"""The models that benchmarks/datacenter.py trains: GPTs on random words, as one isthmus Task.

Random words contain nothing to learn, and take as long as real ones: only times are measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from isthmus import Participant, Task


class Block(nn.Module):
    """Pre-norm attention and MLP with residual connections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shape: (B, T, width) in and out."""
        rows, length, width = hidden.shape
        qkv = self.qkv(self.norm1(hidden)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        expanded = nn.functional.gelu(self.up(self.norm2(hidden)), approximate="tanh")
        return hidden + self.down(expanded)


class Gpt(nn.Module):
    """GPT-2's shape with tied embeddings."""

    def __init__(self, *, words: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.length, self.width, self.layers = length, width, layers
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Shape: (B, T) in, (B, T, V) out."""
        places = torch.arange(words.shape[1], device=words.device)
        hidden = self.words(words) + self.places(places)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits

    def flops_per_word(self) -> int:
        """Forward and backward, as in the PaLM paper: 6 per parameter, 12 per attended pair."""
        used = sum(each.numel() for each in self.parameters()) - self.places.weight.numel()
        return 6 * used + 12 * self.layers * self.width * self.length


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """One value per word."""
    flat = logits.flatten(0, 1).float()
    return nn.functional.cross_entropy(flat, target.flatten(), reduction="none")


class Words(Dataset[Any]):
    """Random sequences, with the same sequence shifted by one word as the target."""

    def __init__(self, words: int, length: int, examples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.text = torch.randint(words, (examples, length + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = self.text[index]
        return row[:-1], row[1:]


class Language(Task):
    """A GPT; `settings`: the shape, and `accelerate` for bf16 and compilation by the task."""

    def model(self) -> nn.Module:
        shape = ("words", "length", "width", "heads", "layers")
        model = Gpt(**{name: self.settings[name] for name in shape})
        if self.settings.get("accelerate"):
            model.compile()
        return model

    def forward(self, model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=self._accelerates()):
            logits: torch.Tensor = model(inputs)
        return logits

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return _compiled(output, target) if self._accelerates() else cross_entropy(output, target)

    def local_data(self, participant: Participant) -> Dataset[Any]:
        return self._sequences(self.settings["examples"])

    def eval_data(self) -> Dataset[Any]:
        return self._sequences(8)

    def optimizer(
        self, parameters: Iterable[nn.Parameter], participant: Participant
    ) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            parameters, lr=3e-4, weight_decay=0.1, betas=(0.9, 0.95), fused=True
        )

    def _accelerates(self) -> bool:
        return bool(self.settings.get("accelerate"))

    def _sequences(self, examples: int) -> Dataset[Any]:
        return Words(self.settings["words"], self.settings["length"], examples)


_compiled = torch.compile(cross_entropy)
