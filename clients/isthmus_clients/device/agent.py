"""The device agent: holds the link, and hands work to the run it belongs to.

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
from isthmus_clients.device.resource_limits import Pace

if TYPE_CHECKING:
    from isthmus_clients.device.owner_limits import Guard
    from isthmus_clients.flower.client_app import FlowerRun
    from isthmus_clients.training.local_run import LocalRun
    from isthmus_clients.training.secure import Credentials, SecureParticipation
    from isthmus_privacy.secagg import ClientRequirements

_P = ParamSpec("_P")
_T = TypeVar("_T")

log = logging.getLogger(__name__)

MAX_MODELS = 8
"""That a device holds at a time, to compare them."""


class Agent:
    """One device's side of every run it takes part in (an `isthmus.transport.worker.Worker`).

    Guarantees:
      * its data never leaves this process: only an update, its weight and average figures do;
      * of a run with secure aggregation nothing leaves it in clear, whatever the server asks for;
      * one piece of work at a time, off the event loop, so the link stays alive meanwhile.
    """

    def __init__(
        self,
        participant: Participant,
        data: Path | None,
        threads: int = 1,
        hours: Sequence[str] = (),
        *,
        signing_key: Ed25519PrivateKey | None = None,
        memory: Path | None = None,
        tasks: Path | None = None,
        guard: Guard | None = None,
    ) -> None:
        """Be a device.

        Args:
            participant: its name, and its shard where one data set is split.
            data: where this device keeps its data; it wins over what a job says.
            threads: CPU threads used for training.
            hours: in which it wants to be asked, see `isthmus.job.section.Hours.parse`.
            signing_key: who it is in secure aggregation; None draws a key for this process.
            memory: file that keeps, beside such a key, which rounds this device was in.
            tasks: directory of the only tasks that are loaded here; None loads what the server
                names, from where it says: for a server that started this device itself.
            guard: holds it to its owner's policy; None allows whatever is asked.
        """
        self.participant = participant
        self.data = data
        self.threads = threads
        self.hours = hours
        self.tasks = tasks
        self._runs: dict[str, LocalRun] = {}
        self._apps: dict[str, FlowerRun] = {}
        self._signing_key = signing_key or Ed25519PrivateKey.generate()
        self._memory = memory
        self._guard = guard
        self._pace = Pace(None if guard is None else guard.policy.cpu_percent)
        self._welcome: link_pb2.Welcome | None = None
        self._credentials: Credentials | None = None
        self._secure: SecureParticipation | None = None
        self._kept: tuple[link_pb2.TrainLocal, Buffer, link_pb2.Trained] | None = None
        """An update that waits to be summed with others', and what it was asked and came to."""
        self._sent: tuple[str, Buffer] | None = None
        """A request whose update went out in plain, and its memory."""
        self._spare: Buffer | None = None
        """Memory for the next model: fresh memory costs more time than filling it."""
        self._working = asyncio.Lock()
        self._stopped: set[str] = set()

    @property
    def identity(self) -> bytes:
        """The public key that others know this device by."""
        return self._signing_key.public_key().public_bytes_raw()

    def welcomed(self, welcome: link_pb2.Welcome) -> None:
        """The server has enrolled this device's identity."""
        self._welcome = welcome

    def buffer(self, request: link_pb2.Request, size: int) -> Buffer | None:
        """Memory for what arrives: exactly the models that a request of an open run names.

        For a package of the run's task, if its owner wants it from there; None if not.

        Raises:
            UpdateError: no such run is open, or the size is not that of its models.
            AdmissionRefused: its owner does not allow it.
        """
        kind = request.WhichOneof("work")
        if kind == "open":
            from isthmus_clients.device import task_delivery

            if task_delivery.wanted(request.open, self.tasks, self._guard):
                return bytearray(size)
            return None
        self._check(request, size)
        if kind == "flower":
            return self._app(request.flower.run_id).buffer(size)
        if kind == "score":
            run = self._run(request.score.run_id)
            candidates = request.score.candidates
            count = 1 + max((number for one in candidates for number in one.of), default=0)
            if count > MAX_MODELS:
                raise UpdateError(f"{count} models are to be scored; at most {MAX_MODELS} are")
        else:
            run = self._run(request.train_local.run_id)
            count = 2 if request.train_local.with_gradient else 1
        if size != count * run.layout.nbytes:
            raise UpdateError(
                f"{count} models in {size} bytes were announced where one of this run's takes "
                f"{run.layout.nbytes}"
            )
        spare, self._spare = self._spare, None
        return spare if spare is not None and len(spare) == size else bytearray(size)

    def _check(self, request: link_pb2.Request, size: int) -> None:
        """Ask the owner's policy, before memory is taken for what comes."""
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
                return await self._paced(self._train, request, model, progress)
        if kind == "score":
            assert model is not None
            async with self._working:
                return await self._paced(self._score, request.score, model), None
        if kind == "flower":
            app = self._app(request.flower.run_id)
            if model is None:
                self._check(request, 0)
            async with self._working:
                answer, records = await self._paced(app.answer, request.flower, model or b"")
            return link_pb2.Reply(flower_replied=answer), records
        if kind == "agree":
            async with self._working:
                return await asyncio.to_thread(self._agree_on_kept, request.agree), None
        if kind == "secure_step":
            async with self._working:
                stepped, payload = await self._paced(self._step, request.secure_step)
            return link_pb2.Reply(secure_stepped=stepped), payload
        if kind == "close":
            self._runs.pop(request.close.run_id, None)
            self._apps.pop(request.close.run_id, None)
            self._kept = self._sent = self._spare = None
            return link_pb2.Reply(closed=link_pb2.Closed()), None
        raise AdmissionRefused(f"an edge client does not do {kind!r}")

    async def _paced(self, work: Callable[_P, _T], *args: _P.args, **more: _P.kwargs) -> _T:
        """Work on a thread, with no more of a core than the owner gives."""

        def run() -> _T:
            self._pace.begin()
            try:
                return work(*args, **more)
            finally:
                self._pace.rest()

        return await asyncio.to_thread(run)

    def acknowledged(self, request: link_pb2.Request, accepted: bool, reason: str) -> None:
        """Its memory is for the next model."""
        self._stopped.discard(request.id)
        if self._sent is not None and self._sent[0] == request.id:
            self._spare, self._sent = self._sent[1], None

    def cancel(self, request: link_pb2.Request, reason: str) -> None:
        """Stop training for a result that nobody wants, at the next step."""
        self._stopped.add(request.id)

    def _train(
        self, request: link_pb2.Request, payload: Buffer, progress: ReportProgress
    ) -> tuple[link_pb2.Reply, Buffer | None]:
        """Train, and send the update; or keep it here, and send the keys it will be masked with.

        With secure aggregation nothing about this device goes out in clear: no loss, no progress,
        no number of examples.
        """
        from isthmus_clients.training.local_run import pieces

        work = request.train_local
        run = self._run(work.run_id)
        if not (work.secure or work.keep):
            _may_speak_plainly(run)
        model, *gradient = pieces(run.layout, payload)

        def stopped() -> bool:
            self._pace.rest()  # this is between two steps
            return request.id in self._stopped

        if work.keep:
            trained = run.train(work, model, lambda progress: None, stopped, *gradient)
            self._kept = work, model, trained
            return link_pb2.Reply(trained=link_pb2.Trained(seconds=trained.seconds)), None
        if not work.secure:
            trained = run.train(work, model, progress, stopped, *gradient)
            self._sent = request.id, payload
            return link_pb2.Reply(trained=trained), model
        attempt = self._agree((work.run_id, work.round, work.attempt), work.secure, work.model)
        trained = run.train(work, model, lambda progress: None, stopped, *gradient)
        advert = attempt.advertise(
            run.layout.decode(model),
            examples=trained.examples,
            loss=trained.training.get("loss", 0.0),
            seed=run.seed_of(work.round),
        )
        self._secure = attempt
        answer = link_pb2.Trained(seconds=trained.seconds, secure=advert.to_bytes())
        return link_pb2.Reply(trained=answer), None

    def _agree_on_kept(self, work: link_pb2.Agree) -> link_pb2.Reply:
        """Have the update that was kept summed with others', discounted by its age in rounds."""
        from isthmus.job.federated import buffer_name

        if self._kept is None or self._kept[0].run_id != work.run_id:
            raise UpdateError("this device keeps no update of that run")
        began, payload, trained = self._kept
        run = self._run(work.run_id)
        about = link_pb2.Blob(sha256=buffer_name(work.run_id, work.round))
        attempt = self._agree((work.run_id, work.round, work.attempt), work.secure, about)
        self._kept = None
        stale = max(work.round - began.round, 0)
        advert = attempt.advertise(
            run.layout.decode(payload).mul_(run.job.federated.buffer.discount(stale)),
            examples=trained.examples,
            loss=trained.training.get("loss", 0.0),
            seed=run.seed_of(work.round),
        )
        self._secure = attempt
        answer = link_pb2.Trained(seconds=trained.seconds, secure=advert.to_bytes())
        return link_pb2.Reply(trained=answer)

    def _score(self, work: link_pb2.Score, payload: Buffer) -> link_pb2.Reply:
        """Score models; with secure aggregation the scores stay here until they are masked."""
        from isthmus.task import paired_scores
        from isthmus_clients.training.local_run import local_seed

        run = self._run(work.run_id)
        candidates = [list(one.of) for one in work.candidates]
        if not work.secure:
            _may_speak_plainly(run)
            scores = run.score(payload, candidates)
            return link_pb2.Reply(scored=link_pb2.Scored(scores=scores))
        about = (paired_scores.comparisons_run_id(work.run_id), work.comparison, work.attempt)
        attempt = self._agree(about, work.secure, work.models)
        started = time.monotonic()
        vector = paired_scores.score_vector(run.score(payload, candidates))
        seed = local_seed(run.job.seed, -work.comparison, self.participant.name)
        advert = attempt.advertise(vector, examples=1, loss=0.0, seed=seed)
        self._secure = attempt
        seconds = time.monotonic() - started
        return link_pb2.Reply(trained=link_pb2.Trained(seconds=seconds, secure=advert.to_bytes()))

    def _agree(
        self, about: tuple[str, int, int], agreed: bytes, blob: link_pb2.Blob
    ) -> SecureParticipation:
        """Look at what the server proposes, before anything is done for it."""
        from isthmus_clients.training.secure import Credentials, SecureParticipation

        if self._credentials is None:
            self._credentials = Credentials(
                self._signing_key.private_bytes_raw(), self._memory, self._floor()
            )
        if self._welcome is not None:
            self._credentials.welcomed(self._welcome.authority, self._welcome.enrolment)
        self._secure = None
        return SecureParticipation(about, agreed, blob.sha256, self._credentials)

    def _floor(self) -> ClientRequirements:
        """The least privacy that this device insists on."""
        from isthmus_privacy.secagg import ClientRequirements

        if self._guard is None:
            return ClientRequirements()
        wanted = self._guard.policy.privacy
        return ClientRequirements(clients_min=wanted.clients_min)

    def _step(self, work: link_pb2.SecureStep) -> tuple[link_pb2.SecureStepped, Buffer | None]:
        attempt = self._secure
        if attempt is None or attempt.key != (work.run_id, work.round, work.attempt):
            raise UpdateError("this device is not in that attempt of secure aggregation")
        return attempt.step(work)

    def _run(self, run_id: str) -> LocalRun:
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
        from isthmus_clients.training.local_run import LocalRun, app_of

        torch.set_num_threads(self.threads)
        task_delivery.admit(work, package, self.tasks, self._guard)
        if app_of(work):
            from isthmus_clients.flower.client_app import FlowerRun

            app = FlowerRun(work, self.participant, self.data, self.tasks)
            self._runs, self._apps = {}, {work.run_id: app}
            return link_pb2.Reply(opened=link_pb2.Opened())
        run = LocalRun(work, self.participant, self.data, self.tasks)
        self._runs, self._apps = {work.run_id: run}, {}
        log.info("opened %s with %d examples", work.run_id, run.examples)
        secure = run.job.federated.secure_aggregation
        opened = link_pb2.Opened(examples=0 if secure else run.examples, hours=self.hours)
        return link_pb2.Reply(opened=opened)


def _may_speak_plainly(run: LocalRun) -> None:
    """Refuse a request in clear where the job that was opened here promised a secure sum."""
    if run.job.federated.secure_aggregation:
        raise UpdateError(
            f"{run.job.name!r} was opened with federated.secure_aggregation, and this request "
            "wants this device's own figures in clear"
        )


async def serve(address: str, agent: Agent, membership: Membership | None = None) -> None:
    """Dial in and work until cancelled.

    Raises:
        AdmissionRefused: the server does not want this device.
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
