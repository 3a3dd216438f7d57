"""The datacenter as the server sees it: one participant, whatever happens behind it.

Requests come one at a time over the link and become commands for the ranks. The model crosses
through mapped files under the state directory: the link writes into one, the ranks read it; the
ranks write another, the link reads it. This process never holds a model in memory of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import re
import shutil
import time
from pathlib import Path

from isthmus.errors import IsthmusError, UpdateError, UserError
from isthmus.identity.membership import Membership
from isthmus.job import read_job
from isthmus.task import check_installed
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.tensors.fingerprint import received
from isthmus.transport.blobs import Buffer
from isthmus.transport.uplink import Uplink
from isthmus.transport.worker import ReportProgress
from isthmus.wire import link_pb2
from isthmus_datacenter.service.control_store import Command, Report
from isthmus_datacenter.service.fork_server import AgentForkServer
from isthmus_datacenter.service.rank_group import Group, Nodes
from isthmus_datacenter.service.transfer_files import TransferFiles, check_model, locked
from isthmus_datacenter.training.live_progress import events

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_LEAVE_LOOK_SECONDS = 1.0
"""Between two looks at whether a node is about to be taken away."""
_NODE_GRACE_SECONDS = 20.0
"""For a running round when it is: schedulers give about thirty."""
_SAVING_SECONDS = 10.0
"""At least, of a grace, for the state within a round to be saved."""
_OURS = {"exchange", "logs", "lock", "membership"}
"""Names under the state directory that no run can have."""

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Run:
    """The run that is open."""

    run_id: str
    layout: TensorLayout


class Service:
    """Does the link's requests with a group of ranks; the `Worker` of a datacenter.

    Guarantees:
      * one service per state directory;
      * a step is trained the same however often ranks, or this process, died on the way;
      * a failure is one sentence; none leaves a request without an answer.
    """

    def __init__(
        self,
        name: str,
        ranks: int,
        state: Path,
        data: Path | None = None,
        *,
        tasks: Path | None = None,
        nodes: Nodes | None = None,
        template: AgentForkServer | None = None,
    ) -> None:
        """`state` keeps checkpoints and logs; `data` overrides where the job says its data is.

        With a directory of `tasks`, only those in it are loaded, and the server does not say where
        data is either; without, its word is taken for both, as on one machine.

        The ranks are on this machine, forked from the `template`, or as many on each of the
        `nodes`. Without a template, one is started.

        Raises:
            UserError: another service uses this state directory.
        """
        self.name = name
        self.state = state.resolve()
        self.data = None if data is None else data.resolve()
        self.tasks = None if tasks is None else tasks.resolve()
        self._lock_file = locked(self.state)
        self._crossing = TransferFiles(self.state / "exchange")
        self._group = Group(name, ranks, self.state, nodes, template)
        self._run: _Run | None = None
        self._busy = asyncio.Lock()
        self._told_to_leave = asyncio.Event()
        self._grace = 0.0
        self._working: str | None = None
        self._unwanted: set[str] = set()

    def start(self) -> None:
        """Start the ranks, so that they are warm when the first request comes."""
        self._group.start()

    def close(self) -> None:
        """End the ranks and let the state directory go."""
        self._group.close()
        self._lock_file.close()

    async def serve(self, address: str, membership: Membership | None = None) -> None:
        """Hold the link to the server and work until cancelled.

        Raises:
            AdmissionRefused: the server does not want this participant.
            UserError: the server is on another machine, and this one has not joined it.
        """
        uplink = Uplink(address, self.name, link_pb2.DATACENTER, self, membership=membership)
        self.start()
        link = asyncio.create_task(uplink.run())
        left = asyncio.create_task(self._left())
        try:
            await asyncio.wait((link, left), return_when=asyncio.FIRST_COMPLETED)
            if link.done():
                link.result()
        finally:
            for task in (link, left):
                task.cancel()
            await asyncio.gather(link, left, return_exceptions=True)
            self.close()

    # -- leaving --------------------------------------------------------------------------------

    @property
    def leaving(self) -> bool:
        """Whether `leave` was called."""
        return self._told_to_leave.is_set()

    def leave(self, grace_seconds: float) -> None:
        """Take no more work, and end when what runs is done and handed over, or the grace is.

        A round that is not done in half of it saves its state, or earlier where saving would have
        less than ten seconds. Whoever comes back with this state directory goes on there; where
        there was no time to save, it repeats the round.
        """
        self._grace = grace_seconds
        self._told_to_leave.set()

    async def _left(self) -> None:
        """Return when it is time to go."""
        while not self.leaving:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_LOOK_SECONDS):
                    await self._told_to_leave.wait()
            if not self.leaving and await self._group.must_leave():
                self.leave(_NODE_GRACE_SECONDS)
        log.warning("told to leave: %s", "a round is running" if self._working else "idle")
        deadline = time.monotonic() + self._grace
        enough = deadline - max(self._grace / 2, _SAVING_SECONDS)
        while (self._working or self._crossing.outgoing) and time.monotonic() < deadline:
            if time.monotonic() > enough:
                self._group.save()
            await asyncio.sleep(0.05)
        if self._working:
            log.warning("the round did not end within %g s and will be repeated", self._grace)

    # -- the worker's side of the link ----------------------------------------------------------

    def buffer(self, request: link_pb2.Request, size: int) -> Buffer | None:
        """A mapped file, where the ranks can read what the link writes: one model of the open run.

        None for a package of the task: here its owner installs it.

        Raises:
            UserError: no such run is open.
            UpdateError: the size is not that of its model.
            OSError: there is no room for it.
        """
        kind = request.WhichOneof("work")
        if kind == "open":
            return None
        layout = self._opened(getattr(request, kind).run_id).layout
        if size != layout.nbytes:
            raise UpdateError(
                f"a model of {size} bytes was announced where this run's takes {layout.nbytes}"
            )
        return self._crossing.room_for_model(request.id, size)

    async def work(
        self, request: link_pb2.Request, model: Buffer | None, progress: ReportProgress
    ) -> tuple[link_pb2.Reply, Buffer | None]:
        """Do one request, after those that came before it; when leaving, say nothing any more."""
        async with self._busy:
            if not self.leaving:
                try:
                    return await self._do(request, model, progress)
                except IsthmusError as error:
                    if not self.leaving:
                        raise
                    log.warning("%s", error)
            # A round of whoever refuses is tried again at once, and not often; whoever is lost is
            # waited for. The link ends in a moment.
            await asyncio.Event().wait()
        raise AssertionError

    async def _do(
        self, request: link_pb2.Request, model: Buffer | None, progress: ReportProgress
    ) -> tuple[link_pb2.Reply, Buffer | None]:
        try:
            if request.id in self._unwanted:
                raise UserError("cancelled before it began")
            self._working = request.id
            return await self._work(request, model, progress)
        except BaseException as error:
            self._crossing.drop_result(request.id)
            if isinstance(error, OSError):  # no room for a result, say
                said = f"the state directory {self.state} cannot be used: {error}"
                raise UserError(said) from error
            raise
        finally:
            self._working = None
            self._unwanted.discard(request.id)
            self._crossing.drop_model(request.id)

    def acknowledged(self, request: link_pb2.Request, accepted: bool, reason: str) -> None:
        """The files of the request are not needed any more: its model may not even have come."""
        self._crossing.drop_model(request.id)
        self._crossing.drop_result(request.id)

    def cancel(self, request: link_pb2.Request, reason: str) -> None:
        """Have the ranks stop at the next step, if it is this that they work on."""
        if request.id == self._working:
            self._group.cancel()
        else:
            self._unwanted.add(request.id)

    # -- the requests ---------------------------------------------------------------------------

    async def _work(
        self, request: link_pb2.Request, model: Buffer | None, progress: ReportProgress
    ) -> tuple[link_pb2.Reply, Buffer | None]:
        kind = request.WhichOneof("work")
        if kind == "open":
            return await self._open(request.open, progress), None
        if kind == "train_steps":
            return await self._train(request.id, request.train_steps, model, progress)
        if kind == "mean_gradient":
            if model is None:
                raise UpdateError("a gradient was asked for without the model to take it at")
            return await self._mean_gradient(request.id, request.mean_gradient, model)
        if kind == "export":
            return await self._export(request.id, request.export)
        if kind == "close":
            return await self._close(request.close), None
        raise UserError(f"a datacenter cannot do {kind!r}; it may be older than the server")

    async def _open(self, open_: link_pb2.OpenRun, progress: ReportProgress) -> link_pb2.Reply:
        if not _RUN_ID.fullmatch(open_.run_id) or open_.run_id in _OURS:
            raise UserError(f"run_id={open_.run_id!r} cannot name a directory")
        job = read_job(open_.job)
        layout = TensorLayout.from_header(open_.layout)
        base, data = Path(open_.base), self.data
        if self.tasks is not None:
            check_installed(job.task.source, self.tasks)
            base = self.tasks
        elif data is None:
            data = job.task.data_in(base)
        self._run = None
        self._group.lease_seconds = job.time.lease_seconds
        (self.state / open_.run_id).mkdir(exist_ok=True)
        command = Command(
            op="open",
            run_id=open_.run_id,
            job=open_.job,
            base=str(base),
            data=None if data is None else str(data),
            layout=open_.layout.decode("latin-1"),
            frozen=received(open_.frozen),
        )
        values, _ = await self._group.do(command)
        if values["note"]:
            progress(link_pb2.Progress(note=values["note"]))
        self._run = _Run(open_.run_id, layout)
        return link_pb2.Reply(opened=link_pb2.Opened(examples=values["examples"]))

    async def _train(
        self,
        request_id: str,
        train: link_pb2.TrainSteps,
        model: Buffer | None,
        progress: ReportProgress,
    ) -> tuple[link_pb2.Reply, Buffer | None]:
        run = self._opened(train.run_id)
        if train.until_step < train.from_step:
            raise UserError(f"until_step={train.until_step} is before from_step={train.from_step}")
        if model is not None:
            check_model(model, run.layout)
        command = Command(
            op="train",
            run_id=run.run_id,
            from_step=train.from_step,
            until_step=train.until_step,
            model=None if model is None else str(self._crossing.incoming[request_id]),
            model_digest="" if model is None else train.model.sha256.hex(),
            evaluate=train.evaluate,
            result=str(self._crossing.room_for_result(request_id, run.layout))
            if train.hand_back
            else None,
        )
        started = time.monotonic()

        def report(report: Report) -> None:
            progress(link_pb2.Progress(**dataclasses.asdict(report)))

        values, losses = await self._group.do(command, report)
        trained = link_pb2.Trained(
            examples=values["examples"],
            steps=values["steps"],
            seconds=time.monotonic() - started,
            training=values["training"],
            evaluation=values["evaluation"],
            profile=values["profile"],
            events=events(train.from_step, train.until_step, values, losses),
        )
        payload = None
        if train.hand_back:
            blob, payload = await self._crossing.result(request_id, run.layout)
            trained.result.CopyFrom(blob)
        return link_pb2.Reply(trained=trained), payload

    async def _mean_gradient(
        self, request_id: str, asked: link_pb2.MeanGradient, model: Buffer
    ) -> tuple[link_pb2.Reply, Buffer | None]:
        run = self._opened(asked.run_id)
        if asked.until_step <= asked.from_step:
            raise UserError(
                f"until_step={asked.until_step} is not after from_step={asked.from_step}"
            )
        check_model(model, run.layout)
        started = time.monotonic()
        command = Command(
            op="gradient",
            run_id=run.run_id,
            from_step=asked.from_step,
            until_step=asked.until_step,
            model=str(self._crossing.incoming[request_id]),
            result=str(self._crossing.room_for_result(request_id, run.layout)),
        )
        values, losses = await self._group.do(command)
        blob, payload = await self._crossing.result(request_id, run.layout)
        trained = link_pb2.Trained(
            result=blob,
            examples=values["examples"],
            steps=values["steps"],
            seconds=time.monotonic() - started,
            training=values["training"],
            events=[f"{loss}; the group restarted and began the gradient anew" for loss in losses],
        )
        return link_pb2.Reply(trained=trained), payload

    async def _export(
        self, request_id: str, export: link_pb2.Export
    ) -> tuple[link_pb2.Reply, Buffer | None]:
        run = self._opened(export.run_id)
        path = self._crossing.room_for_result(request_id, run.layout)
        command = Command(op="export", run_id=run.run_id, from_step=export.step, result=str(path))
        await self._group.do(command)
        blob, payload = await self._crossing.result(request_id, run.layout)
        return link_pb2.Reply(exported=link_pb2.Exported(model=blob)), payload

    async def _close(self, close: link_pb2.CloseRun) -> link_pb2.Reply:
        if self._run is not None and self._run.run_id == close.run_id:
            self._run = None
            await self._group.do(Command(op="close", run_id=close.run_id))
            if close.finished:  # checkpoints of it, which are larger than all else here
                await asyncio.to_thread(shutil.rmtree, self.state / close.run_id, True)
        return link_pb2.Reply(closed=link_pb2.Closed())

    def _opened(self, run_id: str) -> _Run:
        if self._run is None or self._run.run_id != run_id:
            raise UserError(f"run {run_id!r} is not open in this datacenter")
        return self._run
