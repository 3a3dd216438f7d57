"""Divide the experts of mixtures over ranks that train on different examples.

The *experts* of a mixture are one module with stacked parameters, as in `transformers` (Mixtral,
Qwen3-MoE): their first dimension is the expert, and `forward(hidden_states, top_k_index,
top_k_weights)` returns for each token the weighted sum of what its experts give. Each rank of a
group keeps some of the experts whole, and sends each token to the ranks that have its experts
(all-to-all, Lepikhin et al. 2021), in parts as uneven as the routing is. No token is left out, so
that the ranks compute what one process computes for any routing. The weights are applied where the
token came from, and are not sent.

Of the split sizes, which follow from values, each call reads two numbers for each rank of the
group from the device.

`transformers` (5.23) has the same exchange for its own classes; this one also takes those of a
task and of other versions, and says of each whether its `forward` is of that form
(`check_experts`).

Shape legend: T tokens of this rank, K experts of a token, H width, E experts, R ranks of a group,
N tokens for the experts of this rank.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils.parametrize import is_parametrized

from isthmus.errors import TaskError
from isthmus_datacenter.parallel.equivalence_check import first_line, outputs_match
from isthmus_datacenter.parallel.random_draws import FixedDraws
from isthmus_datacenter.rank_messages import RankMessages

_FORM = "forward(hidden_states, top_k_index, top_k_weights)"
_TOLERANCE = 1e-3
"""Difference allowed relative to the largest element: sums in another order."""
_ROUNDING = 16.0
"""Difference allowed in units of the precision of the parameters' type, where that is lower."""
_TOKENS = 3
"""Most tokens of a rank in a check; others have fewer."""

_Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes that a module has by its base class."""

_FAULTS: RankMessages[str] = RankMessages("experts", str)


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of stacked experts, by name."""
    return {name: each for name, each in model.named_modules() if _are_experts(each)}


def _are_experts(module: nn.Module) -> bool:
    if not isinstance(getattr(module, "num_experts", None), int):
        return False
    if not any(True for _ in module.parameters(recurse=False)):
        return False
    names = list(inspect.signature(module.forward).parameters)
    # The others have several names; what they mean is checked.
    return len(names) == 3 and names[0] == "hidden_states"


def refuse_undividable(model: nn.Module, degree: int) -> None:
    """Refuse a model whose experts so many ranks cannot divide among themselves.

    Raises:
        TaskError: it has none, their number cannot be divided, they have other parameters than
            stacks of their own, or a buffer that is stacked by expert.
    """
    experts = find_experts(model)
    if not experts:
        raise TaskError(
            f"expert_parallel={degree}: the model has no experts, which are modules with "
            f"num_experts, parameters stacked by expert and {_FORM}, as in "
            "transformers; set expert_parallel = 1"
        )
    uses = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )
    for name, module in experts.items():
        count: Any = module.num_experts
        if count % degree:
            raise TaskError(
                f"expert_parallel={degree} cannot divide the {count} experts of {name!r} into "
                "equal parts; set it to a divisor of their number"
            )
        for key, buffer in module.named_buffers():
            if count in buffer.shape:
                raise TaskError(
                    f"expert_parallel={degree}: the experts {name!r} have the buffer {key!r} of "
                    f"shape {tuple(buffer.shape)}, in which a rank would look for its own experts "
                    "in the places of others; keep it in the module that calls them, or set "
                    "expert_parallel = 1"
                )
        own = dict(module.named_parameters(recurse=False))
        for key, parameter in module.named_parameters():
            stacked = key in own and parameter.ndim >= 1 and parameter.shape[0] == count
            if not stacked or uses[id(parameter)] > 1:
                what = "is used in other modules too" if stacked else "is not stacked by expert"
                raise TaskError(
                    f"expert_parallel={degree}: parameter '{name}.{key}' {what}, so that ranks "
                    "cannot have it for their own experts only; set expert_parallel = 1"
                )


def divide_experts(module: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
    """Keep this rank's experts only, and have its calls exchange tokens with the other ranks.

    Args:
        module: experts that all ranks of the mesh have whole, see `refuse_undividable`.
        mesh: the ranks among which they are divided, with one dimension.
        device: where the rank's experts are placed, if they have values.
    """
    rank = mesh.get_local_rank()
    for name, parameter in list(module.named_parameters(recurse=False)):
        own = parameter.detach().chunk(mesh.size())[rank].clone()
        if not own.is_meta:
            own = own.to(device)
        shard = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
        setattr(module, name, nn.Parameter(shard, requires_grad=parameter.requires_grad))
    module.forward = _DividedExperts(module, mesh)


class _DividedExperts:
    """The `forward` of experts of which each rank has a part."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self._module = module
        self._forward: _Forward = module.forward
        self._signature = inspect.signature(module.forward)
        self._group = mesh.get_group()
        self._ranks = mesh.size()
        count: Any = module.num_experts
        self._count: int = count
        self._own = self._count // self._ranks
        """Experts of each rank."""

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Shapes (T, H), (T, K) and (T, K) in, (T, H) out.

        Raises:
            TaskError: the arguments have other shapes, an index is that of no expert, or the
                parameters are computed from others.
        """
        if is_parametrized(self._module):
            raise TaskError(
                f"expert_parallel={self._ranks}: parameters of experts are computed from others "
                "(torch.nn.utils.parametrize), as by LoRA on experts, and a rank has them for its "
                "own experts only; set expert_parallel = 1"
            )
        given = self._signature.bind(*args, **kwargs).arguments
        hidden_states, top_k_index, top_k_weights = given.values()
        shapes = [tuple(each.shape) for each in given.values()]
        fit = len(shapes[0]) == len(shapes[1]) == 2 and shapes[0][0] == shapes[1][0]
        if not fit or shapes[1] != shapes[2]:
            given_shapes = ", ".join(map(str, shapes))
            raise TaskError(
                f"expert_parallel={self._ranks}: experts are called with tensors of the shapes "
                f"{given_shapes}, and ranks exchange tokens of the shape (tokens, width), whose "
                "experts and weights both have the shape (tokens, choices); call them with these, "
                "or set expert_parallel = 1"
            )
        chosen = top_k_index.flatten().long()
        # Grouped by expert, and so by the rank that has it.
        order = chosen.argsort(stable=True)
        # The last place counts choices of no expert, which only the host can refuse.
        is_expert = (chosen >= 0) & (chosen < self._count)
        places = torch.where(is_expert, chosen, self._count)
        counts = chosen.new_zeros(self._count + 1)
        counts.scatter_add_(0, places, torch.ones_like(chosen))
        to_experts = counts[:-1].contiguous()
        from_ranks = torch.empty_like(to_experts)
        dist.all_to_all_single(from_ranks, to_experts, group=self._group)
        by_rank = torch.stack([to_experts, from_ranks]).view(2, self._ranks, self._own).sum(-1)
        if isinstance(by_rank, FakeTensor):
            sent, received = self._even_parts(len(chosen))
        else:
            sent, received = by_rank.tolist()
        if sum(sent) < len(chosen):
            raise TaskError(
                f"expert_parallel={self._ranks}: a token was given an expert that is none of 0 to "
                f"{self._count - 1}, by which some experts leave tokens out; give such a choice "
                "the weight 0, or set expert_parallel = 1"
            )
        rows = hidden_states[order // top_k_index.shape[-1]]
        rows = _exchange(rows, received, sent, self._group)
        experts = torch.arange(self._own, device=rows.device).repeat(self._ranks)
        outputs = self._call(rows, experts.repeat_interleave(from_ranks, output_size=len(rows)))
        outputs = _exchange(outputs, sent, received, self._group)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        by_token = outputs[back].view(*top_k_index.shape, outputs.shape[-1])  # (T, K, H)
        weighted = by_token * top_k_weights.unsqueeze(-1)
        output: torch.Tensor = weighted.sum(1).to(hidden_states.dtype)
        return output

    def _even_parts(self, choices: int) -> tuple[list[int], list[int]]:
        """What is sent to and received from each rank, if tokens are spread evenly."""
        each, more = divmod(choices, self._ranks)
        own = each + (dist.get_rank(self._group) < more)
        return [each + (rank < more) for rank in range(self._ranks)], [own] * self._ranks

    def _call(self, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """What this rank's experts give for tokens (N, H), each with the number of its expert."""
        none = not len(rows)
        if none:
            # Without a token nothing here would be part of the backward pass, in which the other
            # ranks wait for this one. The gradients of a row that is left out are zero.
            rows = rows.sum(0, keepdim=True)
            experts = experts.new_zeros(1)
        ones = torch.ones((len(rows), 1), dtype=rows.dtype, device=rows.device)
        with self._alone():
            outputs = self._forward(rows, experts.unsqueeze(-1), ones)
        return outputs[:0] if none else outputs

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Within it the module has this rank's experts and knows of no others."""
        module: Any = self._module
        parameters = dict(module._parameters)
        count = module.num_experts
        try:
            for name, each in parameters.items():
                if isinstance(each, DTensor):
                    module._parameters[name] = _averaged_gradient(each.to_local(), self._ranks)
            module.num_experts = self._own
            yield
        finally:
            module._parameters.update(parameters)
            module.num_experts = count


class _Exchange(torch.autograd.Function):
    """All-to-all of rows; their gradients go back the same way."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, received: list[int], sent: list[int], group: Any
    ) -> torch.Tensor:
        """Rows (sum of `sent`, H), grouped by rank, in; rows (sum of `received`, H) out."""
        ctx.received = received
        ctx.sent = sent
        ctx.group = group
        return _exchanged(rows, received, sent, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Gradients of the rows that were received in, of those that were sent out."""
        return _exchanged(gradients[0], ctx.sent, ctx.received, ctx.group), None, None, None


class _AveragedGradient(torch.autograd.Function):
    """A parameter, whose gradient is divided by a number.

    An expert's gradient has the tokens of all ranks that divide the experts. `fully_shard` takes
    the mean over the replicas that have the same experts, and for the mean over all of them there
    is this division: with `set_gradient_divide_factor` it divides twice where a mesh has one shard.
    """

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, ranks: int) -> torch.Tensor:
        """Any shape."""
        ctx.ranks = ranks
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The gradient of a mean of so many ranks' losses."""
        return gradients[0] / ctx.ranks, None


def _exchanged(
    rows: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    output = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
    return output


_exchange: Callable[..., torch.Tensor] = _Exchange.apply
_averaged_gradient: Callable[..., torch.Tensor] = _AveragedGradient.apply


# -- check ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Routing:
    """Tokens of all ranks of a group."""

    hidden: torch.Tensor
    """Shape (T of all ranks, H)."""
    index: torch.Tensor
    """Shape (T of all ranks, K)."""
    weights: torch.Tensor
    """Shape (T of all ranks, K)."""
    counts: list[int]
    """Tokens of each rank."""


def are_alike(first: nn.Module, second: nn.Module) -> bool:
    """Whether two modules compute the same from the same values, as far as one can see.

    They are of one class, have tensors of the same shapes, and all else they have is the same.
    """
    if type(first) is not type(second):
        return False
    for tensors in ("_parameters", "_buffers"):
        own, other = ({**vars(each)[tensors]} for each in (first, second))
        if own.keys() != other.keys() or any(
            getattr(own[name], what, None) != getattr(other[name], what, None)
            for name in own
            for what in ("shape", "dtype")
        ):
            return False
    if any(
        not torch.equal(own, other)
        for own, other in zip(
            first.buffers(recurse=False), second.buffers(recurse=False), strict=True
        )
    ):
        return False
    if first._modules.keys() != second._modules.keys() or not all(
        own is other or (own is not None and other is not None and are_alike(own, other))
        for own, other in zip(first._modules.values(), second._modules.values(), strict=True)
    ):
        return False
    settings, others = (
        {name: value for name, value in vars(each).items() if name not in _OF_EVERY_MODULE}
        for each in (first, second)
    )
    return settings.keys() == others.keys() and all(
        _are_same(value, others[name]) for name, value in settings.items()
    )


def _are_same(first: object, second: object) -> bool:
    plain = isinstance(first, bool | int | float | str) and type(first) is type(second)
    return first is second or (plain and first == second)


def check_experts(name: str, module: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
    """Compare experts that ranks divide with the same experts whole.

    A copy of the module with random parameters gets a few tokens on each rank, also some with one
    expert for all, in training and in evaluation mode, with random draws replaced by their means.
    Outputs and gradients have to agree. All ranks of the mesh call this together.

    Args:
        name: of the module, for the error.
        module: experts, whole; they need no values.
        mesh: the ranks among which they are to be divided, with one dimension.
        device: where they are called.

    Raises:
        TaskError: they differ, on some rank.
    """

    def refuse_together(fault: str) -> None:
        # Each message to the others is sent by all ranks: one that had a fault would leave it out.
        fault = next(filter(None, _FAULTS.all_gather(fault, mesh.get_group())), "")
        if fault:
            raise TaskError(
                f"expert_parallel={mesh.size()}: the experts {name!r} {fault}; set "
                "expert_parallel = 1"
            )

    comparison: _Comparison | None = None
    fault = ""
    try:
        comparison = _Comparison(module, mesh, device)
    except Exception as error:  # noqa: BLE001 - the code of a task may raise anything
        fault = f"fail ({first_line(error)})"
    refuse_together(fault)
    assert comparison is not None
    for routing in comparison.routings():
        for training in (True, False):
            refuse_together(comparison.call_whole(routing, training=training))
            refuse_together(comparison.call_divided(routing, training=training))


class _Comparison:
    """Two copies of experts with the same random values, whole and divided."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
        """Copy a module, whose own parameters need no values, without a message to other ranks."""
        self._generator = torch.Generator().manual_seed(0)
        self._mesh = mesh
        self._device = device
        values = {
            id(each): nn.Parameter(_random(each, self._generator).to(device, each.dtype))
            for each in module.parameters(recurse=False)
        }
        self._whole = copy.deepcopy(module, values).to(device)
        self._divided = copy.deepcopy(self._whole)
        self._failures = _failing_quietly(self._divided)
        divide_experts(self._divided, mesh, device)
        self._dtype = next(module.parameters()).dtype
        self._buffers = {name: each.clone() for name, each in self._whole.named_buffers()}
        self._expected: dict[str, torch.Tensor] = {}

    def routings(self) -> Iterator[_Routing]:
        """Tokens of all ranks, the same on all of them."""
        return _routings(self._whole, self._mesh.size(), self._device, self._dtype, self._generator)

    def call_whole(self, routing: _Routing, *, training: bool) -> str:
        """Call the whole experts for the tokens of all ranks; returns what is wrong, or nothing."""
        self._whole.train(training)
        try:
            self._expected = _results(self._whole, routing.hidden, routing.index, routing.weights)
        except Exception as error:  # noqa: BLE001 - the code of a task may raise anything
            return f"fail ({first_line(error)})"
        for name, each in self._whole.named_buffers():
            if not torch.equal(each, self._buffers[name]):
                return f"change their buffer {name!r}, which ranks do not exchange"
        return ""

    def call_divided(self, routing: _Routing, *, training: bool) -> str:
        """Call the divided experts for this rank's tokens, as all ranks do; returns the same."""
        rank, ranks = self._mesh.get_local_rank(), self._mesh.size()
        parts = [
            torch.split(each, routing.counts)[rank]
            for each in (routing.hidden, routing.index, routing.weights)
        ]
        self._divided.train(training)
        try:
            own = _results(self._divided, *parts)
        except Exception as error:  # noqa: BLE001 - as above
            self._failures.append(first_line(error))
            own = {}
        if self._failures:
            return f"fail ({self._failures[0]})"
        tolerance = max(_TOLERANCE, _ROUNDING * torch.finfo(self._dtype).eps)
        mode = " in training" if training else ""
        for what, whole in self._expected.items():
            found = own.get(what)
            if what.startswith("parameter"):
                same = whole.chunk(ranks)[rank]
                # As `fully_shard` is given it: of the mean loss of the ranks.
                found = found.to_local() * ranks if isinstance(found, DTensor) else None
                difference = f"{what} another gradient"
            else:
                same = torch.split(whole, routing.counts)[rank]
                difference = f"other {what}" if what == "outputs" else f"another {what}"
            if not outputs_match(same, found, tolerance):
                return f"give {difference} divided than whole{mode}"
        return ""


def _failing_quietly(module: nn.Module) -> list[str]:
    """Have a module that fails return what it was given, so that no rank waits for this one.

    Returns:
        What it fails with, from now on.
    """
    failures: list[str] = []
    forward = module.forward

    @functools.wraps(forward)
    def guarded(rows: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        try:
            output: torch.Tensor = forward(rows, *more)
            if output.shape == rows.shape:
                return output
            failures.append(f"the output of {len(rows)} tokens has shape {tuple(output.shape)}")
        except Exception as error:  # noqa: BLE001 - the code of a task may raise anything
            failures.append(first_line(error))
        return rows.clone()

    module.forward = guarded
    return failures


def _random(parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Values of a size that keeps activations near one."""
    values = torch.randn(parameter.shape, generator=generator)
    return values / math.sqrt(parameter.shape[-1])


def _routings(
    whole: nn.Module,
    ranks: int,
    device: torch.device,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Iterator[_Routing]:
    """Tokens with random experts, and tokens of which all have the first one."""
    count: Any = whole.num_experts
    width = _width(whole)
    counts = [1 + (rank + 1) % _TOKENS for rank in range(ranks)]
    for together in (False, True):
        tokens = sum(counts)
        hidden = torch.randn(tokens, width, generator=generator).to(device, dtype)
        chosen = 1 if together else min(2, count)
        index = torch.rand(tokens, count, generator=generator).argsort(1)[:, :chosen]
        if together:
            index = torch.zeros_like(index)
        weights = torch.rand(tokens, chosen, generator=generator).to(device, dtype)
        yield _Routing(hidden, index.to(device), weights, counts)


def _width(whole: nn.Module) -> int:
    """H, which `transformers` names in one of two ways, and of one's own in one of them."""
    for name in ("hidden_dim", "hidden_size"):
        width = getattr(whole, name, None)
        if isinstance(width, int):
            return width
    raise ValueError("they have no attribute hidden_dim, the width of a token")


def _results(
    experts: nn.Module,
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Outputs and gradients of one call, for a gradient of the outputs that tokens determine."""
    hidden = hidden.detach().clone().requires_grad_()
    weights = weights.detach().clone().requires_grad_()
    for each in experts.parameters():
        each.grad = None
        each.requires_grad_()
    with FixedDraws(experts):
        output = experts(hidden, index, weights)
        output.backward(hidden.detach().cos())
    results = {
        "outputs": output.detach(),
        "gradient of tokens": hidden.grad,
        "gradient of weights": weights.grad,
        **{f"parameter {name!r}": each.grad for name, each in experts.named_parameters()},
    }
    return {name: each for name, each in results.items() if each is not None}
