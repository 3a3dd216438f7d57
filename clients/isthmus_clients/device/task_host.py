"""The host of a task's code: the interface that the agent uses, and a host in its own process.

PyTorch is imported only when a run is opened, so that an idle device stays small.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from isthmus.job import read_job
from isthmus.job.apps import registered
from isthmus.start.manifest import StartPlace
from isthmus.system.memory_file import MemoryFile
from isthmus.task import Participant
from isthmus.transport.blobs import Buffer
from isthmus.transport.worker import ReportProgress
from isthmus.wire import link_pb2
from isthmus_clients.device.device_apps import DEVICE_WORK
from isthmus_clients.training.personal_state import (
    PersonalState,
    PersonalStates,
    Work,
    digest_before,
)
from isthmus_clients.training.withholding import attempted

if TYPE_CHECKING:
    from isthmus_clients.device.device_apps import DeviceApp
    from isthmus_clients.training.local_run import DeviceRun

log = logging.getLogger(__name__)

TrainingResult = tuple[link_pb2.Trained, Buffer]
"""Figures of a training, and its encoded update."""


class TaskHost(Protocol):
    """Runs the code of a task: in the run that was opened last, one call at a time.

    `open`, `train`, `score`, `evaluate` and `answer` block and may be called on any thread. They
    raise `TaskError` if the task's code fails, with a message about this device's own code and
    data.
    """

    def open(self, work: link_pb2.OpenRun) -> int:
        """Open a run in place of the open one; returns its number of examples.

        A run with an app has 0. A run that fails to open leaves no run open. A host may keep
        earlier runs in memory, and go on with one that is opened again by the same request.

        Raises:
            TaskError: the task cannot be used here, or has no data.
        """
        ...

    def buffer(self, size: int, room: int = 0) -> Buffer:
        """Allocate memory for what is passed to the next call: encoded models, or records.

        `room` more bytes in front of it are for the result, see `TensorLayout.gradient_room`.
        """
        ...

    def train(
        self, request_id: str, work: link_pb2.TrainLocal, payload: Buffer, progress: ReportProgress
    ) -> TrainingResult:
        """Train from the first model in `payload`; returns figures and the encoded update.

        A second vector in `payload` is added to the gradient of every step, or is the server's
        control variate, see `DeviceRun.train`. If `work` has a factor
        for the gradient at the model, the result is `TensorLayout.gradient_and_update`, and
        `payload` has to be from `buffer` with room for it. The contents of `payload` are
        overwritten; the result is valid until `release`.

        Raises:
            TaskError: the task's code raised, its loss or update is not finite, or the request was
                cancelled.
        """
        ...

    def state_digest(self, work: Work) -> bytes:
        """Names the personal state that some work would start from; empty without one."""
        ...

    def score(self, request_id: str, work: link_pb2.Score, payload: Buffer) -> list[float]:
        """Score the candidates, means of the encoded models in `payload`, from 0 (best) to 1.

        Raises:
            TaskError: the task's code raised.
            UpdateError: a candidate refers to a model that was not received.
        """
        ...

    def evaluate(
        self, request_id: str, work: link_pb2.Evaluate, payload: Buffer
    ) -> link_pb2.Counted:
        """Count how the encoded model in `payload` does on the device's validation data.

        See `isthmus.task.measurements.evaluation.EvaluationVector`. With the device's own figures,
        which do not leave it.

        Raises:
            TaskError: the task's code raised, or this device has no validation data.
        """
        ...

    def answer(
        self, request_id: str, work: link_pb2.AppMessage, payload: Buffer | bytes
    ) -> tuple[link_pb2.AppReply, Buffer | None]:
        """Pass a message to the app of the run; see `DeviceApp.answer`."""
        ...

    def cancel(self, request_id: str) -> None:
        """Stop a request early if possible, training at its next step; it may not have begun."""
        ...

    def release(self, request_id: str, accepted: bool = True) -> None:
        """Reuse the memory of the update of a request, which has been acknowledged.

        If it was not `accepted`, the personal state that was trained with it is forgotten.
        """
        ...

    def take_notes(self) -> list[str]:
        """What the owner and the operator should know of this run's files, each once."""
        ...

    def close(self, run_id: str | None = None) -> None:
        """Close a run, None all of them; does not block, and may be called during another call."""
        ...


def train_in(
    run: DeviceRun,
    work: link_pb2.TrainLocal,
    memory: Buffer | MemoryFile,
    progress: ReportProgress,
    stopped: Callable[[], bool],
    personal: Buffer | None = None,
) -> tuple[link_pb2.Trained, memoryview]:
    """Train from the models in memory that `TaskHost.buffer` has laid out; the result is in it.

    See `DeviceRun.train` for `personal`.
    """
    from isthmus_clients.training.local_run import pieces

    view = memoryview(memory)
    layout = run.layout
    room = layout.gradient_room if work.gradient_scale else 0
    model, *gradient = pieces(layout, view[room:])
    # The update replaces the model, which the room in front completes to the result.
    result = view[: layout.gradient_and_update.nbytes] if room else model
    added = gradient[0] if gradient else None
    out = result if room else None
    return run.train(work, model, progress, stopped, added, out, personal), result


def train_silently(
    host: TaskHost, request: link_pb2.Request, payload: Buffer
) -> TrainingResult | None:
    """Train without reports of progress; None without a usable update, which only the log tells."""
    work = request.train_local
    return attempted(
        f"training in round {work.round} of {work.run_id}",
        lambda: host.train(request.id, work, payload, lambda progress: None),
    )


def own_secret(identity: Ed25519PrivateKey) -> bytes:
    """What a device's data are drawn with, see `isthmus.task.own_numbers`, from its identity.

    It is the same after a restart, and says nothing of the identity to a task, which may know it.
    """
    return hashlib.sha256(b"isthmus/data-secret/" + identity.private_bytes_raw()).digest()


def states_key(work: link_pb2.OpenRun, participant: Participant) -> str:
    """What the personal states of a run belong to, see `PersonalStates.open`."""
    source = read_job(work.job).task.source
    return f"{work.run_id}\n{participant.name}\n{source}\n{work.personal.hex()}"


_random_numbers = threading.Lock()
"""Held while one device builds, trains or measures a model: all threads share the generators.

Two that read its state can also wait for each other, one for its lock and one for Python's.
"""


class InProcessHost:
    """Runs the task in the agent's own process, for an owner who is also the task's author."""

    def __init__(
        self,
        participant: Participant,
        data: Path | None,
        tasks: Path | None,
        threads: int,
        between_steps: Callable[[], None] = lambda: None,
        device: str = "cpu",
        states: PersonalStates | None = None,
        *,
        shares: bool = False,
        start: StartPlace | None = None,
        secret: bytes | None = None,
    ) -> None:
        """Set up; `open` loads the task.

        Args:
            participant: see `isthmus_clients.device.agent.Agent`.
            data: location of this device's data; overrides the one of a job.
            tasks: directory of the only tasks that may be loaded; None loads any task.
            threads: CPU threads used for training.
            between_steps: called before every training step.
            device: the owner's choice of what to train on.
            states: keeps the personal states of this device; None if the caller has them.
            shares: whether the server may open the memory of updates.
            start: where the files are that the model starts from; None for where the job says.
            secret: of this device, for the random numbers of its data; None for the job's seed.
        """
        self._secret = secret
        self._shares = shares
        self._start = start
        self.run: DeviceRun | None = None
        """The open run, unless it has an app."""
        self.app: DeviceApp | None = None
        self._run_id = ""
        """Identifier of the run that was opened last."""
        self._participant = participant
        self._data = data
        self._tasks = tasks
        self._threads = threads
        self._between_steps = between_steps
        self._device = device
        self._states = states
        self._personal: PersonalState | None = None
        self._cancelled: set[str] = set()
        """IDs of requests whose result is no longer needed."""
        self._sent: tuple[str, bytearray | MemoryFile] | None = None
        """The last update: the ID of its request and the memory that contains it."""
        self._saved = "", 0
        """The request that has trained the last personal state, and its round."""
        self._spare: bytearray | MemoryFile | None = None
        """Memory for the next model: allocating it takes longer than filling it."""

    def open(self, work: link_pb2.OpenRun) -> int:
        """See `TaskHost.open`."""
        import torch

        torch.set_num_threads(self._threads)
        self.close()
        self._run_id = work.run_id
        federated = read_job(work.job).federated
        if federated.app is not None:
            open_app = registered(DEVICE_WORK, federated)
            self.app = open_app(work, self._participant, self._data, self._tasks)
            return 0
        from isthmus_clients.training.local_run import DeviceRun

        with _random_numbers:
            run = DeviceRun(
                work,
                self._participant,
                self._data,
                self._tasks,
                self._device,
                start=self._start,
                secret=self._secret,
            )
        if self._states is not None:
            controlled = federated.control_variates is not None
            key = states_key(work, self._participant)
            self._personal = self._states.open(key, run.kept, follows_commits=controlled)
        self.run = run
        log.info("opened %s with %d examples", work.run_id, self.run.examples)
        return self.run.examples

    def buffer(self, size: int, room: int = 0) -> Buffer:
        """See `TaskHost.buffer`."""
        spare = self._spare
        self._spare = None
        fits = spare is not None and len(spare) == room + size
        memory = spare if spare is not None and fits else self._new_memory(room + size)
        return memoryview(memory)[room:]

    def _new_memory(self, size: int) -> bytearray | MemoryFile:
        return MemoryFile(size) if self._shares else bytearray(size)

    def train(
        self, request_id: str, work: link_pb2.TrainLocal, payload: Buffer, progress: ReportProgress
    ) -> TrainingResult:
        """See `TaskHost.train`."""
        assert self.run is not None

        def stopped() -> bool:
            self._between_steps()
            return request_id in self._cancelled

        memory = memoryview(payload).obj
        assert isinstance(memory, (bytearray, MemoryFile))
        state = None
        if self._personal is not None:
            state = self._personal.before(work)
        self._saved = request_id, work.round
        try:
            with _random_numbers:
                trained, result = train_in(self.run, work, memory, progress, stopped, state)
        except Exception:  # whatever it was, it is raised again
            # A state that only a training that succeeds would move on tells whether one did.
            if self._personal is not None:
                self._personal.save_unchanged(work.round)
            raise
        if self._personal is not None and state is not None:
            self._personal.save(work.round, state)
        self._sent = request_id, memory
        return trained, result

    def state_digest(self, work: Work) -> bytes:
        """See `TaskHost.state_digest`."""
        return digest_before(self._personal, work)

    def score(self, request_id: str, work: link_pb2.Score, payload: Buffer) -> list[float]:
        """See `TaskHost.score`."""
        assert self.run is not None
        state = None if self._personal is None else self._personal.before(work)
        with _random_numbers:
            return self.run.score(payload, [list(mean.of) for mean in work.candidates], state)

    def evaluate(
        self, request_id: str, work: link_pb2.Evaluate, payload: Buffer
    ) -> link_pb2.Counted:
        """See `TaskHost.evaluate`."""
        assert self.run is not None
        state = None if self._personal is None else self._personal.before(work)
        with _random_numbers:
            return self.run.evaluate(work.round, payload, state)

    def answer(
        self, request_id: str, work: link_pb2.AppMessage, payload: Buffer | bytes
    ) -> tuple[link_pb2.AppReply, Buffer | None]:
        """See `TaskHost.answer`."""
        assert self.app is not None
        return self.app.answer(work, payload)

    def cancel(self, request_id: str) -> None:
        """See `TaskHost.cancel`."""
        self._cancelled.add(request_id)

    def release(self, request_id: str, accepted: bool = True) -> None:
        """See `TaskHost.release`."""
        self._cancelled.discard(request_id)
        if not accepted and self._personal is not None and self._saved[0] == request_id:
            self._personal.drop(self._saved[1])
        if self._sent is not None and self._sent[0] == request_id:
            # A server that has not accepted an update may still be reading it.
            self._spare = self._sent[1] if accepted or not self._shares else None
            self._sent = None

    def take_notes(self) -> list[str]:
        """See `TaskHost.take_notes`."""
        personal = self._personal
        return [] if personal is None else personal.take_notes()

    def close(self, run_id: str | None = None) -> None:
        """See `TaskHost.close`."""
        if run_id not in (None, self._run_id):
            return
        self.run = self.app = self._personal = None
        self._sent = self._spare = None
