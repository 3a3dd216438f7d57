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
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from pydantic import StringConstraints
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions

from isthmus.errors import DamagedError, StorageError, UserError
from isthmus_datacenter.checkpointing.digests import HashingWriter, check_files, is_complete
from isthmus_datacenter.checkpointing.failures import (
    ReportingFileSystem,
    agree_on_failure,
    describe_failure,
)
from isthmus_datacenter.checkpointing.named_state import empty_state, load_optimizer, named_state
from isthmus_datacenter.checkpointing.shard_files import read_shards, write_shards
from isthmus_datacenter.parallel.kept_groups import kept
from isthmus_datacenter.parallel.model_shard import ModelShard
from isthmus_datacenter.parallel.optimizer import ShardedOptimizer
from isthmus_datacenter.rank_messages import RankMessageError, RankMessages

log = logging.getLogger(__name__)

_RANK_PROGRESS = "rank-progress"
_DIRECTORY: RankMessages[str] = RankMessages(
    "the directory of a checkpoint",
    Annotated[str, StringConstraints(pattern="^data-[0-9a-f]{16}$")],
)
_NEWEST: RankMessages[int | None] = RankMessages("the newest checkpoint", int | None)


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
    units: float
    """Units of the round so far, of all replicas."""
    parts: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    """Sums and weights of the named parts of the losses so far, of this rank."""
    step_figures: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """`RecordedStep` of the round so far."""


@dataclasses.dataclass
class _PendingSave:
    """A checkpoint that is being written."""

    name: str
    linked: Future[None]
    stager: AsyncStager
    files: ReportingFileSystem


class ShardedCheckpoints:
    """The checkpoints of one run, in a directory that all ranks see.

    Guarantees:
      * a checkpoint that `has` reports is complete and is loaded as it was saved; this does not
        change before the next `finish_save`;
      * if one cannot be written or read, on whichever rank, all ranks raise `StorageError`, and
        what was written of it is deleted.
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
        return link.resolve().name if self.has(step) else f"none-{step}"

    # -- saving ---------------------------------------------------------------------------------

    def begin_save(self, step: int, shard: ModelShard, optimizer: ShardedOptimizer) -> None:
        """Begin to write the checkpoint of a step. All ranks call this together.

        The state is not copied: it must not change before `finish_save` returns.

        Raises:
            StorageError: the checkpoint before could not be written, on some rank.
        """
        self._begin_save(f"step-{step}", named_state(shard, optimizer), _UncopiedStager())

    def begin_mid_round_save(
        self,
        checkpoint: MidRoundCheckpoint,
        shard: ModelShard,
        optimizer: ShardedOptimizer,
        progress: RankProgress,
    ) -> None:
        """Begin to write a checkpoint within a round. All ranks call this together.

        Returns when the state is copied to the processor's memory: training can continue.

        Raises:
            StorageError: the checkpoint before could not be written, on some rank.
        """
        state = named_state(shard, optimizer)
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
        name = _DIRECTORY.broadcast(f"data-{uuid.uuid4().hex[:16]}")
        writer = HashingWriter(self.directory / name)
        files = ReportingFileSystem()
        writer.fs = files
        staged = stager.stage(state)
        assert isinstance(staged, dict)
        thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        written = thread.submit(write_shards, staged, writer, _writer_group())
        thread.shutdown(wait=False)  # it ends once it has written
        linked: Future[None] = Future()
        written.add_done_callback(functools.partial(self._link, link, name, linked))
        self._pending = _PendingSave(name, linked, stager, files)

    def _link(self, link: str, name: str, linked: Future[None], written: Future[Any]) -> None:
        """Link the written directory as a checkpoint; called by the thread that wrote it."""
        try:
            written.result()  # the metadata are written last, when all ranks have written
            if dist.get_rank() == 0:
                new = self.directory / f"{name}.link"
                new.symlink_to(name)
                new.replace(self.directory / link)
        except BaseException as error:  # noqa: BLE001 - raised again where the future is awaited
            linked.set_exception(error)
        else:
            linked.set_result(None)

    def finish_save(self) -> None:
        """Wait until a checkpoint that was begun is complete, if any. All ranks call this together.

        A step must not be reported as done before this returns: after a crash until then, only the
        earlier checkpoints exist.

        Raises:
            StorageError: it could not be written, on some rank.
            RankMessageError: a message about it is not of a rank, which must end.
        """
        pending = self._pending
        self._pending = None
        if pending is None:
            return
        error = pending.linked.exception()
        pending.stager.close()
        if isinstance(error, RankMessageError):
            raise error  # another rank may still wait for a message of that thread
        reason = None if error is None else describe_failure(error, pending.files)
        try:
            agree_on_failure("written to", self.directory, error is not None, reason)
        except StorageError:
            if dist.get_rank() == 0:
                shutil.rmtree(self.directory / pending.name, ignore_errors=True)
                (self.directory / f"{pending.name}.link").unlink(missing_ok=True)
            dist.barrier()  # a rank that reports the failure must find it deleted
            raise

    # -- loading --------------------------------------------------------------------------------

    def check(self, step: int) -> None:
        """Check this rank's share of the files of a step's checkpoint. All ranks call this.

        Raises:
            DamagedError: a file is not the one that was written.
        """
        rank = dist.get_rank()
        ranks = dist.get_world_size()
        check_files(self.directory / f"step-{step}", rank, ranks)

    def restore(self, step: int, shard: ModelShard, optimizer: ShardedOptimizer) -> None:
        """Load a step into a shard and a *new* optimizer. All ranks call this together.

        Raises:
            UserError: there is no checkpoint of that step.
            StorageError: it cannot be read, on some rank.
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
        newest = None
        if dist.get_rank() == 0:
            links = [each.name for each in self.directory.glob(f"{prefix}-*")]
            usable = self._is_intact if intact else self._is_complete
            steps = [int(link.rpartition("-")[2]) for link in links if usable(link)]
            newest = max((step for step in steps if step <= until), default=None)
        return _NEWEST.broadcast(newest)

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
        with self._read_together():
            metadata = reader.read_metadata()
        state = empty_state(metadata.state_dict_metadata, shard, optimizer)
        if extra_key is not None:
            state[extra_key] = None
        with self._read_together():
            read_shards(state, reader, metadata)
        load_optimizer(state, optimizer)
        return state

    @contextlib.contextmanager
    def _read_together(self) -> Iterator[None]:
        error: BaseException | None = None
        try:
            yield
        except Exception as raised:  # noqa: BLE001 - raised on all ranks, with this one's reason
            error = raised
        reason = None if error is None else describe_failure(error)
        agree_on_failure("read from", self.directory, error is not None, reason)

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


@kept
def _writer_group() -> dist.ProcessGroup:
    """A separate group for writing: its messages must not mix with those of the training."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group
