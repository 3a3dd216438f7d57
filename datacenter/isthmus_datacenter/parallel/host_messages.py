"""The messages of `fully_shard` between processors, which end before the call returns.

PyTorch's are made for GPUs, where messages overlap with computation: they hold several blocks of
layers at a time, so that one is sent while another is used. On processors nothing overlaps, and
what is held for it is only memory. Here at most two copies of a block's parameters or gradients
are there at any time, where it was four. The numbers are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from isthmus.system.process import trim_freed_memory

GATHERED_BYTES = 16 << 20
"""The most that is gathered in one message: Gloo receives it elsewhere and then copies it."""


TRIMMED_BYTES = 64 << 20
"""Gradients that are reduced until freed memory is returned again: it takes up to 2 ms."""


class FreedActivations:
    """Returns activations to the kernel that a backward pass has freed, for all units of a rank.

    Most are too small to be returned by themselves, and the gradients that follow are too large to
    take their place.
    """

    def __init__(self) -> None:
        self._reduced = 0
        """Bytes of gradients that were reduced since."""

    def after_reducing(self, nbytes: int) -> None:
        """Return them if enough gradients were reduced, with these bytes."""
        self._reduced += nbytes
        if self._reduced >= TRIMMED_BYTES:
            self._reduced = 0
            trim_freed_memory()


def send_without_overlap(module: FSDPModule, freed: FreedActivations | None = None) -> None:
    """Have a unit of `fully_shard` keep nothing for messages that overlap with computation.

    Args:
        module: the unit.
        freed: returns freed activations; None keeps them for the next step.
    """
    module.set_custom_all_gather(_AllGather())
    module.set_custom_reduce_scatter(_ReduceScatter(freed))
    # By default the unit before it is gathered while gradients of this one are computed. A unit
    # that is gathered already is not gathered again.
    module.set_modules_to_backward_prefetch([module])


class _Allocates:
    """Memory for messages, as PyTorch allocates it."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Allocates, AllGather):
    """Gathers into the output in parts, so that a second copy of it is never whole."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        # Nothing is gathered of a unit whose frozen parameters have no elements.
        rows = output_tensor.view(group.size(), input_tensor.numel())
        length = max(1, GATHERED_BYTES // (group.size() * output_tensor.element_size()))
        for start in range(0, input_tensor.numel(), length):
            part = slice(start, start + length)
            dist.all_gather([row[part] for row in rows], input_tensor[part], group=group)
        return None


class _ReduceScatter(_Allocates, ReduceScatter):
    """Reduces the input in place, and frees it.

    Gloo reduces a copy, of which it returns a part; `fully_shard` keeps the input until the next
    unit has its gradients.
    """

    def __init__(self, freed: FreedActivations | None) -> None:
        self._freed = freed

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        dist.all_reduce(input_tensor, op=op, group=group)
        output_tensor.copy_(input_tensor.view(group.size(), output_tensor.numel())[group.rank()])
        nbytes = input_tensor.nbytes
        input_tensor.untyped_storage().resize_(0)
        if self._freed is not None:
            self._freed.after_reducing(nbytes)
        return None
