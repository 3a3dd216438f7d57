"""What is computed again in the backward pass, and that it is what the first pass has computed."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import random
from collections import Counter
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from isthmus.errors import TaskError
from isthmus.task.scoring.recomputation import output_policy, recompute, watch_repeats


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
    return {**gradients, **dict(module.named_buffers())}, counted.calls  # type: ignore[dict-item]  # none is None


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


class Counting(nn.Module):
    """Scales by what it keeps of earlier calls, as an attribute of the kind that is given."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(16, 16)
        self.calls = 0
        self.mean = torch.zeros(16)
        self.seen: list[int] = []
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.kind == "number":
            self.calls += 1
            inputs = inputs / self.calls
        elif self.kind == "tensor":
            self.mean = 0.5 * self.mean + inputs.detach().mean(0)
            inputs = inputs - self.mean
        elif self.kind == "in place":
            self.mean.mul_(0.5).add_(inputs.detach().mean(0))
            inputs = inputs - self.mean
        elif self.kind == "list":
            self.seen.append(len(inputs))
            inputs = inputs / len(self.seen)
        else:
            kept = torch.rand(inputs.shape, generator=self.generator) > 0.5
            inputs = inputs * kept
        output: torch.Tensor = self.layer(inputs).tanh()
        return output


@pytest.mark.parametrize("keep_products", [False, True])
@pytest.mark.parametrize("kind", ["number", "tensor", "in place", "list", "generator"])
def test_what_a_module_keeps_in_attributes_changes_once_for_a_call(
    kind: str, keep_products: bool
) -> None:
    torch.manual_seed(0)
    plain = Counting(kind)
    again = copy.deepcopy(plain)
    again.generator.set_state(plain.generator.get_state())
    recompute(again, keep_products=keep_products)
    for _ in range(3):
        inputs = torch.randn(12, 16)
        for module in (plain, again):
            module.zero_grad()
            (module(module(inputs)) ** 3).sum().backward()
        for expected, found in zip(plain.parameters(), again.parameters(), strict=True):
            assert expected.grad is not None
            assert found.grad is not None
            assert torch.equal(expected.grad, found.grad)
    assert (plain.calls, plain.seen) == (again.calls, again.seen)
    assert torch.equal(plain.mean, again.mean)
    assert torch.equal(plain.generator.get_state(), again.generator.get_state())


class Keeping(nn.Module):
    """Scales by what it keeps where a second call does not get it back, or as a lazy buffer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(16, 16)
        self.array = numpy.zeros(1)
        self.pair = (torch.zeros(1),)
        self.count = itertools.count(1)
        self.hidden = [nn.BatchNorm1d(16)]
        self.register_buffer("mean", None)
        self.register_buffer("first", torch.ones(1))
        self.sparse = torch.eye(16).to_sparse()
        self.entropy = random.SystemRandom()
        with torch.inference_mode():
            self.table = torch.ones(16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.kind == "array":
            self.array += 1
            inputs = inputs / float(self.array[0])
        elif self.kind == "pair":
            inputs = inputs / self.pair[0].add_(1).clone()
        elif self.kind == "count":
            inputs = inputs / next(self.count)
        elif self.kind == "hidden module":
            self.hidden[0](inputs)
            running = self.hidden[0].running_mean
            assert running is not None
            inputs = inputs + running
        elif self.kind == "empty buffer":
            now = inputs.detach().mean(0)
            self.mean = now if self.mean is None else 0.5 * self.mean + now
            inputs = inputs - self.mean
        elif self.kind == "new buffer":
            if not hasattr(self, "calls"):
                self.register_buffer("calls", torch.zeros(1))
            self.calls = self.calls + 1
            inputs = inputs / self.calls
        elif "first" in self._buffers:
            inputs = inputs + self.first
            del self.first
        output: torch.Tensor = self.layer(inputs + self.table).tanh()
        return output


def twice(kind: str, keep_products: bool) -> None:
    """Compare two steps of two modules with those of plain PyTorch."""
    torch.manual_seed(0)
    plain = nn.Sequential(Keeping(kind), Keeping(kind))
    again = nn.Sequential(Keeping(kind), Keeping(kind))
    again.load_state_dict(plain.state_dict())
    for unit in again:
        recompute(unit, keep_products=keep_products, compares=True)
    for _ in range(3):
        inputs = torch.randn(12, 16)
        for module in (plain, again):
            module.zero_grad()
            (module(inputs) ** 3).sum().backward()
        for expected, found in zip(plain.parameters(), again.parameters(), strict=True):
            assert expected.grad is not None
            assert found.grad is not None
            assert torch.equal(expected.grad, found.grad)


@pytest.mark.parametrize("keep_products", [False, True])
@pytest.mark.parametrize("kind", ["array", "hidden module"])
def test_arrays_and_modules_in_lists_are_given_back(kind: str, keep_products: bool) -> None:
    twice(kind, keep_products)


@pytest.mark.parametrize("keep_products", [False, True])
@pytest.mark.parametrize("kind", ["empty buffer", "new buffer", "buffer that goes"])
def test_a_buffer_may_come_and_go_in_a_call(kind: str, keep_products: bool) -> None:
    twice(kind, keep_products)


@pytest.mark.parametrize("keep_products", [False, True])
@pytest.mark.parametrize("kind", ["pair", "count"])
def test_a_module_that_is_not_given_back_what_it_keeps_is_refused(
    kind: str, keep_products: bool
) -> None:
    with pytest.raises(TaskError, match=r"a Keeping computes something else when .* = false$"):
        twice(kind, keep_products)


class Ending(nn.Module):
    """Takes each scale from an iterator that has one."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.scales = iter([2.0])
        self.error = error

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            output: torch.Tensor = self.layer(inputs * scale)
            return output
        raise self.error("no scale\nof two lines")


def test_a_module_that_fails_when_it_is_called_once_more_is_refused() -> None:
    module = Ending(IndexError)
    recompute(module, compares=True)
    sentence = r"a Ending fails \(IndexError: no scale\) when it is called once more .* = false$"
    with pytest.raises(TaskError, match=sentence):
        module(torch.randn(12, 16))


class Collecting(nn.Module):
    """Adds a loss to what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, inputs: torch.Tensor, losses: Any) -> torch.Tensor:
        output: torch.Tensor = self.layer(inputs).tanh()
        loss = (output**2).mean()
        if isinstance(losses, list):
            losses.append(loss)
        elif isinstance(losses, dict):
            losses["sum"] = losses["sum"] + loss
        else:
            losses.add_(loss.detach())
        return output


@pytest.mark.parametrize("keep_products", [False, True])
@pytest.mark.parametrize("kind", [list, dict])
def test_losses_that_modules_collect_in_an_argument_are_there_once(
    kind: type, keep_products: bool
) -> None:
    torch.manual_seed(0)
    plain = nn.ModuleList([Collecting(), Collecting()])
    again = copy.deepcopy(plain)
    for module in again:
        recompute(module, keep_products=keep_products, compares=True)
    inputs = torch.randn(12, 16)
    found = []
    for modules in (plain, again):
        hidden = inputs
        losses = kind(sum=torch.zeros(())) if kind is dict else []
        for module in modules:
            hidden = module(hidden, losses)
        total = sum(losses if kind is list else losses.values())
        (hidden.sum() + total).backward()
        found.append([total, *(each.grad for each in modules.parameters())])
    assert all(map(torch.equal, *found))


def test_a_module_that_changes_a_tensor_of_its_arguments_each_time_is_refused() -> None:
    module = Collecting()
    recompute(module, compares=True)
    with pytest.raises(TaskError, match=r"a Collecting computes something else .* its inputs"):
        module(torch.randn(12, 16), torch.zeros(()))


def test_a_module_whose_frozen_parameters_are_held_elsewhere_is_compared() -> None:
    module = Keeping("count")
    module.register_parameter("frozen", nn.Parameter(torch.empty(4, device="meta"), False))
    recompute(module, compares=True)
    with pytest.raises(TaskError, match=r"a Keeping computes something else when "):
        module(torch.randn(12, 16))


def test_a_lack_of_memory_is_not_taken_for_what_the_module_keeps() -> None:
    module = Ending(torch.OutOfMemoryError)
    recompute(module, compares=True)
    with pytest.raises(torch.OutOfMemoryError, match="no scale"):
        module(torch.randn(12, 16))


@pytest.mark.parametrize("keep_products", [False, True])
def test_modules_within_each_other_have_the_same_bits(keep_products: bool) -> None:
    """The inner one is not repeated by itself, within what the outer one is compared by."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 16), Attention(0.0))
    again = copy.deepcopy(plain)
    for module in (again, again[1]):
        recompute(module, keep_products=keep_products, compares=True)
    inputs = torch.randn(12, 16)
    expected, _ = trained(plain, inputs)
    found, _ = trained(again, inputs)
    for name, each in expected.items():
        assert torch.equal(found[name], each), name


def test_a_module_within_another_that_is_not_given_back_what_it_keeps_is_refused() -> None:
    module = nn.Sequential(nn.Linear(16, 16), Keeping("count"))
    for each in (module, module[1]):
        recompute(each, compares=True)
    with pytest.raises(TaskError, match=r"a Sequential computes something else when "):
        module(torch.randn(12, 16))


def test_what_watches_calls_sees_those_of_a_repetition_from_where_the_first_began() -> None:
    seen = io.StringIO()  # not a list, of which what the repetition adds would be removed
    module = nn.Sequential(nn.Linear(16, 16))
    module[0].register_forward_pre_hook(lambda *_: print("call", file=seen))
    recompute(module, compares=True)

    def begin() -> Any:
        print("begin", file=seen)
        return lambda: contextlib.nullcontext(print("repeat", file=seen))

    watch_repeats(module, begin)
    module(torch.randn(12, 16))
    module(torch.randn(12, 16))
    assert seen.getvalue().split() == ["begin", "call", "repeat", "call", "call"]


class Doubled(nn.Module):
    """Computes in float32, and returns float64."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(inputs).double()
        return output


def test_outputs_of_float64_are_compared() -> None:
    module = Doubled()
    recompute(module, compares=True)
    assert module(torch.randn(12, 16)).dtype is torch.float64


def test_a_module_within_a_checkpoint_of_the_task_has_the_same_bits() -> None:
    """It counts the tensors that are kept, and repeats its own call without the comparison."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    again = copy.deepcopy(plain)
    recompute(again, compares=True)
    inputs = torch.randn(12, 16)
    for module in (plain, again):
        output = checkpoint(module, inputs, use_reentrant=False)
        output.square().sum().backward()
    for expected, found in zip(plain.parameters(), again.parameters(), strict=True):
        assert expected.grad is not None
        assert found.grad is not None
        assert torch.equal(expected.grad, found.grad)


class Slope(nn.Module):
    """Returns the gradient of a layer by its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = inputs.detach().requires_grad_()
        value = self.layer(inputs).tanh().sum()
        (gradient,) = torch.autograd.grad(value, inputs, create_graph=True)
        return gradient


def test_a_module_that_computes_a_gradient_is_compared() -> None:
    torch.manual_seed(0)
    plain = Slope()
    again = copy.deepcopy(plain)
    recompute(again, compares=True)
    inputs = torch.randn(12, 16)
    for module in (plain, again):
        module(inputs).square().sum().backward()
    assert plain.layer.weight.grad is not None
    assert again.layer.weight.grad is not None
    assert torch.equal(again.layer.weight.grad, plain.layer.weight.grad)
