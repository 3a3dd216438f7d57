"""Attention is cut by heads where a trial shows that it can be, and left as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from isthmus_datacenter.parallel.attention import find_head_sharding
from isthmus_datacenter.parallel.equivalence_check import check_stages, run_in_eval_mode
from isthmus_datacenter.parallel.pipeline_stages import split_at_blocks
from isthmus_datacenter.parallel.tensor_plans import default_tensor_plan

WIDTH, HEAD = 16, 4


class Attention(nn.Module):
    """Grouped heads; `up` takes as much as `out` does and is no part of the attention."""

    def __init__(self, queries: int, keys: int, counted: int | None) -> None:
        super().__init__()
        self.up = nn.Linear(queries * HEAD, WIDTH)
        self.q_proj = nn.Linear(WIDTH, queries * HEAD)
        self.k_proj = nn.Linear(WIDTH, keys * HEAD)
        self.v_proj = nn.Linear(WIDTH, keys * HEAD, bias=False)
        self.out = nn.Linear(queries * HEAD, WIDTH)
        self.counted = counted

    def forward(self, hidden: torch.Tensor, angles: torch.Tensor, *, scale: float) -> torch.Tensor:
        q, k, v = (
            each(hidden * angles).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.counted is not None and q.shape[1] != self.counted:
            raise ValueError("where are my heads?")
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)
        output: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + output


class Model(nn.Module):
    """Angles that every block needs, and dropout before the blocks."""

    def __init__(self, queries: int = 4, keys: int = 2, counted: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, WIDTH)
        self.drop = nn.Dropout(0.5)
        self.angles = Angles()
        self.blocks = nn.ModuleList(Attention(queries, keys, counted) for _ in range(2))
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


class Together(nn.Module):
    """One layer for all three: one after another, head by head, or in an order of its own."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.order, self.width, self.heads = order, WIDTH, WIDTH // HEAD

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        made = self.c_attn(hidden)
        if self.order == "one after another":
            parts = [each.unflatten(-1, (-1, HEAD)) for each in made.split(self.width, -1)]
        elif self.order == "head by head":
            parts = made.unflatten(-1, (-1, 3 * HEAD)).chunk(3, -1)
        else:
            parts = made.unflatten(-1, (HEAD, self.heads, 3)).transpose(-2, -3).unbind(-1)
        q, k, v = (each.transpose(1, 2) for each in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        output: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return output


class ByKeyword(nn.Linear):
    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = super().__call__(input=given)
        return output


class Inside(Model):
    """Calls what is in its blocks, and not them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.embed(words))
        for block in self.blocks:
            hidden = block[0](hidden)
        output: torch.Tensor = self.head(hidden)
        return output


@pytest.fixture
def words() -> torch.Tensor:
    return torch.randint(9, (2, 6), generator=torch.Generator().manual_seed(0))


def test_whole_groups_of_heads_are_cut(words: torch.Tensor) -> None:
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found, others = find_head_sharding(model, 2, lambda: run_in_eval_mode(model, words))
    assert [each.name for each in found] == ["blocks.0", "blocks.1"]
    assert [each.output_projections for each in found] == [(block.out,) for block in model.blocks]
    assert not others
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("order", "pieces", "attributes"),
    [("one after another", 3, ("width",)), ("head by head", 1, ()), ("of its own", 0, ())],
)
def test_one_layer_for_all_three(order: str, pieces: int, attributes: tuple[str, ...]) -> None:
    model = nn.Sequential(nn.Linear(4, WIDTH), Together(order))
    before = model[1].width, model[1].heads
    hidden = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    found, others = find_head_sharding(model, 2, lambda: run_in_eval_mode(model, hidden))
    assert [(each.fused, each.pieces, each.width_attributes) for each in found] == (
        [("c_attn", pieces, attributes)] if pieces else []
    )
    assert [each.name for each in others] == ([] if pieces else ["1"])
    assert (model[1].width, model[1].heads) == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_layers_may_be_called_by_keyword() -> None:
    model = nn.Sequential(nn.Linear(4, WIDTH), Together("head by head"))
    model[1].out, model[1].c_attn = ByKeyword(WIDTH, WIDTH), ByKeyword(WIDTH, 3 * WIDTH)
    hidden = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    found, others = find_head_sharding(model, 2, lambda: run_in_eval_mode(model, hidden))
    assert ([each.output_projections for each in found], others) == ([(model[1].out,)], [])


@pytest.mark.parametrize(
    ("more", "degree", "widths"),
    [
        ({"keys": 1}, 2, "queries are 16 wide, keys 4"),  # half of a head
        ({"queries": 6, "keys": 3}, 2, "queries are 24 wide, keys 12"),
        ({}, 8, "queries are 16 wide, keys 8"),
        ({"counted": 4}, 2, "queries are 16 wide, keys 8"),  # the model counts its heads
    ],
)
def test_what_cannot_be_cut_find_head_sharding_is_gathered_and_said(
    more: dict[str, Any], degree: int, widths: str, words: torch.Tensor
) -> None:
    model = Model(**more)
    plan, notes = default_tensor_plan(
        model, degree, [model], lambda: run_in_eval_mode(model, words)
    )
    assert notes[0] == (
        f"'blocks.0' and 1 more cannot be sharded by heads into tensor_parallel={degree} equal "
        f"parts ({widths}): the output of each of its layers is gathered separately"
    )
    assert "blocks.0.q_proj" in plan


def test_what_is_left_whole_is_said(words: torch.Tensor) -> None:
    model = Model()
    model.blocks[0].table = nn.Parameter(torch.zeros(1000))
    _, notes = default_tensor_plan(model, 2, [model], lambda: run_in_eval_mode(model, words))
    (note,) = notes
    assert note.startswith("33%")
    assert " of the parameters are replicated on every rank, the largest in 'blocks.0'" in note


def test_every_stage_has_the_angles_and_only_the_first_the_dropout(words: torch.Tensor) -> None:
    model = Model()
    stages = split_at_blocks(model, 2, words)
    check_stages(stages, run_in_eval_mode(model, words), words)
    kinds = [[type(stage.get_submodule(at)) for at in ("drop", "angles")] for stage in stages]
    assert kinds[0] == [nn.Dropout, Angles]
    assert kinds[1][0] is not nn.Dropout
    assert kinds[1][1] is Angles


def test_blocks_that_are_not_called_are_no_stages(words: torch.Tensor) -> None:
    model = Inside()
    stages = split_at_blocks(model, 2, words)
    with pytest.raises(TypeError, match="SkippedModule"):
        check_stages(stages, run_in_eval_mode(model, words), words)
