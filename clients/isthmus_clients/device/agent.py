"""The device agent: checks the requests of the server, and has the task's host do their work."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from isthmus.errors import AdmissionRefused, JobError, UpdateError
from isthmus.identity.membership import Membership
from isthmus.identity.proxies import ProxyChoice
from isthmus.job import Job, read_job
from isthmus.task import Participant
from isthmus.transport.blob_sources import NamedSource
from isthmus.transport.blobs import Buffer, describe
from isthmus.transport.mirrors import MirrorSources
from isthmus.transport.requests import model_of
from isthmus.transport.transfer_time import TransferTime
from isthmus.transport.uplink import Uplink
from isthmus.transport.uploads import UploadAddresses
from isthmus.transport.worker import ReportProgress
from isthmus.wire import link_pb2
from isthmus_clients.device.active_run import ActiveRun
from isthmus_clients.device.link_rate import too_slow
from isthmus_clients.device.own_figures import OwnFigures
from isthmus_clients.device.own_link import OwnLink
from isthmus_clients.device.received_models import ReceivedModels
from isthmus_clients.device.resource_limits import CpuThrottle
from isthmus_clients.device.secure_measurements import evaluate, score
from isthmus_clients.device.secure_sessions import SecureSessions, check_wanted
from isthmus_clients.device.task_host import (
    InProcessHost,
    TaskHost,
    TrainingResult,
    own_secret,
    train_silently,
)
from isthmus_clients.device.update_tally import UpdateTally
from isthmus_clients.training.examples_account import ExamplesAccount
from isthmus_clients.training.personal_state import PersonalStates
from isthmus_clients.training.withholding import attempted, constant_failures
from isthmus_privacy.purpose import check_gradient_scale

if TYPE_CHECKING:
    from isthmus_clients.device.owner_limits import LimitsGuard
    from isthmus_clients.device.weights.keeper import WeightKeeper
    from isthmus_clients.device.weights.sources import Pull

log = logging.getLogger(__name__)

OWNER_REFUSES = "owner-refuses"
"""Code of a refusal by the owner's limits: the server learns from it that no work was begun."""

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


class Agent:
    """Executes a device's requests in its open runs (an `isthmus.transport.worker.Worker`).

    Guarantees:
      * its data never leaves this device: only an update, its weight and average figures do;
      * where a job protects examples, a failed training tells nothing but that it failed;
      * in a run with secure aggregation nothing is sent in clear, for any request of the server,
        and a failure tells nothing about the data (`isthmus_clients.training.withholding`);
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
        host: TaskHost | None = None,
        group: str = "",
        log_file: Path | None = None,
        shares: bool = False,
        device: str = "cpu",
        states: PersonalStates | None = None,
        residuals: Path | None = None,
        account: ExamplesAccount | None = None,
        tally: UpdateTally | None = None,
        own_figures: OwnFigures | None = None,
        own_link: OwnLink | None = None,
        weights: WeightKeeper | None = None,
    ) -> None:
        """Create a device.

        Args:
            participant: its name, and its shard where one data set is split.
            data: location of this device's data; overrides the one of a job.
            threads: CPU threads used for training and masking.
            hours: working hours that are sent to the server, see `isthmus.job.section.Hours.parse`.
            signing_key: identity in secure aggregation; None generates a key for this process.
            history_file: persists which rounds this device was in; as long-lived as the key.
            tasks: directory of the only tasks that may be loaded; None loads any task from the
                path in the request, for a server that started this device itself.
            guard: checks requests against the owner's limits; None allows everything.
            host: runs the task's code; None runs it in this process.
            group: the group of devices that the owner has declared; empty for none.
            log_file: where this process logs, for failures to name; only for a server that started
                this device itself.
            shares: blobs may pass as open files, see `Uplink`; likewise.
            device: what to train on, without a `host`; see `isthmus_clients.training.accelerator`.
            states: keeps what stays on the device between rounds, without a `host`; None keeps it
                as long as this process runs.
            residuals: directory for what compressed updates leave to be sent later; None keeps
                that as long as this process runs, as it does the `account` and the `tally`.
            account: what training has cost the examples of this device.
            tally: counts its updates for its owner.
            own_figures: keeps its own evaluations for its owner; None keeps none.
            own_link: keeps the address of its link for its owner, likewise.
            weights: gets the files that models start from; None for those at the job's path.

        Raises:
            UserError: the owner's limits let the server name any host.
        """
        self._shares = shares
        self.participant = participant
        self._group = group
        self.hours = hours
        self.tasks = tasks
        self._places = {"--tasks": tasks, "--data": data}
        self._account = account or ExamplesAccount(None)
        self._tally = tally or UpdateTally(None)
        self._own_figures = own_figures
        self._own_link = own_link or OwnLink(None)
        self._weights = weights
        self._active: ActiveRun | None = None
        self._guard = guard
        self._log_file = log_file
        limits = None if guard is None else guard.limits
        self._throttle = CpuThrottle(None if limits is None else limits.cpu_percent)
        privacy = None if limits is None else limits.privacy
        self._secure = SecureSessions(
            participant.name, signing_key, history_file, privacy, threads, residuals, self._tally
        )
        pause = self._throttle.pause
        states = states or PersonalStates(None)
        secret = None if signing_key is None else own_secret(signing_key)
        self.host = host or InProcessHost(
            participant, data, tasks, threads, pause, device, states, shares=shares, secret=secret
        )
        self.models = ReceivedModels(shares=shares)
        self._mirrors = (
            None
            if limits is None
            else MirrorSources(limits.server_sources, "server_sources in policy.toml")
        )
        self._uploads = (
            None
            if limits is None
            else UploadAddresses(limits.server_uploads, "server_uploads in policy.toml")
        )
        self._pull: Pull | None = None
        self._link_received = TransferTime()
        self._link_sent = TransferTime()
        self._said_too_slow = ""
        """The run for which it was said that the link is too slow."""
        self._working = asyncio.Lock()
        self._expiry: asyncio.TimerHandle | None = None
        self._expiring: asyncio.Task[None] | None = None
        self._cancelled: dict[int, link_pb2.Request] = {}
        """Requests that the server has cancelled, by identity: a lying server may repeat ids."""

    @property
    def identity(self) -> bytes:
        """This device's public key."""
        return self._secure.identity

    def welcomed(self, welcome: link_pb2.Welcome) -> None:
        """Take the enrolment of this device's identity from the server's welcome."""
        self._secure.welcomed(welcome)

    def uplink(
        self,
        address: str,
        membership: Membership | None = None,
        sources: Sequence[NamedSource] = (),
        proxy: ProxyChoice | None = None,
        others: Sequence[str] = (),
    ) -> Uplink:
        """Create this device's connection to the server; `sources` may have what it sends.

        `proxy` is what the owner says about proxies, `others` are further addresses; see `Uplink`.

        Raises:
            UserError: the server is on another machine, and this device has not joined it, or a
                proxy cannot be used.
        """
        uplink = Uplink(
            address,
            self.participant.name,
            link_pb2.CLIENT,
            self,
            identity=self.identity,
            on_welcome=self.welcomed,
            membership=membership,
            shares=self._shares,
            wanted=self.models.wanted,
            held=self.models.held,
            sources=sources,
            mirrors=self._mirrors,
            uploads=self._uploads,
            proxy=proxy,
            stays=self._guard is not None and not self._guard.limits.hang_up,
            others=others,
            places=self._places,
            on_link=self._own_link.note,
        )
        self._pull = uplink.piece
        self._link_received = uplink.received
        self._link_sent = uplink.sent
        return uplink

    def buffer(self, request: link_pb2.Request, size: int) -> Buffer | None:
        """Allocate memory for the payload of a request.

        The payload is the models of an open run, the roster of a secure sum, or the package of a
        run's task; None declines a package.

        Raises:
            UpdateError: the run is not open, or the size is not that of its models, or larger than
                a roster can be.
            AdmissionRefused: the owner does not allow the request.
            DetailsWithheld: there is no memory, in a run with secure aggregation.
        """
        with constant_failures(self._is_secure(request), self._log_file):
            return self._allocate(request, size)

    def _allocate(self, request: link_pb2.Request, size: int) -> Buffer | None:
        kind = request.WhichOneof("work")
        if kind == "open":
            from isthmus_clients.device import task_delivery

            if task_delivery.should_fetch(request.open, self.tasks, self._guard):
                return bytearray(size)
            return None
        if kind == "secure_step":
            self._secure.check_roster(request.secure_step, size)
            return bytearray(size)
        active = self._active
        room = 0
        if active is not None and kind == "train_local":
            room = active.room_for(request)
        # The owner's limits are for the update, too, which is as large as the whole model.
        model = model_of(request)
        self._check(request, size if model is None else model.size, room)
        run = self._run(getattr(request, kind).run_id, app=kind == "app")
        model_size = self.models.change_size(run, request, size)
        run.check_size(request, model_size)
        if kind == "train_local":
            self._say_if_too_slow(run, size, request.train_local.seconds)
        return bytearray(size) if model_size != size else self.host.buffer(size, room)

    def _say_if_too_slow(self, run: ActiveRun, size: int, seconds: float) -> None:
        """Tell the owner once in a run, before a round begins, that the link is too slow for it."""
        why = too_slow(
            run.job,
            self._link_received,
            self._link_sent,
            size,
            result_bytes=run.layout.nbytes,
            seconds=seconds,
        )
        if why and self._said_too_slow != run.run_id:
            self._said_too_slow = run.run_id
            log.warning("%s: %s", self.participant.name, why)

    def _check(self, request: link_pb2.Request, size: int, room: int = 0) -> None:
        """Check the owner's limits before memory is allocated."""
        if self._guard is None:
            return
        kind = request.WhichOneof("work")
        masked = kind in ("train_local", "score", "evaluate") and bool(
            getattr(request, kind).secure
        )
        masked = masked or (kind == "train_local" and bool(request.train_local.ranges))
        try:
            if not masked and not (kind == "train_local" and request.train_local.keep):
                self._guard.check_plain()
            self._guard.check_work(size, room)
        except AdmissionRefused as refused:
            refused.code = OWNER_REFUSES
            raise

    async def work(
        self, request: link_pb2.Request, model: Buffer | None, progress: ReportProgress
    ) -> tuple[link_pb2.Reply, Buffer | None]:
        """Open or close a run, train for one round, score or evaluate models.

        Raises:
            DetailsWithheld: it failed, in a run with secure aggregation.
            IsthmusError: it failed; in a run with secure aggregation, for a reason that depends on
                the request only.
        """
        try:
            with constant_failures(self._is_secure(request), self._log_file):
                return await self._work(request, model, progress)
        finally:
            self._cancelled.pop(id(request), None)
            # Also in runs with secure aggregation: they are about files, and not about data.
            for note in self.host.take_notes():
                progress(link_pb2.Progress(note=note))

    def _is_secure(self, request: link_pb2.Request) -> bool:
        """Whether the details of a failure are withheld from the server."""
        if self._guard is not None and self._guard.limits.privacy.secure_aggregation:
            return True
        if request.HasField("open"):
            try:
                return read_job(request.open.job).federated.secure_aggregation
            except JobError:
                return True
        return self._active is None or self._active.job.federated.secure_aggregation

    async def _work(
        self, request: link_pb2.Request, model: Buffer | None, progress: ReportProgress
    ) -> tuple[link_pb2.Reply, Buffer | None]:
        kind = request.WhichOneof("work")
        if kind == "prepare":  # besides the work on requests of other runs
            return await self._prepare(request, progress), None
        if kind == "open":
            async with self._working:
                return await asyncio.to_thread(self._open, request.open, model), None
        if kind == "train_local":
            model = self._received(request, model)
            run = self._run(request.train_local.run_id)
            async with self._working:
                model = await self.models.whole(self.host, run, request, model)
                trained = await self._throttled(self._train, request, model, progress)
            self._free_later(request)
            return trained
        if kind in ("score", "evaluate"):
            async with self._working:
                self._secure.drop_ranged(self.host)  # its round is over
            measure = self._score if kind == "score" else self._evaluate
            run = self._run(getattr(request, kind).run_id)
            if kind == "evaluate" and model is None and run.job.statistics.collect:
                # Counts of data need no model: none was sent, and none is read.
                self._check(request, 0)
                async with self._working:
                    model = self.host.buffer(run.layout.nbytes)
                    return await self._throttled(measure, request, model), None
            model = self._received(request, model)
            async with self._working:
                model = await self.models.whole(self.host, run, request, model)
                return await self._throttled(measure, request, model), None
        if kind == "app":
            self._run(request.app.run_id, app=True)
            if model is None:
                self._check(request, 0)
            async with self._working:
                answer, records = await self._throttled(
                    self.host.answer, request.id, request.app, model or b""
                )
            return link_pb2.Reply(app_replied=answer), records
        if kind == "agree":
            async with self._working:
                return await self._throttled(self._agree, request.agree)
        if kind == "secure_step":
            async with self._working:
                stepped, payload = await self._throttled(
                    self._secure.step, request.secure_step, model
                )
            return link_pb2.Reply(secure_stepped=stepped), payload
        if kind == "close":
            if self._active is not None and self._active.run_id == request.close.run_id:
                self._active = None
            self.host.close(request.close.run_id)
            self.models.forget(request.close.run_id)
            self._secure.forget_kept()
            return link_pb2.Reply(closed=link_pb2.Closed()), None
        raise AdmissionRefused(f"an edge client does not support the request {kind!r}")

    def _received(self, request: link_pb2.Request, model: Buffer | None) -> Buffer:
        """The model of a request; one of no bytes was not announced to `buffer`, and is refused."""
        if model is None:
            kind = request.WhichOneof("work")
            self._run(getattr(request, kind).run_id)
            raise UpdateError(f"the request {kind!r} came without a model")
        return model

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
        """Reuse the memory of the acknowledged update, unless it is kept for a later sum."""
        if not accepted:
            self._secure.forget_ranged(request)
        if not self._secure.keeps(request):  # another may have the same id, of a lying server
            self.host.release(request.id, accepted)

    def _free_later(self, request: link_pb2.Request) -> None:
        """Free an update that waits for the second sum of its round when that must be over.

        The server asks only those who are in the first one, and may have lost this device.
        """
        seconds = self._secure.seconds_kept(request)
        if seconds is None:
            return

        async def free() -> None:
            async with self._working:
                self._secure.drop_ranged(self.host, request)

        def expire() -> None:
            self._expiring = asyncio.create_task(free())

        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = asyncio.get_running_loop().call_later(seconds, expire)

    def cancel(self, request: link_pb2.Request, reason: str) -> None:
        """Stop training at the next step: its result is no longer needed."""
        if request.HasField("prepare"):
            if self._weights is not None:
                self._weights.cancel(request.id)
            return
        self._cancelled[id(request)] = request
        self.host.cancel(request.id)

    def _train(
        self, request: link_pb2.Request, payload: Buffer, progress: ReportProgress
    ) -> tuple[link_pb2.Reply, Buffer | None]:
        """Train; send the update, or keep it and send the keys it will be masked with.

        With secure aggregation no loss, no progress and no number of examples is sent in clear.
        """
        work = request.train_local
        run = self._run(work.run_id)
        run.check_uses_models()
        # Again: since the memory was allocated, the run may have been opened with another job.
        run.check_size(request, len(payload))
        check_gradient_scale(work.gradient_scale, kept=work.keep)
        masked = bool(work.secure or work.ranges)
        if not (masked or work.keep):
            run.check_plain_allowed()
        if work.keep:
            run.check_buffered()
            self._secure.keep(self.host, run, request, payload, self._wanted(run, request))
            return link_pb2.Reply(trained=link_pb2.Trained()), None
        if masked:
            wanted = self._wanted(run, request)
            reply = self._secure.train(self.host, run, request, payload, wanted)
            return reply, self._secure.take_masked()
        run.charge(work)
        report = progress if run.reports else lambda _: None
        with constant_failures(run.account is not None, self._log_file, on_data=True):
            trained, update = self._trained(run, request, payload, report)
            run.protect(trained, update)
            update = run.encoded(work, update)
        trained.result.CopyFrom(self._named(update))
        return link_pb2.Reply(trained=trained), update

    def _trained(
        self, run: ActiveRun, request: link_pb2.Request, payload: Buffer, report: ReportProgress
    ) -> TrainingResult:
        """Train for a plain round; zeros if that fails in a job whose report is not to say so.

        Raises:
            UpdateError: the server has cancelled it.
        """
        import torch

        began = time.monotonic()
        work = request.train_local
        if run.job.privacy is None:
            result = self.host.train(request.id, work, payload, report)
        elif (found := train_silently(self.host, request, payload)) is not None:
            result = found
        else:
            check_wanted(self._wanted(run, request))
            layout = run.result_layout(work)
            zeros = layout.encode(torch.zeros(layout.size))
            result = link_pb2.Trained(seconds=time.monotonic() - began), zeros
        trained, update = result
        self._tally.note(trained.examples > 0)
        trained.examples = run.weight
        trained.other_weight = run.gives_other_weight
        return trained, update

    def _named(self, update: Buffer) -> link_pb2.Blob:
        """The name by which the server fetches an update; the link names what passes as a file."""
        if self._shares:
            return link_pb2.Blob(size=len(update))
        return describe(update)

    def _agree(self, work: link_pb2.Agree) -> tuple[link_pb2.Reply, Buffer | None]:
        """Begin the secure sum of the update that this device keeps."""
        self._run(work.run_id)
        return self._secure.agree(self.host, work), self._secure.take_masked()

    def _score(self, request: link_pb2.Request, payload: Buffer) -> link_pb2.Reply:
        """Score models; with secure aggregation the scores are not sent before they are masked."""
        work = request.score
        run = self._run(work.run_id)
        run.check_uses_models()
        run.check_size(request, len(payload))
        run.check_measured()
        if work.secure:
            wanted = self._wanted(run, request)
            return score(self._secure, self.host, run, request, payload, wanted)
        run.check_plain_allowed()

        def score_models() -> Sequence[float]:
            return self.host.score(request.id, work, payload)

        if run.job.privacy is None:
            scores = score_models()
        else:  # none, which count as the middle of their range, if this fails
            scores = attempted(f"comparison {work.comparison} of {work.run_id}", score_models) or ()
            check_wanted(self._wanted(run, request))
        return link_pb2.Reply(scored=link_pb2.Scored(scores=scores))

    def _evaluate(self, request: link_pb2.Request, payload: Buffer) -> link_pb2.Reply:
        """Evaluate a model; with secure aggregation the counts are not sent before masking."""
        work = request.evaluate
        run = self._run(work.run_id)
        run.check_size(request, len(payload))
        run.check_measured()
        apart = self._check_evaluation(run)
        if work.secure:
            wanted = self._wanted(run, request)
            own = self._own_figures
            return evaluate(
                self._secure, self.host, run, request, payload, wanted, own, same_devices=apart
            )
        run.check_plain_allowed()

        def count() -> link_pb2.Counted:
            return self.host.evaluate(request.id, work, payload)

        if run.job.privacy is None:
            counted = count()
        else:  # see `_score`
            what = f"evaluation in round {work.round} of {work.run_id}"
            counted = attempted(what, count) or link_pb2.Counted()
            check_wanted(self._wanted(run, request))
        if self._own_figures is not None and counted.own_figures:
            self._own_figures.note(work.run_id, work.round, counted.own_figures)
        return link_pb2.Reply(counted=link_pb2.Counted(counts=counted.counts))

    def _check_evaluation(self, run: ActiveRun) -> bool:
        """Check the owner's limits on counts; returns whether they bind the devices of the sum.

        Raises:
            AdmissionRefused: the owner does not allow it.
        """
        if self._guard is None or run.job.statistics.collect:
            return False
        try:
            self._guard.check_evaluation(run.job)
        except AdmissionRefused as refused:
            refused.code = OWNER_REFUSES
            raise
        bound = self._guard.limits.privacy.counts == "same-devices"
        return bound and not run.job.devices_add_noise

    def _wanted(self, run: ActiveRun, request: link_pb2.Request) -> Callable[[], bool]:
        """Tells whether the server has neither cancelled a request nor closed its run."""
        return lambda: self._active is run and id(request) not in self._cancelled

    def _run(self, run_id: str, *, app: bool = False) -> ActiveRun:
        run = self._active
        if run is None or run.run_id != run_id or run.has_app != app:
            with_app = " with an app" if app else ""
            raise UpdateError(f"the run {run_id!r} is not open on this device{with_app}")
        return run

    def _open(self, work: link_pb2.OpenRun, package: Buffer | None) -> link_pb2.Reply:
        from isthmus_clients.device import task_delivery

        self._active = None
        task_delivery.admit_job(work, package, self.tasks, self._guard)
        run = ActiveRun.of(work, self.tasks)
        if self._weights is not None:
            self._weights.place(run.job)  # so that the server learns it if they are lost
        run = dataclasses.replace(run, group=self._group_in(run.job))
        if self._guard is not None:
            weights = self._guard.limits.privacy.weights
            run = dataclasses.replace(run, owners_weights=weights)
            allowed = PersonalStates(None, self._guard.limits.personal_mb)
            allowed.check(run.kept)
            if run.job.federated.compression is not None:
                allowed.check(run.layout)  # of residuals, which are kept between rounds, too
        self._secure.run_opened(work.run_id)
        secure = run.job.federated.secure_aggregation
        with constant_failures(secure, self._log_file, on_data=True):
            examples = self.host.open(work)
            # A server that opens runs with several sizes of batches could find the number. One that
            # started this device has its log.
            withheld = secure and self.tasks is not None
            run = run.weighing(examples)
            run = run.with_account(self._account, examples, withheld=withheld)
        self._active = run
        if run.has_app:
            return link_pb2.Reply(opened=link_pb2.Opened())
        sent = 0 if secure else run.weight
        opened = link_pb2.Opened(examples=sent, hours=self.hours)
        if run.job.federated.groups is not None:
            opened.group = run.group
        return link_pb2.Reply(opened=opened)

    async def _prepare(self, request: link_pb2.Request, progress: ReportProgress) -> link_pb2.Reply:
        """Get the files that a job's model starts from."""
        if self._weights is not None:
            if self._pull is not None:
                self._weights.connect(self._pull)
            await self._weights.prepare(request.id, request.prepare, progress)
        return link_pb2.Reply(prepared=link_pb2.Prepared())

    def _group_in(self, job: Job) -> str:
        """The group that the owner has declared; without an owner's limits, by the job."""
        groups = job.federated.groups
        if self._guard is not None or self._group or groups is None:
            return self._group
        return groups.of_shard(self.participant.shard)


async def serve(uplink: Uplink, agent: Agent) -> None:
    """Serve the server's requests until cancelled, or until `Uplink.leave` has ended.

    Raises:
        AdmissionRefused: the server refuses this device.
    """
    try:
        await uplink.run()
    finally:
        agent.host.close()
