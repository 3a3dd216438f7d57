"""Checkpoints of one run: parameters, buffers and optimizer state, whatever the sharding.

A checkpoint is written beside the others, in the background, under a name of its own, and becomes
`step-N` by moving one symbolic link when every rank has written its part: a crash leaves the old
one or the new one, never half of either.

Within a round, checkpoints are linked as `within-ORIGIN-N`. The origin names everything that the
state at step N follows from: so nobody can go on from a state that belongs to another try.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
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
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import empty as distributed_empty

from isthmus.errors import UserError
from isthmus_datacenter.parallel.model_shard import ModelShard
from isthmus_datacenter.training.optimizer import Updater

_GROUPS = "optimizer|groups"
_SCALER = "optimizer|scaler"
_MIDWAY = "midway"


@dataclasses.dataclass(frozen=True)
class Within:
    """A checkpoint within a round."""

    origin: str
    """Hexadecimal digits: what the round started from."""
    step: int

    @property
    def link(self) -> str:
        """Its name."""
        return f"within-{self.origin}-{self.step}"


@dataclasses.dataclass
class _Pending:
    """A checkpoint that is being written."""

    name: str
    linked: Future[None]
    stager: AsyncStager


class Checkpoints:
    """The checkpoints of one run, seen alike by all ranks.

    Guarantees: what `has` says is there is whole, and is loaded as it was saved; it does not change
    before the next `finish`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._pending: _Pending | None = None

    def has(self, step: int) -> bool:
        """Whether a whole checkpoint of that step is here."""
        return self._is_whole(f"step-{step}")

    def origin(self, step: int) -> str:
        """What the checkpoint of a step is called for as long as nobody saves that step again."""
        link = self.directory / f"step-{step}"
        return link.readlink().name if self.has(step) else f"none-{step}"

    # -- saving ---------------------------------------------------------------------------------

    def begin(self, step: int, share: ModelShard, updater: Updater) -> None:
        """Begin to write the checkpoint of a step. All ranks call this together.

        Nothing is copied: until `finish`, nothing may change the state.
        """
        self._begin(f"step-{step}", _state(share, updater), _AsItIs())

    def begin_within(self, at: Within, share: ModelShard, updater: Updater, midway: Midway) -> None:
        """Begin to write a checkpoint within a round, from a copy. All ranks call this together.

        Returns when the copy is made, in memory of the processor: training goes on.
        """
        state = _state(share, updater)
        if midway.speaks:
            state[f"{_MIDWAY}|{midway.place}"] = dataclasses.asdict(midway)
        fast = torch.cuda.is_available()
        options = StagingOptions(
            use_pinned_memory=fast,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=fast,
        )
        self._begin(at.link, state, DefaultStager(options))

    def _begin(self, link: str, state: dict[str, Any], stager: AsyncStager) -> None:
        self.finish()
        name: list[str] = [f"data-{uuid.uuid4().hex[:16]}"]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(name, src=0)
        written = async_save(
            state,
            storage_writer=FileSystemWriter(self.directory / name[0]),
            planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=_writers(),
            async_stager=stager,
        )
        assert isinstance(written, Future)
        linked: Future[None] = Future()
        written.add_done_callback(functools.partial(self._link, link, name[0], linked))
        self._pending = _Pending(name[0], linked, stager)

    def _link(self, link: str, name: str, linked: Future[None], written: Future[Any]) -> None:
        """Make what is written a checkpoint; called by the thread that wrote it."""
        try:
            written.result()  # the metadata are written last, when all ranks have written
            if dist.get_rank() == 0:
                new = self.directory / f"{name}.link"
                new.symlink_to(name)
                new.replace(self.directory / link)
        except Exception as error:  # noqa: BLE001 - raised by whoever waits
            linked.set_exception(error)
        else:
            linked.set_result(None)

    def finish(self) -> None:
        """Wait until what was begun is safe, if anything was. All ranks call this together.

        Not before it returns may anybody be told that the step is done: whoever dies until then
        finds the checkpoints as they were.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.linked.result()
        pending.stager.close()
        dist.barrier()

    # -- loading --------------------------------------------------------------------------------

    def restore(self, step: int, share: ModelShard, updater: Updater) -> None:
        """Put a checkpoint into a share and a *fresh* optimizer. All ranks call this together.

        Raises:
            UserError: there is none of that step.
        """
        if not self.has(step):
            raise UserError(
                f"the datacenter has no checkpoint of step {step} in {self.directory}; "
                "start it with the state directory it had, or send it the model"
            )
        self._restore(f"step-{step}", share, updater, None)

    def newest(self, until: int) -> int | None:
        """The furthest step up to that one that has a checkpoint. All ranks call this together."""
        return self._furthest("step", until)

    def newest_within(self, origin: str, until: int) -> Within | None:
        """The furthest checkpoint within a round with this origin. All ranks call this together."""
        step = self._furthest(f"within-{origin}", until)
        return None if step is None else Within(origin, step)

    def _furthest(self, kind: str, until: int) -> int | None:
        found: list[int | None] = [None]
        if dist.get_rank() == 0:
            whole = [path for path in self.directory.glob(f"{kind}-*") if self._is_whole(path.name)]
            steps = [int(path.name.rpartition("-")[2]) for path in whole]
            found[0] = max((step for step in steps if step <= until), default=None)
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(found, src=0)
        return found[0]

    def restore_within(self, at: Within, share: ModelShard, updater: Updater, place: str) -> Midway:
        """As `restore`; also what was saved of this rank's place on the mesh."""
        key = f"{_MIDWAY}|{place}"
        return Midway(**self._restore(at.link, share, updater, key)[key])

    def _restore(
        self, link: str, share: ModelShard, updater: Updater, also: str | None
    ) -> dict[str, Any]:
        reader = FileSystemReader((self.directory / link).resolve())
        known = reader.read_metadata().state_dict_metadata
        state = _template(known, share, updater)
        if also is not None:
            state[also] = None
        load(
            state,
            storage_reader=reader,
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        )
        _install(state, updater)
        return state

    # -- files ----------------------------------------------------------------------------------

    def keep_only(self, steps: set[int], within: Within | None = None) -> None:
        """Delete every other checkpoint, and what crashes left behind. Rank 0 calls this."""
        if not self.directory.is_dir():
            return
        links = {self.directory / f"step-{step}" for step in steps}
        if within is not None:
            links.add(self.directory / within.link)
        kept = {link.resolve() for link in links if link.is_symlink()}
        if self._pending is not None:
            kept.add((self.directory / self._pending.name).resolve())
        for path in list(self.directory.iterdir()):
            if path.is_symlink() and path not in links:
                path.unlink()
            elif path.is_dir() and not path.is_symlink() and path.resolve() not in kept:
                # A crash in here leaves a directory without a link: removed the next time.
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(path)

    def _is_whole(self, link: str) -> bool:
        return (self.directory / link / ".metadata").is_file()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Midway:
    """What a rank needs besides the state to go on in the middle of a round."""

    place: str
    """Where the rank is on the mesh; ranks that share matrices are at one place."""
    speaks: bool
    """Whether this rank saves it."""
    drawn: dict[str, Any]
    """States of the generators of random numbers."""
    summed: float
    """Losses of the round so far, of the units scored here."""
    units: int
    """Units of the round so far, of all replicas."""


class _AsItIs(AsyncStager):
    """Writes the state from where it is: for a state that stands still until it is written."""

    should_synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict

    def synchronize_staging(self) -> None:
        pass

    def close(self) -> None:
        pass


@functools.cache
def _writers() -> dist.ProcessGroup:
    """A group for the writers alone: their messages must not mix with those of the training."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


def _state(share: ModelShard, updater: Updater) -> dict[str, Any]:
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


def _model_state(share: ModelShard, without: AbstractSet[str] = frozenset()) -> dict[str, Any]:
    parameters = {
        f"model|{name}": parameter.detach()
        for name, parameter in share.parameters().items()
        if parameter.requires_grad and name not in without
    }
    return {**parameters, **{f"buffer|{name}": each for name, each in share.buffers().items()}}


def _template(known: Mapping[str, Any], share: ModelShard, updater: Updater) -> dict[str, Any]:
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
