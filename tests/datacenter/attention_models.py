"""Models with attention in various forms, for tests of sharding and of pipeline stages."""

from __future__ import annotations

import torch
from torch import nn

WIDTH, HEAD = 16, 4


class GroupedAttention(nn.Module):
    """Grouped-query attention; `up` is as wide as `out` and not part of the attention.

    With `fixed_heads`, it refuses another number of query heads.
    """

    def __init__(self, queries: int, keys: int, fixed_heads: int | None) -> None:
        super().__init__()
        self.up = nn.Linear(queries * HEAD, WIDTH)
        self.q_proj = nn.Linear(WIDTH, queries * HEAD)
        self.k_proj = nn.Linear(WIDTH, keys * HEAD)
        self.v_proj = nn.Linear(WIDTH, keys * HEAD, bias=False)
        self.out = nn.Linear(queries * HEAD, WIDTH)
        self.fixed_heads = fixed_heads

    def forward(self, hidden: torch.Tensor, angles: torch.Tensor, *, scale: float) -> torch.Tensor:
        q, k, v = (
            each(hidden * angles).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.fixed_heads is not None and q.shape[1] != self.fixed_heads:
            raise ValueError("unexpected number of heads")
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)
        output: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + output


class AngleTransformer(nn.Module):
    """A transformer with dropout before its blocks and position angles that every block needs."""

    def __init__(self, queries: int = 4, keys: int = 2, fixed_heads: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, WIDTH)
        self.drop = nn.Dropout(0.5)
        self.angles = Angles()
        self.blocks = nn.ModuleList(GroupedAttention(queries, keys, fixed_heads) for _ in range(2))
        self.head = nn.Linear(WIDTH, 9)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.embed(words))
        angles, scale = self.angles(hidden)
        for block in self.blocks:
            hidden = block(hidden, angles, scale=scale)
        output: torch.Tensor = self.head(hidden)
        return output


class Angles(nn.Module):
    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, float]:
        return torch.arange(1.0, 1.0 + hidden.shape[1])[:, None].cos(), 0.3


class FusedAttention(nn.Module):
    """One layer computes all three: in sequence, interleaved by head, or in another order."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.order, self.width, self.heads = order, WIDTH, WIDTH // HEAD

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        outputs = self.c_attn(hidden)
        if self.order == "in sequence":
            parts = [each.unflatten(-1, (-1, HEAD)) for each in outputs.split(self.width, -1)]
        elif self.order == "interleaved":
            parts = outputs.unflatten(-1, (-1, 3 * HEAD)).chunk(3, -1)
        else:
            parts = outputs.unflatten(-1, (HEAD, self.heads, 3)).transpose(-2, -3).unbind(-1)
        q, k, v = (each.transpose(1, 2) for each in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        output: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return output


class ByKeyword(nn.Linear):
    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = super().__call__(input=given)
        return output
