"""The reduction of each gradient is the one that gives that of the whole model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from isthmus.errors import TaskError
from isthmus_datacenter.parallel.gradient_check import (
    Gradient,
    GradientRecord,
    compare_gradients,
    record_gradients,
)


class _Model(nn.Module):
    """A buffer that training changes, a product of matrices of which one is zero, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.back = nn.Linear(6, 6, bias=False)
        self.drop = nn.Dropout(0.5)
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros(1))
        nn.init.zeros_(self.back.weight)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        hidden = self.drop(self.blocks[0](rows)).tanh()
        output: torch.Tensor = self.back(self.blocks[1](hidden))
        return output


@pytest.fixture
def model() -> _Model:
    torch.manual_seed(1)
    return _Model().eval()


ROWS = torch.arange(12.0).view(2, 6) / 12


def record(model: nn.Module, **more: Any) -> GradientRecord:
    names = {name: name for name, _ in model.named_parameters()}
    options: dict[str, Any] = {"differentiable_inputs": True, **more}
    return record_gradients(model, model, names, (ROWS,), list(model.blocks), **options)


def test_a_pass_leaves_the_model_as_it_was(model: _Model) -> None:
    before = {name: each.clone() for name, each in model.state_dict().items()}
    state = torch.get_rng_state()
    recorded = record(model)
    assert list(recorded.gradients) == [
        "back.weight",
        "blocks.1.bias",
        "blocks.1.weight",
        "blocks.0.bias",
        "blocks.0.weight",
        "the inputs 0",
    ]
    # What is behind the zero matrix has a gradient.
    assert all(each.norm > 0 for each in recorded.gradients.values())
    assert recorded.zeros == {"back.weight"}
    assert recorded.draws == {"drop": [(2, 6)]}
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(each.grad is None for each in model.parameters())
    assert not any(module.training for module in model.modules())
    assert all("forward" not in vars(module) for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert record(model) == recorded


@pytest.mark.parametrize("outputs", range(1, 7))
def test_a_bias_of_few_outputs_has_a_gradient(outputs: int) -> None:
    """That of two examples is the sum of two given gradients, which would cancel if alike."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs))
    names = {name: name for name, _ in model.named_parameters()}
    recorded = record_gradients(model, model, names, (ROWS,), [], differentiable_inputs=False)
    assert recorded.gradients["2.bias"].norm > 0.01


def test_projections_tell_the_size_of_a_difference(model: _Model) -> None:
    first = record(model)
    with torch.no_grad():
        model.blocks[1].weight[0, 0] *= 1.5
    second = record(model)
    with pytest.raises(TaskError, match=r"'back.weight' another gradient than whole"):
        compare_gradients(first, [second], [])


def gradient(*values: float, adds_up: bool = False) -> Gradient:
    return Gradient(values, math.hypot(*values), adds_up, 1e-7)


def records(*gradients: Mapping[str, Gradient]) -> list[GradientRecord]:
    return [GradientRecord(each, {}, frozenset()) for each in gradients]


def test_partial_gradients_are_summed_and_others_averaged() -> None:
    whole, *ranks = records(
        {
            "head": gradient(2.0, 4.0),
            "0.norm": gradient(3.0, 1.0),
            "0.matrix": gradient(1.0, 1.0),
            "bias": gradient(1e-9, 0.0),
        },
        *(
            {
                "head": gradient(2.0, 4.0),
                "0.norm": gradient(*norm),
                "0.matrix": gradient(*matrix, adds_up=True),
                "bias": gradient(0.0, 2e-9),
            }
            for norm, matrix in (((1.0, 1.0), (1.0, 0.0)), ((2.0, 0.0), (0.0, 1.0)))
        ),
    )
    reductions = compare_gradients(whole, ranks, ["head", "0.norm", "1.norm", "other", "bias"])
    # A norm that the examples did not reach is treated as that of the other block.
    assert reductions.summed == {"0.norm", "1.norm"}
    assert reductions.unknown == {"other"}


@pytest.mark.parametrize(
    ("whole", "ranks", "message"),
    [
        ({"a": (2.0,)}, [{"a": (1.5,)}, {"a": (1.5,)}], "gives parameter 'a' another gradient"),
        ({"a": (2.0,)}, [{"a": (2.0,)}, {"a": (0.0,)}], ""),
        ({"a": (2.0,)}, [{"a": (2.0,)}, {"a": (1.0,)}], "gives parameter 'a' another gradient"),
        ({"a": (2.0,)}, [{"a": (2.0,)}, {}], "gives parameter 'a' no gradient"),
        ({}, [{"a": (2.0,)}, {}], "gives parameter 'a' a gradient that it does not get whole"),
        ({"a": (math.nan,)}, [{"a": (1.0,)}] * 2, "the gradient of parameter 'a' for two examples"),
        ({"a": (2.0,)}, [{"a": (math.nan,)}] * 2, "gives parameter 'a' another gradient"),
        (
            {"a": (0.0,)},
            [{"a": (0.0,)}] * 2,
            "the gradient of parameter 'a' for two examples is ze",
        ),
        ({"the inputs 0": (2.0,)}, [{"the inputs 0": (1.0,)}] * 2, "gives the inputs 0 another"),
    ],
)
def test_what_no_reduction_gives_is_refused(whole: Any, ranks: Any, message: str) -> None:
    first, *others = records(
        *({name: gradient(*each) for name, each in row.items()} for row in (whole, *ranks))
    )
    if not message:
        assert compare_gradients(first, others, ["a"]).summed == {"a"}
        return
    with pytest.raises(TaskError) as caught:
        compare_gradients(first, others, ["a"])
    assert message in str(caught.value)


def test_types_of_low_precision_have_wider_limits() -> None:
    whole, *ranks = records(
        *({"a": dataclasses.replace(gradient(value), precision=2**-7)} for value in (2.0, 1.9, 2.1))
    )
    assert compare_gradients(whole, ranks, ["a"]).summed == frozenset()
