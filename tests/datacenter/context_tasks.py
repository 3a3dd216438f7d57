"""Transformers whose blocks attend in many ways, for ranks that share positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tests.datacenter.tasks import _Small, cross_entropy
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

WIDTH = 8
HEADS = 4
POSITIONS = 8


class Words(Dataset[Any]):
    """Words 1 to 11, then padding by 0.

    Of most sentences only the first positions are scored, which one of the ranks has.
    """

    def __init__(
        self, count: int, seed: int, positions: int, lengths_of: Mapping[str, int] | None
    ) -> None:
        """`lengths_of`: lengths of some sentences by number, if there is padding."""
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(1, 12, (count, positions), generator=generator)
        if lengths_of is not None:
            lengths = torch.randint(1, positions + 1, (count, 1), generator=generator)
            for number, length in lengths_of.items():
                lengths[int(number)] = length
            self.words[torch.arange(positions).expand(count, positions) >= lengths] = 0
        self.target = self.words.roll(-1, 1)
        scored = torch.randint(1, positions, (count, 1), generator=generator)
        self.target[torch.arange(positions).expand(count, positions) >= scored] = -1

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> Any:
        return self.words[index], self.target[index]


class Attending(_Small):
    """A model of blocks whose attention is a method of `Block`, by the setting `kind`.

    Settings: `positions` of a sentence; `lengths` of some sentences, in which case the others have
    any and end with padding. A batch ends with its longest sentence.
    """

    def model(self) -> nn.Module:
        return Model(self.settings["kind"])

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        output = model(inputs)
        rows = inputs.shape[1] - output.shape[1]
        return nn.functional.pad(output, (0, 0, 0, rows)) if rows else output

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        scored = target >= 0
        return cross_entropy(output[scored].float(), target[scored])

    def rows(self, count: int, seed: int) -> Any:
        positions = self.settings.get("positions", POSITIONS)
        return Words(count, seed, positions, self.settings.get("lengths"))


class Block(nn.Module):
    """Attention by one of the methods below, and an MLP."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.heads = 2 if kind == "grouped" else HEADS
        self.k, self.v = (nn.Linear(WIDTH, 2 * self.heads) for _ in range(2))
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        if kind == "learned":
            self.bias = nn.Parameter(0.1 * torch.randn(HEADS, 1, 1))
        if kind == "gated":
            self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, *more: Any, **by_name: Any) -> torch.Tensor:
        given = self.first(hidden)
        mixed = getattr(self, self.kind)(given, *more, **by_name)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(-2))
        output: torch.Tensor = hidden + self.down(nn.functional.gelu(self.up(self.second(hidden))))
        return output

    def project(self, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = (
            each(given).unflatten(-1, (-1, 2)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        return q, k, v

    # -- trained as by one process

    def causal(self, given: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(*self.project(given), is_causal=True)

    def grouped(self, given: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(*self.project(given), enable_gqa=True, is_causal=True)

    def padding(self, given: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """`kept`: (batch, positions)."""
        return scaled_dot_product_attention(*self.project(given), kept[:, None, None])

    def square(self, given: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """`mask`: (positions, positions)."""
        return scaled_dot_product_attention(*self.project(given), mask)

    def batched(self, given: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """`mask`: (batch, positions, positions)."""
        return scaled_dot_product_attention(*self.project(given), mask[:, None])

    def window(self, given: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """`mask`: (1, 1, positions, positions)."""
        return scaled_dot_product_attention(*self.project(given), attn_mask=mask)

    def slopes(self, given: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """`mask`: (1, heads, positions, positions), ALiBi's."""
        return scaled_dot_product_attention(*self.project(given), attn_mask=mask)

    def learned(self, given: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
        """`distance`: (1, 1, positions, positions), of which each head learns the weight."""
        return scaled_dot_product_attention(*self.project(given), attn_mask=self.bias * distance)

    def rotary(self, given: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """`turn`: cosine and sine, (positions, width of a head)."""
        q, k, v = self.project(given)
        cos, sin = turn
        q, k = (each * cos + each.flip(-1) * sin for each in (q, k))
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    def sometimes(self, given: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """As Transformers do: a mask only where there is padding."""
        projected = self.project(given)
        return scaled_dot_product_attention(*projected, mask, is_causal=mask is None)

    def conditioned(self, given: torch.Tensor, about: torch.Tensor) -> torch.Tensor:
        """`about`: (batch, width), of which there are as many as positions."""
        return self.causal(given + about[:, None])

    # -- refused

    def gated(self, given: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """`embedded`: (batch, positions, width), the hidden states before the first block."""
        return self.causal(given + self.gate(embedded))

    def eager(self, given: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(given)
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v

    def eager_sometimes(self, given: torch.Tensor, kept: torch.Tensor, whole: bool) -> torch.Tensor:
        """Computed by hand where there is padding; of a rank's positions it has any shape."""
        if whole:
            return self.padding(given, kept)
        q, k, v = self.project(given)
        scores = (q @ k.transpose(-1, -2)).masked_fill(~kept[:, None, None], -1e4)
        return scores.softmax(-1) @ v

    def between(self, given: torch.Tensor) -> torch.Tensor:
        """See `Model.forward`."""
        return self.causal(given)

    between_in_place = between

    def padding_sometimes(self, given: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
        if kept is None:
            return scaled_dot_product_attention(*self.project(given))
        return self.padding(given, kept)

    def own_window(self, given: torch.Tensor) -> torch.Tensor:
        places = torch.arange(given.shape[1])
        near = (places - places[:, None]).abs() < 3
        return scaled_dot_product_attention(*self.project(given), near)

    def own_slopes(self, given: torch.Tensor) -> torch.Tensor:
        places = -0.1 * torch.arange(given.shape[1], dtype=torch.float32)
        return scaled_dot_product_attention(*self.project(given), places.expand(1, 1, 1, -1))

    def pooled(self, given: torch.Tensor) -> torch.Tensor:
        given = given * given.mean(1, keepdim=True).sigmoid()
        return self.causal(given)

    def recomputed(self, given: torch.Tensor) -> torch.Tensor:
        """In the backward pass, which is outside of the block's call."""
        mixed: torch.Tensor = checkpoint(self.causal, given, use_reentrant=False)
        return mixed

    def crossing(self, given: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """`others`: (batch, half of the positions, width), such as an encoder's states."""
        q, _, _ = self.project(given)
        _, k, v = self.project(others)
        return scaled_dot_product_attention(q, k, v)

    def crossing_sometimes(self, given: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """`others`: (batch, positions or less, width)."""
        return self.crossing(given, others)

    def both(self, given: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(POSITIONS, POSITIONS, dtype=torch.bool)
        return scaled_dot_product_attention(*self.project(given), mask, is_causal=True)


class Model(nn.Module):
    """Embeddings, blocks of a kind with what they are given, and a head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.words = nn.Embedding(12, WIDTH)
        self.places = nn.Embedding(2 * POSITIONS, WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 12)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        kept = words != 0
        longest = int(kept.any(0).sum())
        words = words[:, : longest + longest % 2]
        kept = words != 0
        hidden = self.words(words) + self.places(torch.arange(words.shape[1]))
        given = self.given(hidden, kept)
        for block in self.blocks:
            hidden = block(hidden, *given)
            if self.kind.startswith("between") and not kept.all():
                # A rank would centre its own positions.
                mean = hidden.mean(1, keepdim=True)
                hidden = hidden.sub_(mean) if self.kind.endswith("place") else hidden - mean
        output: torch.Tensor = self.head(self.norm(hidden))
        return output

    def given(self, hidden: torch.Tensor, kept: torch.Tensor) -> tuple[Any, ...]:
        """What blocks get besides the hidden states."""
        places = torch.arange(kept.shape[1])
        distance = places - places[:, None]
        causal = distance <= 0
        match self.kind:
            case "padding":
                return (kept,)
            case "padding_sometimes":
                return (None if kept.all() else kept,)
            case "square":
                return (causal,)
            case "batched":
                return (causal & kept[:, None],)
            case "window":
                return ((causal & (distance > -3))[None, None],)
            case "slopes":
                slopes = 0.5 ** torch.arange(1, HEADS + 1)[:, None, None]
                return ((distance * slopes).masked_fill(~causal, -torch.inf)[None],)
            case "learned":
                return (distance[None, None] / 4,)
            case "rotary":
                angle = places[:, None] * torch.tensor([1.0, -1.0])
                return ((angle.cos(), angle.sin()),)
            case "eager_sometimes":
                return kept, bool(kept.all())
            case "sometimes":
                mask = (causal & kept[:, None])[:, None]
                return (None if kept.all() else mask,)
            case "conditioned":
                return (hidden.detach().mean(1),)
            case "gated":
                return (hidden,)
            case "crossing":
                return (hidden[:, ::2],)
            case "crossing_sometimes":
                return (hidden.detach() if kept.all() else hidden.detach()[:, ::2],)
        return ()
