"""What operators may ask a running server for, on the port of the link, with their certificates."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from rich.console import Console

from isthmus.errors import AdmissionRefused, IsthmusError
from isthmus.identity import tls
from isthmus.job import read_job
from isthmus.wire import operator_pb2
from isthmus_server.control_plane.members import Members
from isthmus_server.control_plane.runner import Runner
from isthmus_server.control_plane.server import ControlPlaneServer
from isthmus_server.transport.limits import HELLO_SECONDS, certificate_of

SERVICE = "isthmus.operator.v1.Operator"

_CALLS = 8
"""Calls of one operator at a time."""

MAX_JOB = 64 << 10
"""Characters of one job: they are kept, and a list of jobs goes through them."""

MAX_ENDED = 1000
"""Jobs that have ended, in one list."""

_Asked = TypeVar("_Asked", bound=Message)

log = logging.getLogger(__name__)


class Control:
    """Answers operators, and nobody else.

    Guarantees:
      * with every call, and while a log is followed, the certificate is looked up: only an
        operator that is not revoked is heard;
      * an operator can queue, watch and cancel jobs, and bring no code.
    """

    def __init__(self, members: Members, runner: Runner) -> None:
        self.members = members
        self.runner = runner
        self._calls: dict[str, int] = {}

    def methods(self) -> dict[str, grpc.RpcMethodHandler]:
        """By name, as gRPC takes them."""
        pb = operator_pb2
        return {
            "Submit": self._unary(pb.SubmitRequest, self._submit),
            "Jobs": self._unary(pb.JobsRequest, self._jobs),
            "Cancel": self._unary(pb.CancelRequest, self._cancel),
            "Renew": self._unary(pb.RenewRequest, self._renew),
            "Logs": grpc.stream_stream_rpc_method_handler(self._logs),
        }

    async def _submit(
        self, asked: operator_pb2.SubmitRequest, operator: tls.Subject
    ) -> operator_pb2.SubmitReply:
        if not 0 < len(asked.key) <= 64:
            raise AdmissionRefused("a submission needs a key of 1 to 64 characters")
        if len(asked.job) > MAX_JOB:
            raise AdmissionRefused(
                f"a job of {len(asked.job)} characters is larger than {MAX_JOB}; have the task "
                "read from a file of its own what is so large"
            )
        entry = self.runner.submit(read_job(asked.job), operator.name, asked.key)
        return operator_pb2.SubmitReply(id=entry.id)

    async def _jobs(
        self, asked: operator_pb2.JobsRequest, operator: tls.Subject
    ) -> operator_pb2.JobsReply:
        reply = operator_pb2.JobsReply()
        ended = min(asked.ended, MAX_ENDED) if asked.HasField("ended") else MAX_ENDED
        for entry in self.runner.queue.entries(ended):
            reply.jobs.add(
                id=entry.id,
                state=entry.state,
                reason=entry.reason,
                submitted_by=entry.submitted_by,
                submitted_at=entry.submitted_at,
                round=await self.runner.progress(entry),
                rounds=json.loads(entry.text)["rounds"],
            )
        return reply

    async def _cancel(
        self, asked: operator_pb2.CancelRequest, operator: tls.Subject
    ) -> operator_pb2.CancelReply:
        return operator_pb2.CancelReply(state=self.runner.cancel(asked.id))

    async def _renew(
        self, asked: operator_pb2.RenewRequest, operator: tls.Subject
    ) -> operator_pb2.RenewReply:
        certificate, _ = await self.members.renew(operator, asked.signing_request)
        return operator_pb2.RenewReply(certificate=certificate)

    async def _logs(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        operator = await self._enter(context)
        try:
            asked = operator_pb2.LogsRequest.FromString(await _first(requests))
            async for event in self.runner.events(asked.id, asked.follow):
                self.members.registry.check(operator)
                data = json.dumps(event.to_json())
                yield operator_pb2.Event(kind=event.kind, data=data).SerializeToString()
        except (IsthmusError, DecodeError, sqlite3.Error) as error:
            await _refuse(context, error)
        finally:
            self._leave(operator)

    # -- who asks ----------------------------------------------------------------------------------

    def _unary(
        self, kind: type[_Asked], answer: Callable[[_Asked, tls.Subject], Awaitable[Message]]
    ) -> grpc.RpcMethodHandler:
        async def call(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> bytes:
            operator = await self._enter(context)
            try:
                reply = await answer(kind.FromString(await _first(requests)), operator)
            except (IsthmusError, DecodeError, sqlite3.Error) as error:
                await _refuse(context, error)
                raise AssertionError("it was aborted") from error
            finally:
                self._leave(operator)
            return reply.SerializeToString()

        # One message, as the caller sees it; gRPC would wait for it before anybody is asked for a
        # certificate, and for ever.
        return grpc.stream_unary_rpc_method_handler(call)

    async def _enter(self, context: grpc.aio.ServicerContext) -> tls.Subject:
        certificate = certificate_of(context)
        try:
            if certificate is None:
                raise AdmissionRefused("this server wants a certificate")
            subject = tls.subject_of(tls.read_certificate(certificate))
            if subject.kind != "operator":
                raise AdmissionRefused(f"{subject.name!r} is a {subject.kind}, and not an operator")
            self.members.registry.check(subject)
        except AdmissionRefused as error:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
            raise AssertionError("it was aborted") from error
        calls = self._calls.get(subject.name, 0)
        if calls >= _CALLS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls at a time")
        self._calls[subject.name] = calls + 1
        return subject

    def _leave(self, operator: tls.Subject) -> None:
        self._calls[operator.name] -= 1
        if not self._calls[operator.name]:
            del self._calls[operator.name]


async def serve_queue(
    server: ControlPlaneServer, state: Path, host: str, port: int, console: Console
) -> None:
    """Listen, and run what operators submit, until cancelled.

    Raises:
        UserError: it cannot listen there.
    """
    runner = Runner(server, state, console)
    services = {SERVICE: Control(server.members, runner).methods()}
    # It outlives the listening: who follows a log until the server stops still reads it.
    with contextlib.closing(runner.queue):
        async with server.listening(host, port, services):
            where = f"link at {host}:{server.link_port}, joining at {host}:{server.join_port}"
            console.print(where, soft_wrap=True)
            await runner.run()


async def _first(requests: AsyncIterator[bytes]) -> bytes:
    """The one message of a call.

    Raises:
        AdmissionRefused: it does not come.
    """
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            return await anext(requests)
    except (TimeoutError, StopAsyncIteration):
        raise AdmissionRefused("a call without a request") from None


async def _refuse(context: grpc.aio.ServicerContext, error: Exception) -> None:
    sentence = str(error)
    if isinstance(error, DecodeError):
        sentence = "this is no request"
    elif isinstance(error, sqlite3.Error):
        log.error("a file of this server cannot be used: %s", error)
        sentence = f"a file of the server's cannot be used: {error}"
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, sentence)
