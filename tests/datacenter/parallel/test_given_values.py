"""A model without memory computes what it does with its values, with one block in memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from isthmus.start.unfilled import parameters_without_memory
from isthmus_datacenter.parallel.attention import find_head_sharding
from isthmus_datacenter.parallel.equivalence_check import run_in_eval_mode
from isthmus_datacenter.parallel.given_values import values_while_called
from isthmus_datacenter.parallel.gradient_check import GradientRecord, record_gradients

WIDTH = 16
BLOCKS = 5
ROWS = torch.arange(2.0 * WIDTH).view(2, WIDTH) / 20


class Block(nn.Module):
    """Has a parameter of its own, one layer that it calls twice, and one that is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.zero = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.drop = nn.Dropout(0.5)
        nn.init.zeros_(self.zero.weight)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.twice(self.twice(rows).tanh()))
        output: torch.Tensor = rows + self.scale * self.zero(self.frozen(hidden).tanh())
        return output


class Model(nn.Module):
    """Blocks between two layers with one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.first(rows)
        for block in self.blocks:
            rows = block(rows)
        output: torch.Tensor = self.last(rows)
        return output


class Reader:
    """Reads the values of a model for its copy without memory, and notes what is in use."""

    def __init__(self, model: nn.Module) -> None:
        self.values = dict(model.named_parameters(remove_duplicate=False))
        self.elements = 0
        self.most = 0

    def __call__(self, path: str, parameter: nn.Parameter) -> torch.Tensor:
        assert parameter.is_meta
        values = self.values[path].detach().clone()
        self.elements += values.numel()
        self.most = max(self.most, self.elements)
        weakref.finalize(values.untyped_storage(), self._freed, values.numel())
        return values

    def _freed(self, elements: int) -> None:
        self.elements -= elements


@pytest.fixture
def models() -> Iterator[tuple[Model, Model, Reader]]:
    """A model, its copy without memory, and what reads the values."""
    torch.manual_seed(3)
    model = Model()
    with parameters_without_memory():
        empty = Model()
    state = dict(empty.named_parameters(remove_duplicate=False))
    yield model, empty, Reader(model)
    after = dict(empty.named_parameters(remove_duplicate=False))
    assert all(after[path] is each for path, each in state.items())
    assert not any("forward" in vars(module) for module in empty.modules())
    assert not any(module._forward_pre_hooks for module in empty.modules())


def recorded(model: Model, **more: Any) -> GradientRecord:
    names = {path: path for path, _ in model.named_parameters(remove_duplicate=False)}
    names["last.weight"] = "first.weight"
    units = list(model.blocks)
    return record_gradients(model, model, names, (ROWS,), units, differentiable_inputs=True, **more)


def test_outputs_and_gradients_are_those_of_the_model(
    models: tuple[Model, Model, Reader],
) -> None:
    model, empty, reader = models
    with values_while_called(empty, reader):
        output = run_in_eval_mode(empty, ROWS)
    assert output.equal(run_in_eval_mode(model, ROWS))
    expected = recorded(model)
    found = recorded(empty, read=reader)
    assert found.gradients.keys() == expected.gradients.keys()
    assert next(iter(found.gradients)) == next(iter(expected.gradients))
    assert (found.draws, found.zeros) == (expected.draws, expected.zeros)
    assert "blocks.0.zero.weight" in found.zeros
    for name, gradient in expected.gradients.items():
        assert gradient.norm > 0
        assert found.gradients[name].norm == pytest.approx(gradient.norm, rel=1e-5)
        assert found.gradients[name].projections == pytest.approx(gradient.projections, rel=1e-4)


def test_zeros_that_were_found_before_are_taken(models: tuple[Model, Model, Reader]) -> None:
    model, empty, reader = models
    zeros = frozenset({"blocks.1.scale"})
    expected = recorded(model, zeros=zeros)
    found = recorded(empty, zeros=zeros, read=reader)
    assert found.zeros == zeros
    norms = {name: each.norm for name, each in found.gradients.items()}
    assert norms == pytest.approx({name: each.norm for name, each in expected.gradients.items()})


def test_one_block_is_in_memory(models: tuple[Model, Model, Reader]) -> None:
    _, empty, reader = models
    block = sum(each.numel() for each in reader.values.values()) / (BLOCKS + 1)
    recorded(empty, read=reader)
    assert reader.elements == 0
    # The last layer's values are those of the block for which the backward pass begins.
    ends = 2 * (WIDTH * WIDTH + WIDTH)
    assert reader.most <= block + ends


def test_heads_are_found_without_the_whole_attention() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = nn.Linear(WIDTH, WIDTH)
            self.k_proj = nn.Linear(WIDTH, WIDTH)
            self.v_proj = nn.Linear(WIDTH, WIDTH)
            self.o_proj = nn.Linear(WIDTH, WIDTH)
            self.sink = nn.Parameter(torch.rand(1))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            parts = [each(rows).unflatten(-1, (-1, 4)) for each in (self.q_proj, self.k_proj)]
            weights = (parts[0] * parts[1]).sum(-1, keepdim=True) + self.sink
            heads = weights * self.v_proj(rows).unflatten(-1, (-1, 4))
            output: torch.Tensor = self.o_proj(heads.flatten(-2))
            return output

    torch.manual_seed(4)
    attention = Attention()
    reader = Reader(attention)
    with parameters_without_memory():
        empty = Attention()

    def run() -> Any:
        with values_while_called(empty, reader):
            return run_in_eval_mode(empty, ROWS)

    found, others = find_head_sharding(empty, 2, run)
    assert ([each.name for each in found], others) == ([""], [])
    # The parameter of the attention itself, and one layer.
    assert reader.most <= WIDTH * WIDTH + WIDTH + 1


def test_a_parameter_used_elsewhere_is_refused(models: tuple[Model, Model, Reader]) -> None:
    """PyTorch multiplies by a matrix on `meta` without an error, and gives any numbers."""
    _, empty, reader = models
    with values_while_called(empty, reader):
        rows = empty.blocks[0](ROWS)
        with pytest.raises(RuntimeError, match="used while its module is not called"):
            nn.functional.linear(rows, empty.first.weight)


def test_a_tensor_that_stands_in_for_a_parameter_is_used() -> None:
    class Switched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.other = nn.Parameter(torch.rand(WIDTH, WIDTH))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            given = {"weight": self.other}
            output: torch.Tensor = torch.func.functional_call(self.layer, given, (rows,))
            return output

    torch.manual_seed(5)
    model = Switched()
    with parameters_without_memory():
        empty = Switched()
    weight = empty.layer.weight
    with values_while_called(empty, Reader(model)):
        output = run_in_eval_mode(empty, ROWS)
    assert output.equal(run_in_eval_mode(model, ROWS))
    assert empty.layer.weight is weight
