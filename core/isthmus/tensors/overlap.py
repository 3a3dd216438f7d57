"""Parameters whose elements share memory, which no exchange of vectors can keep equal.

A step in place of one element of such a parameter changes others as well, while the exchange set,
sharded models and optimizers treat each element as its own. Tied weights, one parameter in several
places, are no such case.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch


@dataclasses.dataclass(frozen=True)
class _Extent:
    """The bytes of a storage that a tensor reaches."""

    name: str
    tensor: torch.Tensor
    start: int
    end: int
    """One beyond the last."""


def explain_overlap(
    trained: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]
) -> str | None:
    """Name a trained tensor that shares memory within itself or with another one, or None.

    Args:
        trained: tensors that participants change and exchange, by name; each object once.
        others: the rest of the model's tensors, by name; they may share memory among themselves.
    """
    storages: dict[int, list[_Extent]] = {}
    for name, tensor in [*trained.items(), *others.items()]:
        if tensor.numel() and (extent := _extent(name, tensor)) is not None:
            storages.setdefault(tensor.untyped_storage().data_ptr(), []).append(extent)
    for name, tensor in trained.items():
        if tensor.numel() and _repeats_elements(tensor):
            return (
                f"elements of {name!r} share memory with each other, as after expand(); give each "
                "its own by .clone()"
            )
    for extents in storages.values():
        extents.sort(key=lambda each: each.start)
        reaching: list[_Extent] = []
        for extent in extents:
            reaching = [each for each in reaching if each.end > extent.start]
            for other in reaching:
                either_trained = extent.name in trained or other.name in trained
                if either_trained and _share_elements(other, extent):
                    first, second = sorted([other.name, extent.name])
                    return (
                        f"{first!r} and {second!r} share memory without being one parameter, so "
                        "that a step on one changes the other; give each its own by .clone(), or "
                        "assign the same parameter to both"
                    )
            reaching.append(extent)
    return None


def _extent(name: str, tensor: torch.Tensor) -> _Extent | None:
    """Where a tensor is in its storage; None for kinds of tensors without one of this process."""
    if tensor.is_meta or tensor.layout is not torch.strided:
        return None
    try:
        pointer = tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a subclass that wraps other tensors
        return None
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    last = sum(
        (count - 1) * step for count, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return _Extent(name, tensor, start, start + (last + 1) * size) if pointer else None


def _repeats_elements(tensor: torch.Tensor) -> bool:
    """Whether two indices of a tensor are the same element."""
    if tensor.layout is not torch.strided or _is_nested(tensor):
        return False
    offsets = _element_offsets(tensor)
    return len(set(offsets.tolist())) < offsets.numel()


def _is_nested(tensor: torch.Tensor) -> bool:
    """Whether each step along one dimension exceeds all of the shorter ones.

    Then no element can be reached twice. It holds for all tensors but unusual views.
    """
    reach = 0
    dimensions = zip(tensor.shape, tensor.stride(), strict=True)
    for count, step in sorted(dimensions, key=lambda each: each[1]):
        if count == 1:
            continue
        if step <= reach:
            return False
        reach += (count - 1) * step
    return True


def _share_elements(first: _Extent, second: _Extent) -> bool:
    """Whether two tensors, whose bytes interleave, have an element in common."""
    if first.tensor.element_size() != second.tensor.element_size():
        return True  # two dtypes on one memory: no slice of one is a tensor of the other
    one = _element_offsets(first.tensor)
    other = _element_offsets(second.tensor)
    return bool(torch.isin(one, other).any())


def _element_offsets(tensor: torch.Tensor) -> torch.Tensor:
    """The position of each element in the storage, int64 (elements)."""
    offsets = torch.tensor([tensor.storage_offset()])
    for count, step in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = (offsets[:, None] + torch.arange(count) * step).flatten()
    return offsets
