"""Sharded checkpoints of a run: parameters, buffers and optimizer state, for any sharding.

A checkpoint is written in the background into a new directory, and becomes `step-N` by moving one
symbolic link when every rank has written its part: a crash leaves the old checkpoint or the new
one, never half of either.

Within a round, checkpoints are linked as `mid-round-LINEAGE-N`. The lineage identifies everything
that the state at step N follows from, so that no round resumes from the state of another one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import shutil
import uuid
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import empty as distributed_empty

from isthmus.errors import DamagedError, UserError
from isthmus_datacenter.checkpointing.digests import HashingWriter, check_files, is_complete
from isthmus_datacenter.parallel.model_shard import ModelShard
from isthmus_datacenter.parallel.optimizer import ShardedOptimizer

log = logging.getLogger(__name__)

_GROUPS = "optimizer|groups"
_SCALER = "optimizer|scaler"
_RANK_PROGRESS = "rank-progress"


@dataclasses.dataclass(frozen=True)
class MidRoundCheckpoint:
    """Identifies a checkpoint within a round."""

    lineage: str
    """Hexadecimal digits: a digest of what the round started from."""
    step: int

    @property
    def link(self) -> str:
        """Name of its symbolic link."""
        return f"mid-round-{self.lineage}-{self.step}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankProgress:
    """What a rank needs to resume within a round, in addition to model and optimizer state."""

    position: str
    """Position of the rank on the mesh without the tensor axis."""
    saves: bool
    """Whether this rank saves it: one of the tensor-parallel ranks at a position does."""
    generators: dict[str, Any]
    """States of the random number generators."""
    loss_sum: float
    """Losses of the round so far, of the units scored on this rank."""
    units: int
    """Units of the round so far, of all replicas."""


@dataclasses.dataclass
class _PendingSave:
    """A checkpoint that is being written."""

    name: str
    linked: Future[None]
    stager: AsyncStager


class ShardedCheckpoints:
    """The checkpoints of one run, in a directory that all ranks see.

    Guarantees: a checkpoint that `has` reports is complete and is loaded as it was saved; this does
    not change before the next `finish_save`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._pending: _PendingSave | None = None

    def has(self, step: int) -> bool:
        """Whether there is a complete checkpoint of a step."""
        return self._is_complete(f"step-{step}")

    def data_name(self, step: int) -> str:
        """Return a name for the state in a step's checkpoint, which changes when it is replaced."""
        link = self.directory / f"step-{step}"
        return link.readlink().name if self.has(step) else f"none-{step}"

    # -- saving ---------------------------------------------------------------------------------

    def begin_save(self, step: int, shard: ModelShard, optimizer: ShardedOptimizer) -> None:
        """Begin to write the checkpoint of a step. All ranks call this together.

        The state is not copied: it must not change before `finish_save` returns.
        """
        self._begin_save(f"step-{step}", _state(shard, optimizer), _UncopiedStager())

    def begin_mid_round_save(
        self,
        checkpoint: MidRoundCheckpoint,
        shard: ModelShard,
        optimizer: ShardedOptimizer,
        progress: RankProgress,
    ) -> None:
        """Begin to write a checkpoint within a round. All ranks call this together.

        Returns when the state is copied to the processor's memory: training can continue.
        """
        state = _state(shard, optimizer)
        if progress.saves:
            state[f"{_RANK_PROGRESS}|{progress.position}"] = dataclasses.asdict(progress)
        cuda = torch.cuda.is_available()
        options = StagingOptions(
            use_pinned_memory=cuda,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=cuda,
        )
        self._begin_save(checkpoint.link, state, DefaultStager(options))

    def _begin_save(self, link: str, state: dict[str, Any], stager: AsyncStager) -> None:
        self.finish_save()
        name: list[str] = [f"data-{uuid.uuid4().hex[:16]}"]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(name, src=0)
        written = async_save(
            state,
            storage_writer=HashingWriter(self.directory / name[0]),
            planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=_writer_group(),
            async_stager=stager,
        )
        assert isinstance(written, Future)
        linked: Future[None] = Future()
        written.add_done_callback(functools.partial(self._link, link, name[0], linked))
        self._pending = _PendingSave(name[0], linked, stager)

    def _link(self, link: str, name: str, linked: Future[None], written: Future[Any]) -> None:
        """Link the written directory as a checkpoint; called by the thread that wrote it."""
        try:
            written.result()  # the metadata are written last, when all ranks have written
            if dist.get_rank() == 0:
                new = self.directory / f"{name}.link"
                new.symlink_to(name)
                new.replace(self.directory / link)
        except Exception as error:  # noqa: BLE001 - raised again where the future is awaited
            linked.set_exception(error)
        else:
            linked.set_result(None)

    def finish_save(self) -> None:
        """Wait until a checkpoint that was begun is complete, if any. All ranks call this together.

        A step must not be reported as done before this returns: after a crash until then, only the
        earlier checkpoints exist.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.linked.result()
        pending.stager.close()
        dist.barrier()

    # -- loading --------------------------------------------------------------------------------

    def check(self, step: int) -> None:
        """Check this rank's share of the files of a step's checkpoint. All ranks call this.

        Raises:
            DamagedError: a file is not the one that was written.
        """
        rank, ranks = dist.get_rank(), dist.get_world_size()
        check_files(self.directory / f"step-{step}", rank, ranks)

    def restore(self, step: int, shard: ModelShard, optimizer: ShardedOptimizer) -> None:
        """Load a step into a shard and a *new* optimizer. All ranks call this together.

        Raises:
            UserError: there is no checkpoint of that step.
        """
        if not self.has(step):
            raise UserError(
                f"the datacenter has no checkpoint of step {step} in {self.directory}; "
                "start it with the state directory it had, or send it the model"
            )
        self._restore(f"step-{step}", shard, optimizer, None)

    def newest_step(self, until: int) -> int | None:
        """Return the last step up to `until` with a checkpoint. All ranks call this together."""
        return self._newest("step", until)

    def newest_mid_round(self, lineage: str, until: int) -> MidRoundCheckpoint | None:
        """Return the last checkpoint of a lineage up to a step. All ranks call this together.

        A damaged one is ignored: the round then begins at its start, with the same result.
        """
        step = self._newest(f"mid-round-{lineage}", until, intact=True)
        return None if step is None else MidRoundCheckpoint(lineage, step)

    def _newest(self, prefix: str, until: int, *, intact: bool = False) -> int | None:
        newest: list[int | None] = [None]
        if dist.get_rank() == 0:
            links = [each.name for each in self.directory.glob(f"{prefix}-*")]
            usable = self._is_intact if intact else self._is_complete
            steps = [int(link.rpartition("-")[2]) for link in links if usable(link)]
            newest[0] = max((step for step in steps if step <= until), default=None)
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(newest, src=0)
        return newest[0]

    def restore_mid_round(
        self,
        checkpoint: MidRoundCheckpoint,
        shard: ModelShard,
        optimizer: ShardedOptimizer,
        position: str,
    ) -> RankProgress:
        """Do as `restore`, and return the progress saved for a position on the mesh."""
        key = f"{_RANK_PROGRESS}|{position}"
        return RankProgress(**self._restore(checkpoint.link, shard, optimizer, key)[key])

    def _restore(
        self, link: str, shard: ModelShard, optimizer: ShardedOptimizer, extra_key: str | None
    ) -> dict[str, Any]:
        reader = FileSystemReader((self.directory / link).resolve())
        stored = reader.read_metadata().state_dict_metadata
        state = _empty_state(stored, shard, optimizer)
        if extra_key is not None:
            state[extra_key] = None
        load(
            state,
            storage_reader=reader,
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        )
        _load_optimizer(state, optimizer)
        return state

    # -- files ----------------------------------------------------------------------------------

    def keep_only(self, steps: set[int], mid_round: MidRoundCheckpoint | None = None) -> None:
        """Delete all other checkpoints and the remains of crashes. Only rank 0 calls this."""
        if not self.directory.is_dir():
            return
        links = {self.directory / f"step-{step}" for step in steps}
        if mid_round is not None:
            links.add(self.directory / mid_round.link)
        kept = {link.resolve() for link in links if link.is_symlink()}
        if self._pending is not None:
            kept.add((self.directory / self._pending.name).resolve())
        for path in list(self.directory.iterdir()):
            if path.is_symlink() and path not in links:
                path.unlink()
            elif path.is_dir() and not path.is_symlink() and path.resolve() not in kept:
                # A crash between the two leaves a directory without a link: removed next time.
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(path)

    def _is_intact(self, link: str) -> bool:
        try:
            check_files(self.directory / link)
        except DamagedError as error:
            log.warning("%s is not used: %s", link, error)
            return False
        return True

    def _is_complete(self, link: str) -> bool:
        return is_complete(self.directory / link)


class _UncopiedStager(AsyncStager):
    """Writes tensors directly from the model, for state that does not change meanwhile."""

    should_synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict

    def synchronize_staging(self) -> None:
        pass

    def close(self) -> None:
        pass


@functools.cache
def _writer_group() -> dist.ProcessGroup:
    """A separate group for writing: its messages must not mix with those of the training."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


# -- state by name --------------------------------------------------------------------------------


def _state(shard: ModelShard, optimizer: ShardedOptimizer) -> dict[str, Any]:
    """Everything that training changes and this rank owns, under flat names.

    The optimizer's state is read directly: PyTorch's own helper takes a step with lr=0 to fill
    an optimizer that has no state yet, and that step is counted.
    """
    copies = shard.tied.copies
    state = _model_state(shard, copies)
    for name, parameter in optimizer.named_parameters():
        if name not in copies:
            for key, value in optimizer.inner.state.get(parameter, {}).items():
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


def _empty_state(
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


def _load_optimizer(state: Mapping[str, Any], optimizer: ShardedOptimizer) -> None:
    """Give loaded state to the optimizer; the shard's tensors have been loaded in place."""
    by_parameter: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        kind, _, rest = key.partition("|")
        name, separator, field = rest.rpartition("|")
        if kind == "optimizer" and separator:
            by_parameter.setdefault(name, {})[field] = value
    optimizer.load_state(state[_GROUPS], by_parameter, state.get(_SCALER))
