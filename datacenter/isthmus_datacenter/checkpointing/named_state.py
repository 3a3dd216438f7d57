"""The state of a shard and its optimizer under flat names, as in a sharded checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import empty as distributed_empty

from isthmus_datacenter.parallel.model_shard import ModelShard
from isthmus_datacenter.parallel.optimizer import ShardedOptimizer

_GROUPS = "optimizer|groups"
_SCALER = "optimizer|scaler"


def named_state(shard: ModelShard, optimizer: ShardedOptimizer) -> dict[str, Any]:
    """Everything that training changes and this rank owns, under flat names.

    The optimizer's state is read directly: PyTorch's own helper takes a step with lr=0 to fill
    an optimizer that has no state yet, and that step is counted.
    """
    copies = shard.tied.copies
    state = _model_state(shard, copies)
    for name, parameter in optimizer.named_parameters():
        if name not in copies:
            for key, value in optimizer.state_of(parameter).items():
                state[f"optimizer|{name}|{key}"] = value
    state[_GROUPS] = optimizer.group_options()
    state[_SCALER] = optimizer.scaler_state()
    return state


def _model_state(shard: ModelShard, excluded: AbstractSet[str] = frozenset()) -> dict[str, Any]:
    parameters = {
        f"model|{name}": parameter.detach()
        for name, parameter in shard.parameters().items()
        if parameter.requires_grad and name not in excluded
    }
    return {**parameters, **{f"buffer|{name}": each for name, each in shard.buffers().items()}}


def empty_state(
    stored: Mapping[str, Any], shard: ModelShard, optimizer: ShardedOptimizer
) -> dict[str, Any]:
    """Tensors to load into: the shard's own, and new ones for the optimizer's state."""
    state: dict[str, Any] = _model_state(shard)
    parameters = dict(optimizer.named_parameters())
    for key, metadata in stored.items():
        kind, _, rest = key.partition("|")
        if kind != "optimizer":
            continue
        if key in (_GROUPS, _SCALER):
            state[key] = None
            continue
        parameter = parameters.get(rest.rpartition("|")[0])
        if parameter is None:
            continue  # it is in another stage
        if isinstance(metadata, TensorStorageMetadata):
            state[key] = _empty_optimizer_tensor(metadata, parameter)
        else:
            state[key] = None
    return state


def _empty_optimizer_tensor(stored: TensorStorageMetadata, parameter: torch.Tensor) -> torch.Tensor:
    """An uninitialised tensor of optimizer state, sharded as its parameter where sizes agree."""
    dtype = stored.properties.dtype
    if stored.size == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype)
    if not stored.size or not isinstance(parameter, DTensor):
        return torch.empty(stored.size, dtype=dtype)
    placements = [
        placement
        if isinstance(placement, Shard)
        and placement.dim < len(stored.size)
        and stored.size[placement.dim] == parameter.shape[placement.dim]
        else Replicate()
        for placement in parameter.placements
    ]
    return distributed_empty(
        *stored.size, dtype=dtype, device_mesh=parameter.device_mesh, placements=placements
    )


def load_optimizer(state: Mapping[str, Any], optimizer: ShardedOptimizer) -> None:
    """Give loaded state to the optimizer; the shard's tensors have been loaded in place."""
    by_parameter: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        kind, _, rest = key.partition("|")
        name, separator, field = rest.rpartition("|")
        if kind == "optimizer" and separator:
            by_parameter.setdefault(name, {})[field] = value
    optimizer.load_state(state[_GROUPS], by_parameter, state.get(_SCALER))
