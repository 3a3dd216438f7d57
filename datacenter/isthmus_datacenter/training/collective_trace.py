"""The collectives that one rank issues in a step, in their order, without the other ranks.

Operators of PyTorch's process groups are read where they are dispatched, so that those of sharding,
of DTensor and of a task's own `torch.distributed` calls are seen alike. Groups are told by the
ranks that are in them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]  # missing in its list of exports
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isthmus_datacenter.training import one_rank

Described = tuple[tuple[str, tuple[int, ...]], ...]
"""Types and shapes of tensors."""

_NAMES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "monitored_barrier": "barrier",
    "send": "send",
    "recv": "recv",
    "recv_any_source": "recv_any_source",
}
"""What `torch.distributed` calls the operators of `c10d` and `_c10d_functional`."""
_OWN = frozenset({"torch", "isthmus", "isthmus_datacenter"})
"""Packages whose lines are none of the task's."""
_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
_MESSAGES = frozenset({"send", "recv", "recv_any_source"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedCollective:
    """One collective, or one message from a rank to another, as a rank issues it."""

    operation: str
    """As in `torch.distributed`: all_reduce, all_gather, send."""
    ranks: tuple[int, ...]
    """Ranks of the group, in its order."""
    tensors: Described
    """What the rank gives, or receives if it gives nothing."""
    how: str
    """How numbers are reduced, or which rank is the root; empty for others."""
    peer: int | None
    """The rank that a message goes to or comes from; None for a collective."""
    size: int
    """Bytes of the larger of what the rank gives and receives."""
    place: str
    """The module and the line of the task's code that issue it."""

    @property
    def signature(self) -> tuple[str, str, Described]:
        """What has to be the same on all ranks of the group."""
        tensors = self.tensors
        if self.operation == "all_to_all":
            # Ranks may give each other parts of different sizes.
            tensors = tuple((dtype, shape[1:]) for dtype, shape in tensors)
        return (self.operation, self.how, tensors)

    @property
    def text(self) -> str:
        """For a person."""
        listed = ", ".join(f"{dtype} {list(shape)}" for dtype, shape in self.tensors[:3])
        if len(self.tensors) > 3:
            listed += f" and {len(self.tensors) - 3} more"
        of_what = f" of {listed}" if self.operation != "barrier" else ""
        how = f" ({self.how})" if self.how else ""
        return f"{self.operation}{of_what}{how} in {self.place}"


@contextlib.contextmanager
def trace_collectives(
    stages: Sequence[nn.Module], unnamed: str = ""
) -> Iterator[list[TracedCollective]]:
    """Within it, the collectives of this rank are added to the list in their order.

    Args:
        stages: of this rank, for the names of their modules.
        unnamed: what issues those that no module of these issues; empty for the model or the step.
    """
    trace = _Trace(stages, unnamed)
    modules = torch.nn.modules.module
    # PyTorch enters a mode again for operators of a higher order; the hooks are added once.
    with contextlib.ExitStack() as removed:
        for hook in (
            modules.register_module_forward_pre_hook(trace.begin),
            modules.register_module_forward_hook(trace.end, always_call=True),
        ):
            removed.callback(hook.remove)
        with trace:
            yield trace.found


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch has no types for it
    """Notes collectives, and the modules that are being called."""

    def __init__(self, stages: Sequence[nn.Module], unnamed: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch has no types for it
        self._unnamed = unnamed
        self.found: list[TracedCollective] = []
        self._names = {
            module: name for stage in stages for name, module in stage.named_modules() if name
        }
        self._called: list[nn.Module] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note an operator if it is a collective, and call it."""
        # Its operators on this rank's parts come here by themselves.
        if any(each is DTensor for each in types):
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def begin(self, module: nn.Module, args: Any) -> None:
        """Note that a module is called."""
        self._called.append(module)

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note that the call of a module has ended."""
        # A module whose own hooks failed before it was called is not on the list.
        if module in self._called:
            while self._called.pop() is not module:
                pass

    def _note(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        packet = func.overloadpacket.__name__
        operation = _NAMES.get(packet.removesuffix("_")) or _NAMES.get(packet)
        if operation is None:  # such as wait_tensor
            return
        given = dict(kwargs)
        for parameter, value in zip(func._schema.arguments, args, strict=False):
            given[parameter.name] = value
        ranks = _ranks_of(given)
        if len(ranks) < 2:
            return
        peer = None
        if operation in _MESSAGES:
            at = given.get("dst", given.get("src"))
            peer = None if at is None else ranks[at]
        written, read = _tensors_of(given)
        self.found.append(
            TracedCollective(
                operation=operation,
                ranks=ranks,
                tensors=() if operation == "barrier" else _described(operation, written, read),
                how=_how(operation, given, ranks),
                peer=peer,
                size=max(_bytes(written), _bytes(read)) if operation != "barrier" else 0,
                place=self._place(),
            )
        )

    def _place(self) -> str:
        # Modules whose activations are recomputed are called within it, too.
        backward = torch._C._current_graph_task_id() != -1
        names = (self._names[each] for each in reversed(self._called) if each in self._names)
        place = "the backward pass" if backward else next(names, "")
        if not place:
            place = self._unnamed or ("the model" if self._called else "the step")
        line = _line_of_task()
        return f"{place} ({line})" if line else place


def _line_of_task() -> str:
    """File and line of the innermost call in code that is no installed package."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != one_rank.__name__:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        file = frame.f_code.co_filename
        # A task's file may have a name that begins in the same way.
        is_own = package in _OWN
        is_installed = package in sys.stdlib_module_names or "site-packages" in file
        if not (is_own or is_installed or file.startswith("<")):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _ranks_of(given: dict[str, Any]) -> tuple[int, ...]:
    if "process_group" in given:
        group = dist.ProcessGroup.unbox(given["process_group"])
    elif "group_name" in given:
        group = _resolve_process_group(given["group_name"])
    else:
        return ()
    return tuple(dist.get_process_group_ranks(group))


def _tensors_of(given: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that an operator writes to, and those that it reads."""
    written: list[torch.Tensor] = []
    read: list[torch.Tensor] = []
    for name, value in given.items():
        tensors = [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
        (written if name.startswith("out") else read).extend(tensors)
    return written, read


def _described(
    operation: str, written: Sequence[torch.Tensor], read: Sequence[torch.Tensor]
) -> Described:
    # The outputs of a gather, and the inputs of a scatter, are at its root only.
    described = written if operation == "scatter" else read or written
    return tuple((str(each.dtype).removeprefix("torch."), tuple(each.shape)) for each in described)


def _how(operation: str, given: dict[str, Any], ranks: Sequence[int]) -> str:
    reduced = given.get("reduce_op")
    parts = []
    if reduced is not None:
        parts.append(_reduction(reduced))
    root = given.get("root_rank", given.get("src"))
    if operation in _ROOTED and root is not None:
        parts.append(f"root {ranks[root]}")
    return ", ".join(parts)


def _reduction(reduced: Any) -> str:
    """The name of a reduction, which operators have as a text or as an object."""
    if isinstance(reduced, str):
        return reduced.upper()
    return str(dist.ReduceOp.RedOpType(reduced.op()).name)


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


def by_group(
    found: Sequence[TracedCollective],
) -> Iterator[tuple[tuple[int, ...], list[TracedCollective]]]:
    """The collectives of each group, in their order; messages between two ranks are left out."""
    groups: dict[tuple[int, ...], list[TracedCollective]] = {}
    for each in found:
        if each.operation not in _MESSAGES:
            groups.setdefault(each.ranks, []).append(each)
    yield from groups.items()
