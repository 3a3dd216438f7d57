"""Attention is sharded by heads where a numerical check passes, and unchanged otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.datacenter.attention_models import WIDTH, AngleTransformer, ByKeyword, FusedAttention
from torch import nn

from isthmus_datacenter.parallel.attention import find_head_sharding
from isthmus_datacenter.parallel.equivalence_check import run_in_eval_mode
from isthmus_datacenter.parallel.tensor_plans import default_tensor_plan


@pytest.fixture
def words() -> torch.Tensor:
    return torch.randint(9, (2, 6), generator=torch.Generator().manual_seed(0))


def test_groups_of_heads_are_sharded(words: torch.Tensor) -> None:
    model = AngleTransformer()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    shardable, others = find_head_sharding(model, 2, lambda: run_in_eval_mode(model, words))
    assert [each.name for each in shardable] == ["blocks.0", "blocks.1"]
    assert [each.output_projections for each in shardable] == [
        (block.out,) for block in model.blocks
    ]
    assert not others
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("order", "pieces", "attributes"),
    [("in sequence", 3, ("width",)), ("interleaved", 1, ()), ("other", 0, ())],
)
def test_fused_layers_are_recognised(order: str, pieces: int, attributes: tuple[str, ...]) -> None:
    model = nn.Sequential(nn.Linear(4, WIDTH), FusedAttention(order))
    before = model[1].width, model[1].heads
    hidden = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    shardable, others = find_head_sharding(model, 2, lambda: run_in_eval_mode(model, hidden))
    assert [(each.fused, each.pieces, each.width_attributes) for each in shardable] == (
        [("c_attn", pieces, attributes)] if pieces else []
    )
    assert [each.name for each in others] == ([] if pieces else ["1"])
    assert (model[1].width, model[1].heads) == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_layers_called_by_keyword_are_recognised() -> None:
    model = nn.Sequential(nn.Linear(4, WIDTH), FusedAttention("interleaved"))
    model[1].out, model[1].c_attn = ByKeyword(WIDTH, WIDTH), ByKeyword(WIDTH, 3 * WIDTH)
    hidden = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    shardable, others = find_head_sharding(model, 2, lambda: run_in_eval_mode(model, hidden))
    assert ([each.output_projections for each in shardable], others) == ([(model[1].out,)], [])


@pytest.mark.parametrize(
    ("more", "degree", "widths"),
    [
        ({"keys": 1}, 2, "queries are 16 wide, keys 4"),  # half of a head
        ({"queries": 6, "keys": 3}, 2, "queries are 24 wide, keys 12"),
        ({}, 8, "queries are 16 wide, keys 8"),
        ({"fixed_heads": 4}, 2, "queries are 16 wide, keys 8"),  # the model requires four heads
    ],
)
def test_attention_that_cannot_be_sharded_by_heads_is_noted(
    more: dict[str, Any], degree: int, widths: str, words: torch.Tensor
) -> None:
    model = AngleTransformer(**more)
    plan, notes = default_tensor_plan(
        model, degree, [model], lambda: run_in_eval_mode(model, words)
    )
    assert notes[0] == (
        f"'blocks.0' and 1 more cannot be sharded by heads into tensor_parallel={degree} equal "
        f"parts ({widths}): the output of each of its layers is gathered separately"
    )
    assert any(module is model.blocks[0].q_proj for module, _ in plan)


def test_large_replicated_parameters_are_noted(words: torch.Tensor) -> None:
    model = AngleTransformer()
    model.blocks[0].table = nn.Parameter(torch.zeros(1000))
    _, notes = default_tensor_plan(model, 2, [model], lambda: run_in_eval_mode(model, words))
    (note,) = notes
    assert note.startswith("33%")
    assert " of the parameters are replicated on every rank, the largest in 'blocks.0'" in note
