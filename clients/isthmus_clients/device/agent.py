"""The device agent: routes requests of the server to the runs they belong to.

PyTorch is imported only when a run is opened, so that an idle device stays small.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from isthmus.errors import AdmissionRefused, UpdateError
from isthmus.identity.membership import Membership
from isthmus.task import Participant
from isthmus.transport.blobs import Buffer
from isthmus.transport.uplink import Uplink
from isthmus.transport.worker import ReportProgress
from isthmus.wire import link_pb2
from isthmus_clients.device.resource_limits import CpuThrottle
from isthmus_clients.device.secure_sessions import SecureSessions

if TYPE_CHECKING:
    from isthmus_clients.device.owner_limits import LimitsGuard
    from isthmus_clients.flower.client_app import FlowerRun
    from isthmus_clients.training.local_run import DeviceRun

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")

log = logging.getLogger(__name__)

MAX_MODELS = 8
"""Maximum number of models of one comparison."""


class Agent:
    """Executes a device's requests in its open runs (an `isthmus.transport.worker.Worker`).

    Guarantees:
      * its data never leaves this process: only an update, its weight and average figures do;
      * in a run with secure aggregation nothing is sent in clear, for any request of the server;
      * requests run one at a time and off the event loop, so that the link stays alive.
    """

    def __init__(
        self,
        participant: Participant,
        data: Path | None,
        threads: int = 1,
        hours: Sequence[str] = (),
        *,
        signing_key: Ed25519PrivateKey | None = None,
        history_file: Path | None = None,
        tasks: Path | None = None,
        guard: LimitsGuard | None = None,
    ) -> None:
        """Create a device.

        Args:
            participant: its name, and its shard where one data set is split.
            data: location of this device's data; overrides the one of a job.
            threads: CPU threads used for training.
            hours: working hours that are sent to the server, see `isthmus.job.section.Hours.parse`.
            signing_key: identity in secure aggregation; None generates a key for this process.
            history_file: persists which rounds this device was in; as long-lived as the key.
            tasks: directory of the only tasks that may be loaded; None loads any task from the
                path in the request, for a server that started this device itself.
            guard: checks requests against the owner's limits; None allows everything.
        """
        self.participant = participant
        self.data = data
        self.threads = threads
        self.hours = hours
        self.tasks = tasks
        self._runs: dict[str, DeviceRun] = {}
        self._apps: dict[str, FlowerRun] = {}
        self._guard = guard
        limits = None if guard is None else guard.limits
        self._throttle = CpuThrottle(None if limits is None else limits.cpu_percent)
        clients_min = None if limits is None else limits.privacy.clients_min
        self._secure = SecureSessions(signing_key, history_file, clients_min)
        self._buffered: tuple[link_pb2.TrainLocal, Buffer, link_pb2.Trained] | None = None
        """An update that waits for a buffered secure sum: its request, bytes and reply."""
        self._sent: tuple[str, Buffer] | None = None
        """Request ID and memory of an update that was sent in plaintext."""
        self._spare: Buffer | None = None
        """Memory for the next model: allocating it takes longer than filling it."""
        self._working = asyncio.Lock()
        self._cancelled: set[str] = set()
        """IDs of requests whose result is no longer needed."""

    @property
    def identity(self) -> bytes:
        """This device's public key."""
        return self._secure.identity

    def welcomed(self, welcome: link_pb2.Welcome) -> None:
        """Take the enrolment of this device's identity from the server's welcome."""
        self._secure.welcomed(welcome)

    def buffer(self, request: link_pb2.Request, size: int) -> Buffer | None:
        """Allocate memory for the payload of a request.

        The payload is the models of an open run, or the package of a run's task; None declines a
        package.

        Raises:
            UpdateError: the run is not open, or the size is not that of its models.
            AdmissionRefused: the owner does not allow the request.
        """
        kind = request.WhichOneof("work")
        if kind == "open":
            from isthmus_clients.device import task_delivery

            if task_delivery.should_fetch(request.open, self.tasks, self._guard):
                return bytearray(size)
            return None
        self._check(request, size)
        if kind == "flower":
            return self._app(request.flower.run_id).buffer(size)
        if kind == "score":
            run = self._run(request.score.run_id)
            candidates = request.score.candidates
            count = 1 + max((number for mean in candidates for number in mean.of), default=0)
            if count > MAX_MODELS:
                raise UpdateError(
                    f"{count} models are to be scored, and the maximum is {MAX_MODELS}"
                )
        else:
            run = self._run(request.train_local.run_id)
            count = 2 if request.train_local.with_gradient else 1
        if size != count * run.layout.nbytes:
            raise UpdateError(
                f"{count} models in {size} bytes were announced; a model of this run has "
                f"{run.layout.nbytes}"
            )
        spare, self._spare = self._spare, None
        return spare if spare is not None and len(spare) == size else bytearray(size)

    def _check(self, request: link_pb2.Request, size: int) -> None:
        """Check the owner's limits before memory is allocated."""
        if self._guard is None:
            return
        kind = request.WhichOneof("work")
        masked = kind in ("train_local", "score") and bool(getattr(request, kind).secure)
        if not masked and not (kind == "train_local" and request.train_local.keep):
            self._guard.check_plain()
        self._guard.check_work(size)

    async def work(
        self, request: link_pb2.Request, model: Buffer | None, progress: ReportProgress
    ) -> tuple[link_pb2.Reply, Buffer | None]:
        """Open or close a run, train for one round, or score models."""
        kind = request.WhichOneof("work")
        if kind == "open":
            async with self._working:
                return await asyncio.to_thread(self._open, request.open, model), None
        if kind == "train_local":
            assert model is not None
            async with self._working:
                return await self._throttled(self._train, request, model, progress)
        if kind == "score":
            assert model is not None
            async with self._working:
                return await self._throttled(self._score, request.score, model), None
        if kind == "flower":
            app = self._app(request.flower.run_id)
            if model is None:
                self._check(request, 0)
            async with self._working:
                answer, records = await self._throttled(app.answer, request.flower, model or b"")
            return link_pb2.Reply(flower_replied=answer), records
        if kind == "agree":
            async with self._working:
                return await asyncio.to_thread(self._agree_on_buffered, request.agree), None
        if kind == "secure_step":
            async with self._working:
                stepped, payload = await self._throttled(self._secure.step, request.secure_step)
            return link_pb2.Reply(secure_stepped=stepped), payload
        if kind == "close":
            self._runs.pop(request.close.run_id, None)
            self._apps.pop(request.close.run_id, None)
            self._buffered = self._sent = self._spare = None
            return link_pb2.Reply(closed=link_pb2.Closed()), None
        raise AdmissionRefused(f"an edge client does not support the request {kind!r}")

    async def _throttled(
        self, work: Callable[_Params, _Result], *args: _Params.args, **kwargs: _Params.kwargs
    ) -> _Result:
        """Run a function on a thread, within the owner's CPU limit."""

        def run() -> _Result:
            self._throttle.begin()
            try:
                return work(*args, **kwargs)
            finally:
                self._throttle.pause()

        return await asyncio.to_thread(run)

    def acknowledged(self, request: link_pb2.Request, accepted: bool, reason: str) -> None:
        """Reuse the memory of the acknowledged update for the next model."""
        self._cancelled.discard(request.id)
        if self._sent is not None and self._sent[0] == request.id:
            self._spare, self._sent = self._sent[1], None

    def cancel(self, request: link_pb2.Request, reason: str) -> None:
        """Stop training at the next step: its result is no longer needed."""
        self._cancelled.add(request.id)

    def _train(
        self, request: link_pb2.Request, payload: Buffer, progress: ReportProgress
    ) -> tuple[link_pb2.Reply, Buffer | None]:
        """Train; send the update, or keep it and send the keys it will be masked with.

        With secure aggregation nothing about this device is sent in clear: no loss, no progress,
        no number of examples.
        """
        from isthmus_clients.training.local_run import pieces

        work = request.train_local
        run = self._run(work.run_id)
        if not (work.secure or work.keep):
            _check_plain_allowed(run)
        model, *gradient = pieces(run.layout, payload)

        def stopped() -> bool:
            self._throttle.pause()  # between two training steps
            return request.id in self._cancelled

        if work.keep:
            trained = run.train(work, model, lambda progress: None, stopped, *gradient)
            self._buffered = work, model, trained
            return link_pb2.Reply(trained=link_pb2.Trained(seconds=trained.seconds)), None
        if not work.secure:
            trained = run.train(work, model, progress, stopped, *gradient)
            self._sent = request.id, payload
            return link_pb2.Reply(trained=trained), model
        about = (work.run_id, work.round, work.attempt)
        attempt = self._secure.propose(about, work.secure, work.model)
        trained = run.train(work, model, lambda progress: None, stopped, *gradient)
        keys = self._secure.advertise(
            attempt,
            run.layout.decode(model),
            examples=trained.examples,
            loss=trained.training.get("loss", 0.0),
            seed=run.seed_of(work.round),
        )
        reply = link_pb2.Trained(seconds=trained.seconds, secure=keys)
        return link_pb2.Reply(trained=reply), None

    def _agree_on_buffered(self, work: link_pb2.Agree) -> link_pb2.Reply:
        """Begin the secure sum of the buffered update, discounted by its age in rounds."""
        from isthmus.job.federated import buffer_name

        if self._buffered is None or self._buffered[0].run_id != work.run_id:
            raise UpdateError("this device keeps no update of that run")
        request, payload, trained = self._buffered
        run = self._run(work.run_id)
        about = (work.run_id, work.round, work.attempt)
        blob = link_pb2.Blob(sha256=buffer_name(work.run_id, work.round))
        attempt = self._secure.propose(about, work.secure, blob)
        self._buffered = None
        staleness = max(work.round - request.round, 0)
        keys = self._secure.advertise(
            attempt,
            run.layout.decode(payload).mul_(run.job.federated.buffer.discount(staleness)),
            examples=trained.examples,
            loss=trained.training.get("loss", 0.0),
            seed=run.seed_of(work.round),
        )
        reply = link_pb2.Trained(seconds=trained.seconds, secure=keys)
        return link_pb2.Reply(trained=reply)

    def _score(self, work: link_pb2.Score, payload: Buffer) -> link_pb2.Reply:
        """Score models; with secure aggregation the scores are not sent before they are masked."""
        from isthmus.task import paired_scores
        from isthmus_clients.training.local_run import local_seed

        run = self._run(work.run_id)
        candidates = [list(mean.of) for mean in work.candidates]
        if not work.secure:
            _check_plain_allowed(run)
            scores = run.score(payload, candidates)
            return link_pb2.Reply(scored=link_pb2.Scored(scores=scores))
        about = (paired_scores.comparisons_run_id(work.run_id), work.comparison, work.attempt)
        attempt = self._secure.propose(about, work.secure, work.models)
        started = time.monotonic()
        vector = paired_scores.score_vector(run.score(payload, candidates))
        seed = local_seed(run.job.seed, -work.comparison, self.participant.name)
        keys = self._secure.advertise(attempt, vector, examples=1, loss=0.0, seed=seed)
        seconds = time.monotonic() - started
        return link_pb2.Reply(trained=link_pb2.Trained(seconds=seconds, secure=keys))

    def _run(self, run_id: str) -> DeviceRun:
        run = self._runs.get(run_id)
        if run is None:
            raise UpdateError(f"the run {run_id!r} is not open on this device")
        return run

    def _app(self, run_id: str) -> FlowerRun:
        app = self._apps.get(run_id)
        if app is None:
            raise UpdateError(f"the run {run_id!r} is not open on this device with a Flower app")
        return app

    def _open(self, work: link_pb2.OpenRun, package: Buffer | None) -> link_pb2.Reply:
        import torch

        from isthmus_clients.device import task_delivery
        from isthmus_clients.training.local_run import DeviceRun, app_of

        torch.set_num_threads(self.threads)
        task_delivery.admit_job(work, package, self.tasks, self._guard)
        if app_of(work):
            from isthmus_clients.flower.client_app import FlowerRun

            app = FlowerRun(work, self.participant, self.data, self.tasks)
            self._runs, self._apps = {}, {work.run_id: app}
            return link_pb2.Reply(opened=link_pb2.Opened())
        run = DeviceRun(work, self.participant, self.data, self.tasks)
        self._runs, self._apps = {work.run_id: run}, {}
        log.info("opened %s with %d examples", work.run_id, run.examples)
        secure = run.job.federated.secure_aggregation
        opened = link_pb2.Opened(examples=0 if secure else run.examples, hours=self.hours)
        return link_pb2.Reply(opened=opened)


def _check_plain_allowed(run: DeviceRun) -> None:
    """Refuse to send figures in plaintext if the opened job promises secure aggregation."""
    if run.job.federated.secure_aggregation:
        raise UpdateError(
            f"{run.job.name!r} was opened with federated.secure_aggregation, and this request "
            "would send this device's own figures in plaintext"
        )


async def serve(address: str, agent: Agent, membership: Membership | None = None) -> None:
    """Connect to the server and serve its requests until cancelled.

    Raises:
        AdmissionRefused: the server refuses this device.
        UserError: the server is on another machine, and this device has not joined it.
    """
    uplink = Uplink(
        address,
        agent.participant.name,
        link_pb2.CLIENT,
        agent,
        identity=agent.identity,
        on_welcome=agent.welcomed,
        membership=membership,
    )
    await uplink.run()
