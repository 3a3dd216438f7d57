"""Adding up gradients where every rank holds the whole of what it trains, on processors.

`fully_shard` would do it too, as it does on devices. There its copies of the parameters and of the
gradients cost little, and it hides messages behind the backward pass. Processors have nothing to
hide messages behind, and pay for every copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

PACK_BYTES = 1 << 25
"""Of a message of several gradients, at most."""


class Replicas:
    """Ranks that hold the same parameters and train them on different data."""

    def __init__(self, group: dist.ProcessGroup, pack_bytes: int = PACK_BYTES) -> None:
        self._group, self._pack_bytes = group, pack_bytes
        self._room: dict[torch.dtype, torch.Tensor] = {}
        """Kept: to be given new memory costs as much as to copy into it."""

    def add_up(self, gradients: Sequence[torch.Tensor]) -> None:
        """Put the sum over the replicas in the place of each, the same to the last bit on all.

        All replicas call this together, with tensors of the same shapes and dtypes in one order.
        """
        for pack in _packs(gradients, self._pack_bytes):
            if len(pack) == 1 and pack[0].is_contiguous():
                dist.all_reduce(pack[0], group=self._group)
                continue
            flat = self._flat(pack)
            torch.cat([each.flatten() for each in pack], out=flat)
            dist.all_reduce(flat, group=self._group)
            sums = torch.split(flat, [each.numel() for each in pack])
            torch._foreach_copy_(
                pack, [new.view_as(old) for new, old in zip(sums, pack, strict=True)]
            )

    def _flat(self, pack: Sequence[torch.Tensor]) -> torch.Tensor:
        """Room for the elements of all of them."""
        size, dtype = sum(each.numel() for each in pack), pack[0].dtype
        room = self._room.get(dtype)
        if room is None or room.numel() < size:
            room = self._room[dtype] = torch.empty(size, dtype=dtype)
        return room[:size]


def _packs(tensors: Sequence[torch.Tensor], most: int) -> Iterator[list[torch.Tensor]]:
    """All of them in order, together as long as they are of one dtype and not too large."""
    pack: list[torch.Tensor] = []
    nbytes = 0
    for each in tensors:
        if pack and (each.dtype != pack[0].dtype or nbytes + each.nbytes > most):
            yield pack
            pack, nbytes = [], 0
        pack.append(each)
        nbytes += each.nbytes
    if pack:
        yield pack
