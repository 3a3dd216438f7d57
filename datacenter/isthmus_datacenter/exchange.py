"""The whole model between the ranks and one flat file: each rank touches only what it holds.

The file is `isthmus.exchange.Layout.encode`'s format. It is mapped, not read: no rank ever holds
the whole model, nothing is gathered, and any sharding reads what any other wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from isthmus.exchange import Layout


@torch.no_grad()
def load_shards(path: Path, layout: Layout, model: nn.Module) -> None:
    """Copy this rank's slices of the file into the model's parameters."""
    for shard, part in _pairs(_mapped(path, layout, writable=False), layout, model):
        shard.copy_(part)


@torch.no_grad()
def store_shards(path: Path, layout: Layout, model: nn.Module) -> None:
    """Write this rank's slices into the file, which has its full size already.

    Where several ranks hold the same slice, the first of them writes it.
    """
    parameters = dict(model.named_parameters())
    writes = {name for name, parameter in parameters.items() if _is_first_replica(parameter)}
    vector = _mapped(path, layout, writable=True)
    for shard, part in _pairs(vector, layout, model, only=writes):
        part.copy_(shard)


def _mapped(path: Path, layout: Layout, *, writable: bool) -> torch.Tensor:
    """The vector (N) inside the file. A private mapping of a file we only read costs no memory."""
    whole = torch.from_file(str(path), shared=writable, size=layout.nbytes, dtype=torch.uint8)
    return whole[len(layout.header) :].view(torch.float32)


def _pairs(
    vector: torch.Tensor, layout: Layout, model: nn.Module, only: set[str] | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each local shard with the part of the vector that it is, both as views."""
    parameters = dict(model.named_parameters())
    for name, part in layout.parts(vector):
        if only is not None and name not in only:
            continue
        parameter = parameters[name].detach()
        if not isinstance(parameter, DTensor):
            yield parameter, part
            continue
        sizes, offsets = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        if 0 in sizes:
            continue
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        yield parameter.to_local(), part


def _is_first_replica(parameter: torch.Tensor) -> bool:
    if not isinstance(parameter, DTensor):
        return True
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None  # every rank is on the mesh
    return all(
        at == 0
        for at, placement in zip(coordinate, parameter.placements, strict=True)
        if placement.is_replicate()
    )
