"""What is computed again in the backward pass, and that it is what the first pass has computed."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from isthmus.errors import TaskError
from isthmus.task.scoring.recomputation import output_policy, recompute


class Counted(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Attention(nn.Module):
    """Attention with dropout, and layers that draw after it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.heads = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.heads(inputs).chunk(3, -1)
        mixed = functional.scaled_dot_product_attention(
            queries[None], keys[None], values[None], dropout_p=self.dropout
        )
        hidden = functional.dropout(functional.gelu(self.out(mixed[0])), 0.5)
        return self.norm(hidden)


def trained(
    module: nn.Module, inputs: torch.Tensor
) -> tuple[dict[str, torch.Tensor], Counter[str]]:
    """Gradients and buffers after a backward pass, and the operators that it has called."""
    torch.manual_seed(1)
    loss = (module(inputs) ** 3).sum()
    with Counted() as counted:
        loss.backward()
    gradients = {name: each.grad for name, each in module.named_parameters()}
    return {**gradients, **dict(module.named_buffers())}, counted.calls  # type: ignore[dict-item]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_selective_recomputation_leaves_out_products_and_has_the_same_bytes(dropout: float) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(12, 16)
    plain = Attention(dropout)
    whole, selective = copy.deepcopy(plain), copy.deepcopy(plain)
    recompute(whole)
    recompute(selective, keep_products=True)
    expected, calls = trained(plain, inputs)
    everything, all_calls = trained(whole, inputs)
    some, some_calls = trained(selective, inputs)
    for name, each in expected.items():
        assert torch.equal(everything[name], each), name
        assert torch.equal(some[name], each), name
    assert all_calls["addmm"] == 2
    assert calls["addmm"] == some_calls["addmm"] == 0
    assert calls["gelu"] == 0
    assert all_calls["gelu"] == some_calls["gelu"] == 1


@pytest.mark.parametrize(("to_end", "calls"), [(False, 1), (True, 2)])
def test_all_operators_are_called_again_if_ranks_may_need_different_ones(
    to_end: bool, calls: int
) -> None:
    module = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    recompute(module, to_end=to_end)
    _, counted = trained(module, torch.randn(12, 16))
    assert counted["addmm"] == calls


def in_place(layers: int) -> tuple[nn.Module, nn.Module]:
    """Two layers with a ReLU that changes its inputs; the model, and its first so many modules."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 16))
    unit = nn.Sequential(*model[:layers])
    return nn.Sequential(unit, model[layers:]), unit


def test_a_kept_output_that_is_changed_in_place_is_refused() -> None:
    model, unit = in_place(2)
    recompute(unit, keep_products=True)
    with pytest.raises(TaskError, match=r"in a Sequential was changed in place .* inplace=False"):
        trained(model, torch.randn(12, 16))


def test_an_output_may_be_changed_after_the_module() -> None:
    """The second call ends before it would need that output."""
    inputs = torch.randn(12, 16)
    plain, _ = in_place(1)
    model, unit = in_place(1)
    recompute(unit, keep_products=True)
    expected, _ = trained(plain, inputs)
    found, _ = trained(model, inputs)
    for name, each in expected.items():
        assert torch.equal(found[name], each), name


@pytest.mark.parametrize(
    ("dropout", "kept"),
    [(0.0, CheckpointPolicy.MUST_SAVE), (0.1, CheckpointPolicy.PREFER_RECOMPUTE)],
)
def test_attention_that_draws_is_called_again(dropout: float, kept: CheckpointPolicy) -> None:
    """Otherwise the dropout after it would have another mask in the second call.

    Kernels of attention that draw exist on GPUs only; here other operators take their place.
    """
    operator = torch.ops.aten._scaled_dot_product_flash_attention.default
    heads = torch.zeros(1, 1, 2, 8)
    context: Any = None
    assert output_policy(context, operator, heads, heads, heads, dropout) == kept
    assert output_policy(context, operator, heads, heads, heads, dropout_p=dropout) == kept


def test_a_module_is_called_again_in_each_of_two_backward_passes() -> None:
    """As in a schedule that has the gradients of inputs and of parameters one after the other."""
    torch.manual_seed(0)
    inputs = torch.randn(12, 16, requires_grad=True)
    plain = Attention(0.0)
    module = copy.deepcopy(plain)
    recompute(module)
    results = []
    for each in (plain, module):
        torch.manual_seed(1)
        loss = (each(inputs) ** 3).sum()
        (of_inputs,) = torch.autograd.grad(loss, inputs, retain_graph=True)
        of_parameters = torch.autograd.grad(loss, list(each.parameters()))
        results.append([of_inputs, *of_parameters, *each.buffers()])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
