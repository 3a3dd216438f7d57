"""The host of a task in a process of its own, which it can neither leave nor outlive."""

from __future__ import annotations

import dataclasses
import logging
import math
import mmap
import tempfile
import threading
import time
from pathlib import Path

from isthmus.errors import IsthmusError, TaskError, TaskInterrupted, UserError
from isthmus.system.memory_file import MemoryFile
from isthmus.system.private_files import make_private_directory, remove_directory
from isthmus.task import Participant, packages
from isthmus.task.code_digest import code_digest
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import Buffer, describe
from isthmus.transport.worker import ReportProgress
from isthmus.wire import link_pb2
from isthmus_clients.device.active_run import ActiveRun
from isthmus_clients.device.owner_limits import OwnerLimits
from isthmus_clients.device.sandbox.confinement import Confinement
from isthmus_clients.device.sandbox.memory_room import available_memory, memory_of_group
from isthmus_clients.device.sandbox.settings import WorkerSettings
from isthmus_clients.device.sandbox.task_process import TaskProcess
from isthmus_clients.device.task_host import TrainingResult, states_key
from isthmus_clients.device.weights.keeper import WeightKeeper
from isthmus_clients.training.accelerator import may_be_nvidia
from isthmus_clients.training.personal_state import (
    PersonalState,
    PersonalStates,
    Work,
    digest_before,
)

log = logging.getLogger(__name__)

_OPEN_SECONDS = 1800.0
"""Longest time in which a task may build its model and open its data."""
MOST_OPEN = 8
"""Most runs that stay in memory if the owner has set no number. Less if the memory that this
machine has available is below twice that of the largest, or all together exceed the owner's
`memory_mb`."""
_OUTCOMES = {
    "train_local": "trained",
    "score": "scored",
    "evaluate": "counted",
    "app": "app_replied",
}
_MAX_ERROR = 2000
"""Longest explanation of an app's error, in characters."""


@dataclasses.dataclass(eq=False)
class _Opened:
    """The run of a host: what it was opened with, and its process while that lives."""

    work: link_pb2.OpenRun
    run: ActiveRun
    code: bytes
    """Digest of the task's files that the run was opened with, see `ProcessHost._code_of`."""
    personal: PersonalState | None = None
    process: TaskProcess | None = None
    examples: int | None = None


class ProcessHost:
    """Runs each opened run's task in a restricted process (an `isthmus...task_host.TaskHost`).

    Guarantees:
      * no code of a task runs in this process, and no key, certificate or history is readable
        where it runs, as far as the kernel restricts it;
      * what the task sends is bounded and checked: the figures are finite, the update has the
        layout of the run and private memory, and its header is not the task's;
      * a process that dies, or does not stop when its request is cancelled, fails that request,
        and the next one begins with a new process;
      * a run is worked on by the code that was in `tasks` when it was opened last.
    """

    def __init__(
        self,
        participant: Participant,
        data: Path | None,
        tasks: Path,
        threads: int,
        *,
        state: Path,
        limits: OwnerLimits,
        grace: float = 30.0,
        device: str = "cpu",
        weights: WeightKeeper | None = None,
        secret: bytes | None = None,
    ) -> None:
        """Set up; `open` starts a process.

        Args:
            participant: see `isthmus_clients.device.agent.Agent`.
            data: location of this device's data, which tasks can read.
            tasks: directory of the only tasks that may be loaded.
            threads: CPU threads used for training.
            state: directory of the device's keys, which tasks cannot read; `tasks` may be in it.
            limits: of the owner, on CPU and memory and on the sandbox.
            grace: seconds after which a process that does not stop its request is ended.
            device: the owner's choice of what to train on.
            weights: has the files that models start from; None for those in `tasks`.
            secret: see `isthmus_clients.device.task_host.InProcessHost`.

        Raises:
            UserError: a directory that tasks can read contains the state, or the state cannot be
                written to.
        """
        self._secret = secret
        self._state = state.resolve()
        self._scratch = self._state / "scratch"
        self._grace = grace
        self._weights = weights
        self._tasks = tasks.resolve()
        readable = [self._tasks, *(path.expanduser() for path in limits.sandbox.read)]
        readable += [] if data is None else [data]
        for path in readable:
            if self._state.is_relative_to(path.resolve()):
                raise UserError(
                    f"tasks could read this device's keys: {path} contains {state}; move one of "
                    "them, or name a directory within"
                )
        remove_directory(self._scratch)  # of a device that was killed
        make_private_directory(self._scratch)
        confinement = Confinement(
            readable=tuple(path.resolve() for path in readable),
            scratch=self._scratch,
            hidden=self._state,
            required=limits.sandbox.required,
            memory_mb=limits.memory_mb,
            processes=limits.sandbox.processes,
            scratch_mb=limits.sandbox.scratch_mb,
            nvidia=may_be_nvidia(device),
        )
        self._settings = WorkerSettings(
            participant=participant,
            data=None if data is None else data.resolve(),
            tasks=self._tasks,
            threads=threads,
            device=device,
            cpu_percent=limits.cpu_percent,
            confinement=confinement,
        )
        self._lock = threading.Lock()
        self._opened: _Opened | None = None
        self._kept: dict[str, _Opened] = {}
        """Other runs that stay in memory, by identity, the one used longest ago first."""
        self._max_open = limits.open_runs
        # A process that is kept also keeps memory of an accelerator, of which nothing is known.
        if self._max_open is None and device != "cpu":
            self._max_open = 1
        self._memory_limit = math.inf if limits.memory_mb is None else limits.memory_mb << 20
        self._states = PersonalStates(self._state / "personal", limits.personal_mb)
        self._saved: tuple[str, PersonalState, int] | None = None
        """ID of the request that has trained the last personal state, the state, and its round."""
        self._cancelled: set[str] = set()
        """IDs of requests whose result is no longer needed."""
        self._spare: MemoryFile | None = None
        """Memory for the next model: allocating it takes longer than filling it."""

    @property
    def process(self) -> TaskProcess | None:
        """The task's process, if it was started."""
        return None if self._opened is None else self._opened.process

    def open(self, work: link_pb2.OpenRun) -> int:
        """Open a run in its process, see `TaskHost.open`; another stays in memory if it may."""
        opened = self._switch_to(work.run_id)
        if opened is not None and (opened.work != work or self._has_other_code(opened)):
            _end(opened)
            opened = None
        if opened is None:
            run = ActiveRun.of(work, self._tasks)
            opened = _Opened(work, run, self._code_of(run))
        # Another run may have taken the disk space of its states.
        key = states_key(work, self._settings.participant)
        controlled = opened.run.job.federated.control_variates is not None
        opened.personal = self._states.open(key, opened.run.kept, follows_commits=controlled)
        with self._lock:
            self._opened = opened
        try:
            self._ensure_process(opened)
        except BaseException:
            self.close(work.run_id)
            raise
        assert opened.examples is not None
        if not opened.run.has_app:
            log.info("opened %s with %d examples", work.run_id, opened.examples)
        return opened.examples

    def buffer(self, size: int, room: int = 0) -> Buffer:
        """Allocate memory that the task's process can share, see `TaskHost.buffer`."""
        spare = self._spare
        self._spare = None
        if spare is None or len(spare) != room + size:
            spare = MemoryFile(room + size)
        return memoryview(spare)[room:]

    def train(
        self, request_id: str, work: link_pb2.TrainLocal, payload: Buffer, progress: ReportProgress
    ) -> TrainingResult:
        """Train in the task's process, see `TaskHost.train`; the update is in private memory."""
        opened = self._require_open()
        started = time.monotonic()
        memory = _shared(payload)

        def report(received: link_pb2.Progress) -> None:
            if math.isfinite(received.loss):
                progress(link_pb2.Progress(steps=received.steps, loss=received.loss))

        request = link_pb2.Request(id=request_id, train_local=work)
        shared = []
        if opened.personal is not None:
            shared.append(_shared(opened.personal.before(work)))
            self._saved = (request_id, opened.personal, work.round)
        try:
            trained = self._call(opened, request, [memory, *shared], report).trained
        except Exception:  # whatever it was, it is raised again
            # The state moves on as after a success: one that moves only then would tell whether
            # this training has failed.
            if opened.personal is not None:
                opened.personal.save_unchanged(work.round)
            raise
        if opened.personal is not None:
            opened.personal.save(work.round, _copy_of(shared[0], opened.run.kept))
        # Private before it is read: the task may still write to the memory that it shares.
        layout = opened.run.layout
        room = layout.gradient_room if work.gradient_scale else 0
        if room:
            layout = layout.gradient_and_update
        update = _copy_of(memory, layout)
        self._spare = memory
        figures = {}
        if "loss" in trained.training:
            loss = trained.training["loss"]
            if not math.isfinite(loss):
                raise TaskError(f"the task's process reported a loss of {loss}")
            figures["loss"] = loss
        assert opened.examples is not None
        seconds = time.monotonic() - started
        return (
            link_pb2.Trained(
                examples=opened.run.job.federated.weight(opened.examples),
                steps=trained.steps,
                seconds=seconds,
                training=figures,
            ),
            update,
        )

    def state_digest(self, work: Work) -> bytes:
        """Name the personal state before some work, see `TaskHost.state_digest`."""
        return digest_before(self._require_open().personal, work)

    def score(self, request_id: str, work: link_pb2.Score, payload: Buffer) -> list[float]:
        """Score candidates in the task's process, see `TaskHost.score`; scores are from 0 to 1."""
        memory = _shared(payload)
        request = link_pb2.Request(id=request_id, score=work)
        opened = self._require_open()
        shared = [] if opened.personal is None else [_shared(opened.personal.before(work))]
        scores = list(self._call(opened, request, [memory, *shared]).scored.scores)
        self._spare = memory
        if len(scores) != len(work.candidates) or not all(0 <= score <= 1 for score in scores):
            raise TaskError(f"the task's process reported the scores {scores[:8]}")
        return scores

    def evaluate(
        self, request_id: str, work: link_pb2.Evaluate, payload: Buffer
    ) -> link_pb2.Counted:
        """Evaluate a model in the task's process, see `TaskHost.evaluate`."""
        memory = _shared(payload)
        request = link_pb2.Request(id=request_id, evaluate=work)
        opened = self._require_open()
        shared = [] if opened.personal is None else [_shared(opened.personal.before(work))]
        counted = self._call(opened, request, [memory, *shared]).counted
        self._spare = memory
        return counted

    def answer(
        self, request_id: str, work: link_pb2.AppMessage, payload: Buffer | bytes
    ) -> tuple[link_pb2.AppReply, Buffer | None]:
        """Pass a message to the app in its process, see `TaskHost.answer`."""
        opened = self._require_open()
        started = time.monotonic()
        out = MemoryFile(opened.run.job.federated.app_max_bytes)
        sent = [_shared(payload)] if payload else []
        request = link_pb2.Request(id=request_id, app=work)
        reply = self._call(opened, request, [*sent, out]).app_replied
        seconds = time.monotonic() - started
        if reply.error_code or reply.error:
            reason = reply.error[:_MAX_ERROR]
            failed = link_pb2.AppReply(error_code=reply.error_code, error=reason, seconds=seconds)
            return failed, None
        if reply.records.size > len(out):
            raise TaskError(f"the app's process reported records of {reply.records.size} bytes")
        records = _private(reply.records.size)
        out.copy(0, records)
        return link_pb2.AppReply(records=describe(records), seconds=seconds), records

    def cancel(self, request_id: str) -> None:
        """Stop a request early, see `TaskHost.cancel`; after `grace` its process is ended."""
        with self._lock:
            self._cancelled.add(request_id)
            process = self.process
        if process is not None:
            process.cancel(request_id, self._grace)

    def release(self, request_id: str, accepted: bool = True) -> None:
        """Forget a request, see `TaskHost.release`; memory is reused once an update is copied."""
        with self._lock:
            self._cancelled.discard(request_id)
        if not accepted and self._saved is not None and self._saved[0] == request_id:
            _, personal, number = self._saved
            personal.drop(number)

    def take_notes(self) -> list[str]:
        """Notes on the files of the personal state, see `TaskHost.take_notes`."""
        opened = self._opened
        personal = None if opened is None else opened.personal
        return [] if personal is None else personal.take_notes()

    def close(self, run_id: str | None = None) -> None:
        """End the process of a run, or of all, see `TaskHost.close`."""
        with self._lock:
            kept_ids = [kept_id for kept_id in self._kept if run_id in (None, kept_id)]
            closed = [self._kept.pop(kept_id) for kept_id in kept_ids]
            if self._opened is not None and run_id in (None, self._opened.work.run_id):
                closed.append(self._opened)
                self._opened = None
                self._spare = None
        for opened in closed:
            _end(opened)

    def _switch_to(self, run_id: str) -> _Opened | None:
        """Keep the open run in memory if the owner allows it; returns another one that was kept."""
        with self._lock:
            opened = self._opened
            self._opened = None
            self._spare = None
            found = self._kept.pop(run_id, None)
            closed = []
            if opened is not None and opened.work.run_id == run_id:
                # Opened again by a server that continues it: its code may have been mended since.
                closed.append(opened)
            elif opened is not None:
                self._kept[opened.work.run_id] = opened
            excess = max(0, len(self._kept) - self._most_kept())
            used_longest_ago = list(self._kept)[:excess]
            closed += [self._kept.pop(kept_id) for kept_id in used_longest_ago]
        for ended in closed:
            _end(ended)
        return found

    def _most_kept(self) -> int:
        """How many of the kept runs may stay in memory besides the one that is opened now."""
        if self._max_open is not None:
            return self._max_open - 1
        # The latest first: those that are used next, as jobs take turns.
        sizes = []
        for opened in reversed(self._kept.values()):
            process = opened.process
            sizes.append(0 if process is None else memory_of_group(process.pid))
        # The run that is opened may become as large as the largest, and its round needs as much.
        available = available_memory() - 2 * max(sizes, default=0)
        kept = 0
        for number in range(1, min(len(sizes), MOST_OPEN - 1) + 1):
            ended = sum(sizes[number:])
            in_all = sum(sizes[:number]) + max(sizes)
            if available + ended >= 0 and in_all <= self._memory_limit:
                kept = number
        return kept

    def _require_open(self) -> _Opened:
        """The open run.

        Raises:
            TaskInterrupted: it was closed.
        """
        opened = self._opened
        if opened is None:
            raise TaskInterrupted("the run was closed")
        return opened

    def _ensure_process(self, opened: _Opened) -> TaskProcess:
        """The process of a run; one that is not alive is started anew, and opens the run.

        Raises:
            TaskError: it could not open the run.
            TaskInterrupted: it would load, or may have loaded, other code than that of the run.
        """
        if opened.process is not None and not opened.process.ended:
            return opened.process
        self._check_code(opened)
        scratch = Path(tempfile.mkdtemp(dir=self._scratch))
        start = None if self._weights is None else self._weights.place(opened.run.job)
        confinement = self._settings.confinement
        readable = confinement.readable + (() if start is None else start.readable)
        confinement = dataclasses.replace(confinement, scratch=scratch, readable=readable)
        settings = self._settings.model_copy(update={"confinement": confinement, "start": start})
        process = TaskProcess(settings, self._secret)
        with self._lock:
            opened.process = process
            if self._opened is not opened:
                process.kill("the run was closed")
        request = link_pb2.Request(id="open", open=opened.work)
        try:
            examples = process.call(request, limit=_OPEN_SECONDS).opened.examples
        except TaskError:
            process.kill("it could not open the run")  # the next request starts another
            raise
        try:
            self._check_code(opened)
        except IsthmusError as error:
            process.kill(str(error))
            raise
        if opened.examples not in (None, examples):
            raise process.misbehaved(f"it has {examples} examples, and had {opened.examples}")
        opened.examples = examples
        return process

    def _check_code(self, opened: _Opened) -> None:
        """Refuse files that were changed since a run was opened: the device signs their digest.

        Raises:
            TaskInterrupted: they were.
            IsthmusError: they cannot be read, or a package was changed.
        """
        if self._has_other_code(opened):
            raise TaskInterrupted("the task's files were changed after the run was opened")

    def _has_other_code(self, opened: _Opened) -> bool:
        return self._code_of(opened.run) != opened.code

    def _code_of(self, run: ActiveRun) -> bytes:
        """Digests of the code that a run's process would load now, and of the package it is from.

        Those of an app that was installed by hand are not known.

        Raises:
            TaskError: a file cannot be read.
            AdmissionRefused: a package was changed.
        """
        job = run.job
        code = b"" if run.has_app else code_digest(job.task.source, self._tasks)
        package = packages.installed(self._tasks, packages.name_of(job))
        return code if package is None else code + package.digest

    def _call(
        self,
        opened: _Opened,
        request: link_pb2.Request,
        memory: list[MemoryFile],
        progress: ReportProgress = lambda progress: None,
    ) -> link_pb2.Reply:
        try:
            process = self._ensure_process(opened)
        except TaskInterrupted:
            raise
        except IsthmusError as error:
            # Whether a process has to be started again follows from what the server did before.
            raise TaskInterrupted(f"the run could not be opened again: {error}") from error
        handles = [each.handle for each in memory]
        request_id = request.id
        reply = process.call(
            request, handles, progress, cancelled=lambda: request_id in self._cancelled
        )
        kind = request.WhichOneof("work")
        assert kind is not None
        if reply.WhichOneof("outcome") != _OUTCOMES[kind]:
            raise process.misbehaved("it answered another kind of request")
        return reply


def _end(opened: _Opened) -> None:
    if opened.process is not None:
        opened.process.kill("the run was closed")


def _private(size: int) -> memoryview:
    """Memory of this process, which is not cleared before it is filled as a bytearray's is."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return memoryview(mmap.mmap(-1, size, flags) if size else bytearray())


def _copy_of(memory: MemoryFile, layout: TensorLayout) -> memoryview:
    """A private copy of an encoded vector, with this header instead of the task's."""
    copy = _private(layout.nbytes)
    copy[: len(layout.header)] = layout.header
    memory.copy(len(layout.header), copy[len(layout.header) :])
    return copy


def _shared(payload: Buffer | bytes) -> MemoryFile:
    """The shared memory that a payload was received into, or a copy of the payload in such."""
    view = memoryview(payload)
    if isinstance(view.obj, MemoryFile):
        return view.obj
    memory = MemoryFile(len(view))
    memory[:] = bytes(view)
    return memory
