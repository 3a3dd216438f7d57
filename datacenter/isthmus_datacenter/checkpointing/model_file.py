"""The whole model between the ranks and one flat file: each rank touches only what it holds.

The file is `isthmus.tensors.exchange_set.TensorLayout.encode`'s format. It is mapped, not read: no
rank ever holds the whole model, nothing is gathered, and any sharding reads what any other wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from isthmus.tensors.exchange_set import TensorLayout
from isthmus_datacenter.parallel.model_shard import ModelShard


@torch.no_grad()
def load_shards(path: Path, layout: TensorLayout, share: ModelShard) -> None:
    """Copy this rank's slices of the file into its parameters."""
    for shard, part in _pairs(_mapped(path, layout, writable=False), layout, share):
        shard.copy_(part)


@torch.no_grad()
def store_shards(path: Path, layout: TensorLayout, share: ModelShard) -> None:
    """Write this rank's slices into the file, which has its full size already.

    Where several ranks hold the same slice, the first of them writes it.
    """
    writes = {
        name
        for name, parameter in share.parameters().items()
        if name not in share.copies and _is_first_replica(parameter, share.mesh)
    }
    vector = _mapped(path, layout, writable=True)
    for shard, part in _pairs(vector, layout, share, only=writes):
        part.copy_(shard)


def _mapped(path: Path, layout: TensorLayout, *, writable: bool) -> torch.Tensor:
    """The vector (N) inside the file. A private mapping of a file we only read costs no memory."""
    whole = torch.from_file(str(path), shared=writable, size=layout.nbytes, dtype=torch.uint8)
    return whole[len(layout.header) :].view(torch.float32)


def _pairs(
    vector: torch.Tensor, layout: TensorLayout, share: ModelShard, only: set[str] | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each local shard with the part of the vector that it is, both as views."""
    parameters = share.parameters()
    for name, part in layout.parts(vector):
        if name not in parameters or (only is not None and name not in only):
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


def _is_first_replica(parameter: torch.Tensor, mesh: DeviceMesh | None) -> bool:
    """Whether no rank before this one, in its stage, holds the same slice."""
    if mesh is None:
        return True
    assert mesh.mesh_dim_names is not None
    at = {name: mesh.get_local_rank(name) for name in mesh.mesh_dim_names}
    at.pop("pipeline", None)
    if isinstance(parameter, DTensor):
        for name, placement in zip(
            parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True
        ):
            if not placement.is_replicate():
                del at[name]
    return not any(at.values())
