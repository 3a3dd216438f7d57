"""Translate the link's requests into commands for the ranks, and their outcomes into replies.

Models pass through mapped files under the state directory: the link writes a model that the ranks
read, and the ranks write a result that the link reads. This process holds no model in its own
memory.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isthmus.errors import UpdateError, UserError
from isthmus.job import read_job
from isthmus.system.private_files import make_state_directory
from isthmus.task import check_installed
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import Buffer, InFile, describe
from isthmus.transport.requests import fingerprint_of, first_model_of
from isthmus.transport.worker import ReportProgress
from isthmus.wire import link_pb2
from isthmus_datacenter.checkpointing.unsent import UnsentUpdates
from isthmus_datacenter.messages import PROFILES, Command, ProgressReport
from isthmus_datacenter.service.hangs import HangLimits
from isthmus_datacenter.service.rank_group import RankGroup
from isthmus_datacenter.service.transfer_files import TransferFiles, check_model, release_pages
from isthmus_privacy.compression.single_updates import DatacenterMessages

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RESERVED_NAMES = {"exchange", "logs", "lock", "membership", PROFILES}
"""Names under the state directory that no run can have."""


@dataclasses.dataclass(frozen=True)
class DatacenterRun:
    """The run that is open in this datacenter."""

    run_id: str
    layout: TensorLayout
    unsent: UnsentUpdates | None
    """What is left of compressed updates; None for a job without."""


class RequestHandler:
    """Executes the requests of one run at a time with a group of ranks."""

    def __init__(
        self,
        group: RankGroup,
        files: TransferFiles,
        state: Path,
        data: Path | None,
        tasks: Path | None,
    ) -> None:
        """`state`, `data` and `tasks` are those of the `DatacenterService`."""
        self._group = group
        self._files = files
        self._state = state
        self._data = data
        self._tasks = tasks
        self._run: DatacenterRun | None = None

    def create_buffer(self, request: link_pb2.Request, size: int) -> Buffer | None:
        """A mapped file for one model of the open run, which the ranks can read.

        None for a package of the task: here its owner installs it.

        Raises:
            UserError: no such run is open.
            UpdateError: the size is not that of its model.
            OSError: the disk is full.
        """
        kind = request.WhichOneof("work")
        if kind == "open":
            return None
        layout = self._open_run(getattr(request, kind).run_id).layout
        # Before a file of that size is made, which the other side would choose otherwise.
        if size != layout.nbytes:
            raise UpdateError(
                f"a model of {size} bytes was announced; this run's model has {layout.nbytes}"
            )
        return self._files.create_model(request.id, size)

    def held_model(self, request: link_pb2.Request) -> Buffer | None:
        """The model of a request, if it came with an earlier one."""
        first = first_model_of(request)
        return self._files.held_model(first) if first else None

    async def handle(
        self, request: link_pb2.Request, model: Buffer | None, progress: ReportProgress
    ) -> tuple[link_pb2.Reply, Buffer | InFile | None]:
        """Execute one request.

        Raises:
            CommandError: the ranks failed to execute it, or it was cancelled.
            RankGroupError: the ranks failed repeatedly.
            UpdateError: the model is missing or has another layout.
            UserError: the request is not valid, or its run is not open.
            OSError: the disk is full.
        """
        kind = request.WhichOneof("work")
        if kind == "open":
            return await self._open(request.open, progress), None
        if kind == "train_steps":
            return await self._train(request.id, request.train_steps, model, progress)
        if kind == "mean_gradient":
            if model is None:
                raise UpdateError("the gradient request has no model")
            return await self._mean_gradient(request.id, request.mean_gradient, model)
        if kind == "export":
            return await self._export(request.id, request.export)
        if kind == "close":
            return await self._close(request.close), None
        raise UserError(f"a datacenter does not support {kind!r}; it may be older than the server")

    async def _open(self, open_: link_pb2.OpenRun, progress: ReportProgress) -> link_pb2.Reply:
        if not _names_a_run(open_.run_id):
            raise UserError(f"run_id={open_.run_id!r} cannot name a directory")
        job = read_job(open_.job)
        layout = TensorLayout.from_header(open_.layout)
        messages = DatacenterMessages.of(job, layout)  # a codec may be missing here
        base = Path(open_.base)
        data = self._data
        if self._tasks is not None:
            check_installed(job.task.source, self._tasks)
            job.model.check_inside()
            base = self._tasks
        elif data is None:
            data = job.task.data_in(base)
        self._run = None
        self._files.forget_model()
        # Before the first command, whose silence is measured by it.
        self._group.limits = HangLimits(
            lease_seconds=job.time.lease_seconds,
            round_seconds=job.time.first_round_seconds,
            hang_seconds=job.datacenter.hang_seconds,
        )
        make_state_directory(self._state / open_.run_id)
        command = Command(
            op="open",
            run_id=open_.run_id,
            job=open_.job,
            base=str(base),
            data=None if data is None else str(data),
            layout=open_.layout.decode("latin-1"),
            frozen=fingerprint_of(open_.frozen),
        )

        def send_progress(report: ProgressReport) -> None:
            progress(link_pb2.Progress(note=report.note))

        values, _ = await self._group.execute(command, send_progress)
        if values["note"]:
            progress(link_pb2.Progress(note=values["note"]))
        unsent = None
        if messages is not None:
            unsent = UnsentUpdates(self._state / open_.run_id, layout, messages)
        self._run = DatacenterRun(open_.run_id, layout, unsent)
        return link_pb2.Reply(opened=link_pb2.Opened(examples=values["examples"]))

    async def _train(
        self,
        request_id: str,
        train: link_pb2.TrainSteps,
        model: Buffer | None,
        progress: ReportProgress,
    ) -> tuple[link_pb2.Reply, Buffer | InFile | None]:
        run = self._open_run(train.run_id)
        if train.until_step < train.from_step:
            raise UserError(f"until_step={train.until_step} is before from_step={train.from_step}")
        if model is not None:
            check_model(model, run.layout)
        unsent = run.unsent if train.compressed else None
        if train.compressed and (unsent is None or model is None):
            raise UserError(
                "a compressed update needs a job with datacenter.compression, and the model that "
                "it is about"
            )
        about = (train.round, train.attempt)
        committed = (train.summed_round, train.summed_attempt)
        digest = train.model.sha256.hex()
        if model is None:
            self._files.forget_model()  # the ranks go on from their own
        else:
            await asyncio.to_thread(
                self._files.keep_model,
                request_id,
                train.model.sha256,
                changed=unsent is not None,
            )
        if unsent is not None and model is not None:
            # What was not sent earlier is brought into the received model, so that the states of
            # the round follow from it, too.
            digest += await asyncio.to_thread(unsent.apply, committed, model)
        if model is not None:
            release_pages(model)  # the ranks read the file
        command = Command(
            op="train_steps",
            run_id=run.run_id,
            from_step=train.from_step,
            until_step=train.until_step,
            model=None if model is None else str(self._files.model_path(request_id)),
            model_digest="" if model is None else digest,
            round=train.round,
            position=train.position,
            evaluate=train.evaluate,
            result=str(self._files.create_result(request_id, run.layout))
            if train.hand_back
            else None,
        )
        started = time.monotonic()

        def send_progress(report: ProgressReport) -> None:
            progress(link_pb2.Progress(**dataclasses.asdict(report)))

        values, losses = await self._group.execute(command, send_progress)
        if profile := values["profile"]:
            profile["restarts"] = len(losses)
        trained = link_pb2.Trained(
            examples=values["examples"],
            steps=values["steps"],
            seconds=time.monotonic() - started,
            training=values["training"],
            evaluation=values["evaluation"],
            profile=profile,
            step_figures=values["step_figures"],
            events=training_events(train.from_step, train.until_step, values, losses),
        )
        if not train.hand_back:
            return link_pb2.Reply(trained=trained), None
        if unsent is None or model is None:
            blob, payload = await self._files.describe_result(request_id, run.layout)
            trained.result.CopyFrom(blob)
            return link_pb2.Reply(trained=trained), payload
        after = self._files.result(request_id, run.layout)
        message, notes = await asyncio.to_thread(unsent.compress, about, committed, model, after)
        trained.events.extend(notes)
        trained.result.CopyFrom(describe(message))
        return link_pb2.Reply(trained=trained), message

    async def _mean_gradient(
        self, request_id: str, gradient: link_pb2.MeanGradient, model: Buffer
    ) -> tuple[link_pb2.Reply, Buffer | InFile | None]:
        run = self._open_run(gradient.run_id)
        if gradient.until_step <= gradient.from_step:
            raise UserError(
                f"until_step={gradient.until_step} is not after from_step={gradient.from_step}"
            )
        check_model(model, run.layout)
        self._files.keep_model(request_id, gradient.model.sha256, changed=False)
        release_pages(model)
        started = time.monotonic()
        command = Command(
            op="mean_gradient",
            run_id=run.run_id,
            from_step=gradient.from_step,
            until_step=gradient.until_step,
            statistics=gradient.statistics,
            model=str(self._files.model_path(request_id)),
            result=str(self._files.create_result(request_id, run.layout)),
        )
        values, losses = await self._group.execute(command)
        blob, payload = await self._files.describe_result(request_id, run.layout)
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
    ) -> tuple[link_pb2.Reply, Buffer | InFile | None]:
        run = self._open_run(export.run_id)
        path = self._files.create_result(request_id, run.layout)
        command = Command(op="export", run_id=run.run_id, from_step=export.step, result=str(path))
        await self._group.execute(command)
        blob, payload = await self._files.describe_result(request_id, run.layout)
        return link_pb2.Reply(exported=link_pb2.Exported(model=blob)), payload

    async def _close(self, close: link_pb2.CloseRun) -> link_pb2.Reply:
        if self._run is not None and self._run.run_id == close.run_id:
            self._run = None
            self._files.forget_model()
            await self._group.execute(Command(op="close", run_id=close.run_id))
        if close.finished and _names_a_run(close.run_id):
            # Its checkpoints take most of the state directory; another run may be open by now.
            await asyncio.to_thread(shutil.rmtree, self._state / close.run_id, True)
        return link_pb2.Reply(closed=link_pb2.Closed())

    def _open_run(self, run_id: str) -> DatacenterRun:
        if self._run is None or self._run.run_id != run_id:
            raise UserError(f"run {run_id!r} is not open in this datacenter")
        return self._run


def _names_a_run(run_id: str) -> bool:
    return bool(_RUN_ID.fullmatch(run_id)) and run_id not in _RESERVED_NAMES


def training_events(
    first: int, until: int, values: Mapping[str, Any], losses: Sequence[str]
) -> list[str]:
    """Describe the interruptions of a training command in sentences for a person.

    Args:
        first: absolute step that training started from.
        until: absolute step that training stopped at.
        values: of the command's outcome.
        losses: descriptions of the ranks that were lost.
    """
    steps = f"steps {first} to {until}"
    resumed = values["resumed"]
    if resumed is None:
        recovery = f"the group restarted and repeated {steps}"
    else:
        recovery = f"the group restarted and resumed {steps} after step {resumed}"
    events = [f"{loss}; {recovery}" for loss in losses]
    if resumed is not None and not losses:
        events.append(f"resumed {steps} after step {resumed}, saved by an earlier attempt")
    return [*events, *values["notes"]]
