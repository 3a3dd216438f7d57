"""Checkpoints of one run: parameters, buffers and optimizer state, whatever the sharding.

A checkpoint is written beside the others under a name of its own and becomes `step-N` by moving
one symbolic link: a crash leaves the old one or the new one, never half of either.
"""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import empty as distributed_empty

from isthmus.errors import UserError
from isthmus_datacenter.optim import Updater
from isthmus_datacenter.share import Share

_GROUPS = "optimizer|groups"
_SCALER = "optimizer|scaler"


class Checkpoints:
    """The checkpoints of one run, seen alike by all ranks."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def has(self, step: int) -> bool:
        """Whether a whole checkpoint of that step is here."""
        return (self._link(step) / ".metadata").is_file()

    def save(self, step: int, share: Share, updater: Updater) -> None:
        """Write the checkpoint of a step, replacing an older one. All ranks call this together."""
        name: list[str] = [f"data-{step}-{uuid.uuid4().hex[:8]}"]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(name, src=0)
        target = self.directory / name[0]
        save(
            _state(share, updater),
            storage_writer=FileSystemWriter(target),
            planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        )
        if dist.get_rank() == 0:
            link = self.directory / f"{name[0]}.link"
            link.symlink_to(name[0])
            link.replace(self._link(step))
        dist.barrier()

    def restore(self, step: int, share: Share, updater: Updater) -> None:
        """Put a checkpoint into a share and a *fresh* optimizer. All ranks call this together.

        Raises:
            UserError: there is none of that step.
        """
        if not self.has(step):
            raise UserError(
                f"the datacenter has no checkpoint of step {step} in {self.directory}; "
                "start it with the state directory it had, or send it the model"
            )
        reader = FileSystemReader(self._link(step).resolve())
        known = reader.read_metadata().state_dict_metadata
        state = _template(known, share, updater)
        load(
            state,
            storage_reader=reader,
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        )
        _install(state, updater)

    def keep_only(self, steps: set[int]) -> None:
        """Delete every other checkpoint, and what crashes left behind. Rank 0 calls this."""
        if not self.directory.is_dir():
            return
        links = {self._link(step) for step in steps}
        kept = {link.resolve() for link in links if link.is_symlink()}
        for path in list(self.directory.iterdir()):
            if path.is_symlink() and path not in links:
                path.unlink()
            elif path.is_dir() and not path.is_symlink() and path.resolve() not in kept:
                # A crash in here leaves a directory without a link: removed the next time.
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(path)

    def _link(self, step: int) -> Path:
        return self.directory / f"step-{step}"


def _state(share: Share, updater: Updater) -> dict[str, Any]:
    """Everything that training changes and this rank owns, under flat names.

    The optimizer's state is taken as it is: PyTorch's own helper takes a step with lr=0 to fill
    an optimizer that has none yet, and that step is counted.
    """
    state = _model_state(share, share.copies)
    for name, parameter in updater.named():
        if name not in share.copies:
            for key, value in updater.optimizer.state.get(parameter, {}).items():
                state[f"optimizer|{name}|{key}"] = value
    state[_GROUPS] = updater.groups()
    state[_SCALER] = updater.scaler()
    return state


def _model_state(share: Share, without: AbstractSet[str] = frozenset()) -> dict[str, Any]:
    parameters = {
        f"model|{name}": parameter.detach()
        for name, parameter in share.parameters().items()
        if parameter.requires_grad and name not in without
    }
    return {**parameters, **{f"buffer|{name}": each for name, each in share.buffers().items()}}


def _template(known: Mapping[str, Any], share: Share, updater: Updater) -> dict[str, Any]:
    """Tensors to load into: the share's own, and new ones for the optimizer's state."""
    state: dict[str, Any] = _model_state(share)
    parameters = dict(updater.named())
    for key, stored in known.items():
        kind, _, rest = key.partition("|")
        if kind != "optimizer":
            continue
        if key in (_GROUPS, _SCALER):
            state[key] = None
            continue
        parameter = parameters.get(rest.rpartition("|")[0])
        if parameter is None:
            continue  # another stage's
        if isinstance(stored, TensorStorageMetadata):
            state[key] = _empty(stored, parameter)
        else:
            state[key] = None
    return state


def _empty(stored: TensorStorageMetadata, parameter: torch.Tensor) -> torch.Tensor:
    """Room for one tensor of optimizer state, sharded where its parameter is."""
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


def _install(state: Mapping[str, Any], updater: Updater) -> None:
    """Hand loaded state on; the share's tensors have been loaded in place."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        kind, _, rest = key.partition("|")
        name, separator, field = rest.rpartition("|")
        if kind == "optimizer" and separator:
            found.setdefault(name, {})[field] = value
    updater.install(state[_GROUPS], found, state.get(_SCALER))
