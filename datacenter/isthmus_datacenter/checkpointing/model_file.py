"""Transfer the whole model between the ranks and one flat file: each rank its own slices.

The file has the format of `isthmus.tensors.exchange_set.TensorLayout.encode`. It is memory-mapped:
no rank ever has the whole model in its own memory, nothing is gathered, and any sharding can read
what any other wrote.
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
def load_shards(path: Path, layout: TensorLayout, shard: ModelShard) -> None:
    """Copy this rank's slices of the file into its parameters."""
    vector = _mapped_vector(path, layout, writable=False)
    for local_part, file_part in _matching_parts(vector, layout, shard):
        local_part.copy_(file_part)


@torch.no_grad()
def store_shards(path: Path, layout: TensorLayout, shard: ModelShard) -> None:
    """Write this rank's slices into the file, which has its full size already.

    Where several ranks have the same slice, the first of them writes it.
    """
    written = {
        name
        for name, tensor in shard.tensors().items()
        if name not in shard.tied.copies and _is_first_replica(tensor, shard.mesh_of(tensor))
    }
    vector = _mapped_vector(path, layout, writable=True)
    for local_part, file_part in _matching_parts(vector, layout, shard, only=written):
        file_part.copy_(local_part)


def _mapped_vector(path: Path, layout: TensorLayout, *, writable: bool) -> torch.Tensor:
    """The vector (N) in the file. A private mapping for reading uses no memory of its own."""
    content = torch.from_file(str(path), shared=writable, size=layout.nbytes, dtype=torch.uint8)
    return content[len(layout.header) :].view(torch.float32)


def _matching_parts(
    vector: torch.Tensor, layout: TensorLayout, shard: ModelShard, only: set[str] | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of a rank's part of a parameter and the same part of the vector, both as views."""
    tensors = shard.tensors()
    for name, part in layout.parts(vector):
        if name not in tensors or (only is not None and name not in only):
            continue
        parameter = tensors[name].detach()
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
    """Whether no rank before this one, in its pipeline stage, has the same slice."""
    if mesh is None:
        return True
    assert mesh.mesh_dim_names is not None
    coordinates = {name: mesh.get_local_rank(name) for name in mesh.mesh_dim_names}
    coordinates.pop("pipeline", None)
    if isinstance(parameter, DTensor):
        for name, placement in zip(
            parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True
        ):
            if not placement.is_replicate():
                del coordinates[name]
    return not any(coordinates.values())
