"""Run a Flower ClientApp on a device.

The app is loaded once for a run, and its `context.state` lives as long as the run is open.
Only devices that take part in such a job need the extra `flower`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from isthmus.errors import TaskError
from isthmus.job import read_job
from isthmus.job.flower import APP, evaluates
from isthmus.task import Participant, user_code
from isthmus.transport.blobs import Buffer, describe
from isthmus.wire import link_pb2
from isthmus_clients.training.local_data import locate
from isthmus_flower.apps import handles, has_client_fn, load_app, no_function
from isthmus_flower.messages import (
    RUN,
    SERVER_NODE,
    Context,
    ErrorCode,
    Message,
    RecordDict,
    captured_warnings,
    message,
    node_of,
)
from isthmus_flower.records import decode, encode


class FlowerRun:
    """One run of a ClientApp on one device."""

    def __init__(
        self,
        work: link_pb2.OpenRun,
        participant: Participant,
        data: Path | None,
        tasks: Path | None = None,
    ) -> None:
        """Load the app; if a directory `tasks` is given, only from a file in it.

        Raises:
            TaskError: it cannot be loaded, or is not a usable ClientApp.
            JobError: Flower is not installed.
        """
        self.job = read_job(work.job)
        self.participant = participant
        flower = self.job.federated.flower
        assert flower is not None
        assert flower.app is not None
        base, data = locate(flower.app, self.job, Path(work.base), data, tasks, APP)
        self.app = load_app(flower.app, base=base, installed=tasks is not None)
        if evaluates(flower) and not handles(self.app, "evaluate"):
            raise TaskError(
                f"fraction_evaluate asks for evaluation on devices, and {APP}={flower.app!r} has "
                "no function for it; add one under @app.evaluate(), or remove fraction_evaluate"
            )
        node: dict[str, bool | int | float | str] = {"name": participant.name}
        if participant.shard is not None:
            node["partition-id"], node["num-partitions"] = participant.shard
        if data is not None:
            node["data"] = str(data)
        self.context = Context(
            run_id=RUN,
            node_id=node_of(participant.name),
            node_config=node,
            state=RecordDict(),
            run_config=dict(flower.config),
        )

    def _call(self, request: Message) -> Message:
        if not has_client_fn(self.app):
            return self.app(request, self.context)
        from isthmus_flower.device.client_fn import call_client_fn

        return call_client_fn(self.app, request, self.context)

    def answer(
        self, work: link_pb2.AppMessage, payload: Buffer | bytes
    ) -> tuple[link_pb2.AppReply, Buffer | None]:
        """Pass a message to the app; an exception of the app becomes a Flower error."""
        started = time.monotonic()
        request = message(
            decode(payload),
            kind=work.kind,
            source=SERVER_NODE,
            to=work.node,
            id_=work.id,
            group=work.group,
        )
        try:
            if not handles(self.app, work.kind):
                raise TaskError(no_function(self.app, work.kind))
            with captured_warnings(), user_code("the app"):
                reply = self._call(request)
            failure = _failure_of(reply)
        except TaskError as error:
            failure = (ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error))
        seconds = time.monotonic() - started
        if failure is not None:
            code, reason = failure
            return link_pb2.AppReply(error_code=code, error=reason, seconds=seconds), None
        records = memoryview(encode(reply.content))
        return link_pb2.AppReply(records=describe(records), seconds=seconds), records


def _failure_of(reply: Any) -> tuple[int, str] | None:
    """Error code and reason of an app's reply, or None."""
    if not isinstance(reply, Message):
        name = type(reply).__name__
        return ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"the app answered a {name}, not a Message"
    if reply.has_error():
        return reply.error.code, reply.error.reason or "the app answered an error without a reason"
    return None
