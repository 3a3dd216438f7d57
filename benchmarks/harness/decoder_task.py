"""A decoder of any size that learns to predict random tokens, and runs in any layout."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from isthmus import Task
from isthmus.task import Participant

TOKENS = 2048
LENGTH = 16
EXAMPLES = 8
OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


class Block(nn.Module):
    """Attention and a feed-forward layer, both after a normalisation: 12 `width`^2 parameters."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.taken = nn.Linear(width, 3 * width, bias=False)
        self.given = nn.Linear(width, width, bias=False)
        self.before_forward = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """One block: (batch, length, width) to the same."""
        batch, length, width = hidden.shape
        taken = self.taken(self.before_attention(hidden))
        query, key, value = (
            each.view(batch, length, self.heads, -1).transpose(1, 2)
            for each in taken.chunk(3, dim=-1)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.given(attended.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.down(nn.functional.gelu(self.up(self.before_forward(hidden))))


class Decoder(nn.Sequential):
    """Tokens (batch, length) to scores of the next ones (batch, length, TOKENS)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__(
            nn.Embedding(TOKENS, width),
            *(Block(width, max(1, width // 64)) for _ in range(layers)),
            nn.LayerNorm(width),
            nn.Linear(width, TOKENS, bias=False),
        )


class Pretrain(Task):
    """Settings: `width`, `layers`, and `optimizer`, which is a key of `OPTIMIZERS`."""

    def model(self) -> nn.Module:
        """The decoder."""
        return Decoder(self.settings["width"], self.settings["layers"])

    def loss(self, output: Any, target: Any) -> torch.Tensor:
        """Cross-entropy (batch, length)."""
        return nn.functional.cross_entropy(output.transpose(1, 2), target, reduction="none")

    def local_data(self, participant: Participant) -> Dataset[Any]:
        """Random sequences."""
        return _rows(seed=1)

    def eval_data(self) -> Dataset[Any]:
        """Other sequences."""
        return _rows(seed=2)

    def optimizer(
        self, parameters: Iterable[nn.Parameter], participant: Participant
    ) -> torch.optim.Optimizer:
        """The optimizer of the settings."""
        return OPTIMIZERS[self.settings["optimizer"]](parameters, lr=1e-4)


def _rows(seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(TOKENS, (EXAMPLES, LENGTH + 1), generator=generator)
    return TensorDataset(rows[:, :-1], rows[:, 1:])
