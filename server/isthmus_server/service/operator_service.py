"""The operators' gRPC service on the port of the link: jobs, their logs and their results."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sqlite3
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

import grpc
import grpc.aio
from cryptography import x509
from google.protobuf.message import DecodeError, Message

from isthmus.errors import AdmissionRefused, IsthmusError, TakenOver
from isthmus.identity import tls
from isthmus.job import read_job
from isthmus.transport.stream import to_the_end
from isthmus.wire import operator_pb2
from isthmus_server.fleet.callers import OperatorsOnly
from isthmus_server.fleet.members import Members
from isthmus_server.fleet.presence import FleetPresence
from isthmus_server.fleet.snapshot import FleetFigures
from isthmus_server.read.export.results import PART_BYTES, open_result
from isthmus_server.runs.jobs.queue import QueuedJob, no_such_job
from isthmus_server.runs.jobs.runner import JobRunner
from isthmus_server.service.server import BalancerListener, ControlPlaneServer
from isthmus_server.storage import audit
from isthmus_server.storage.sealed_database import is_fenced
from isthmus_server.transport.event_loop import LoopObserver
from isthmus_server.transport.limits import HELLO_SECONDS, certificate_of

SERVICE = "isthmus.operator.v1.Operator"

_MAX_CALLS = 8

LEAST_SHARE = 0.01
LARGEST_SHARE = 1000.0
"""Maximum number of concurrent calls of one operator."""

MAX_JOB = 64 << 10
"""Maximum number of characters of one job, because all jobs are stored and listed."""

MAX_ENDED = 1000
"""Maximum number of ended jobs in one list."""

_Request = TypeVar("_Request", bound=Message)

log = logging.getLogger(__name__)


class OperatorService:
    """Serves operators only.

    Guarantees:
      * the certificate is checked in the registry with every call, and while a log is followed:
        only an operator that is not revoked is served;
      * an operator of projects learns nothing of the jobs of others;
      * an operator can queue, follow and cancel jobs and fetch their results, and cannot submit
        code.
    """

    def __init__(self, members: Members, runner: JobRunner) -> None:
        self.members = members
        self.runner = runner
        self._calls: dict[str, int] = {}
        self._checks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Held by an operator's name while a job of theirs is checked."""

    def methods(self) -> dict[str, grpc.RpcMethodHandler]:
        """Return the handlers by method name, as gRPC takes them."""
        pb = operator_pb2
        return {
            "Submit": self._unary(pb.SubmitRequest, self._submit),
            "Jobs": self._unary(pb.JobsRequest, self._jobs),
            "Cancel": self._unary(pb.CancelRequest, self._cancel),
            "Pause": self._unary(pb.PauseRequest, self._pause),
            "Resume": self._unary(pb.ResumeRequest, self._resume),
            "Renew": self._unary(pb.RenewRequest, self._renew),
            "Fetch": grpc.stream_stream_rpc_method_handler(self._fetch),
            "Logs": grpc.stream_stream_rpc_method_handler(self._logs),
        }

    async def _submit(
        self, request: operator_pb2.SubmitRequest, operator: tls.Subject
    ) -> operator_pb2.SubmitReply:
        if not 0 < len(request.key) <= 64:
            raise AdmissionRefused("a submission needs a key of 1 to 64 characters")
        if len(request.job) > MAX_JOB:
            raise AdmissionRefused(
                f"a job of {len(request.job)} characters is larger than {MAX_JOB}; move "
                "large settings to a file that the task reads"
            )
        share = request.share or 1.0
        if not LEAST_SHARE <= share <= LARGEST_SHARE:
            raise AdmissionRefused(
                f"a share of {share:g} is not possible; use {LEAST_SHARE:g} to {LARGEST_SHARE:g}"
            )
        job = read_job(request.job)
        # One at a time, to its end: a privacy budget takes seconds, and all share few threads.
        async with self._checks[operator.name]:
            await to_the_end(self.runner.check(job))
        entry = self.runner.submit(job, operator.name, request.key, share, request.project)
        details = {"project": entry.project} if entry.project else {}
        await self._record(
            "submit", operator, job=entry.id, run=entry.run_id, share=f"{share:g}", **details
        )
        return operator_pb2.SubmitReply(id=entry.id)

    async def _jobs(
        self, request: operator_pb2.JobsRequest, operator: tls.Subject
    ) -> operator_pb2.JobsReply:
        reply = operator_pb2.JobsReply()
        ended = min(request.ended, MAX_ENDED) if request.HasField("ended") else MAX_ENDED
        for entry in self.runner.queue.entries(ended):
            if not self.runner.projects.may_see(operator.name, entry.project):
                continue
            usage = self.runner.usage(entry)
            reply.jobs.add(
                share=entry.share,
                project=entry.project,
                participations=0 if usage is None else usage.participations,
                participant_seconds=0.0 if usage is None else usage.used,
                id=entry.id,
                run_id=entry.run_id,
                state=entry.state,
                reason=(
                    self.runner.waiting_for(entry, operator.name)
                    if entry.state == "running"
                    else entry.reason
                ),
                submitted_by=entry.submitted_by,
                submitted_at=entry.submitted_at,
                round=await self.runner.progress(entry),
                rounds=json.loads(entry.text)["rounds"],
                next_try=entry.next_try,
            )
        return reply

    async def _cancel(
        self, request: operator_pb2.CancelRequest, operator: tls.Subject
    ) -> operator_pb2.CancelReply:
        state = self.runner.cancel(self._seen_by(operator, request.id).id)
        await self._record("cancel", operator, job=request.id)
        return operator_pb2.CancelReply(state=state)

    async def _pause(
        self, request: operator_pb2.PauseRequest, operator: tls.Subject
    ) -> operator_pb2.PauseReply:
        state = self.runner.pause(self._seen_by(operator, request.id).id, operator.name)
        await self._record("pause", operator, job=request.id)
        return operator_pb2.PauseReply(state=state)

    async def _resume(
        self, request: operator_pb2.ResumeRequest, operator: tls.Subject
    ) -> operator_pb2.ResumeReply:
        state = self.runner.resume(self._seen_by(operator, request.id).id)
        await self._record("resume", operator, job=request.id)
        return operator_pb2.ResumeReply(state=state)

    async def _renew(
        self, request: operator_pb2.RenewRequest, operator: tls.Subject
    ) -> operator_pb2.RenewReply:
        certificate, _ = await self.members.renew(operator, request.signing_request)
        return operator_pb2.RenewReply(certificate=certificate)

    async def _logs(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        operator = await self._authenticate(context)
        try:
            request = operator_pb2.LogsRequest.FromString(await _first(requests))
            entry = self._seen_by(operator, request.id)
            await context.send_initial_metadata(())  # the caller knows that it is followed
            async for event in self.runner.events(entry.id, request.follow):
                self.members.registry.check(operator)
                data = json.dumps(event.to_json())
                yield operator_pb2.Event(kind=event.kind, data=data).SerializeToString()
        except (IsthmusError, DecodeError, sqlite3.Error, OSError) as error:
            await _refuse(context, error)
        finally:
            self._end_call(operator)

    async def _fetch(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        operator = await self._authenticate(context)
        try:
            request = operator_pb2.FetchRequest.FromString(await _first(requests))
            entry = self._seen_by(operator, request.id)
            directory = self.runner.runs / entry.id
            result = await asyncio.to_thread(open_result, directory, request.what)
            with contextlib.closing(result):
                await self._record("fetch", operator, job=entry.id, what=request.what)
                head = operator_pb2.FetchReply(size=result.size, sha256=result.sha256)
                yield head.SerializeToString()
                while part := await asyncio.to_thread(result.file.read, PART_BYTES):
                    self.members.registry.check(operator)
                    yield operator_pb2.FetchReply(data=part).SerializeToString()
        except (IsthmusError, DecodeError, sqlite3.Error, OSError) as error:
            await _refuse(context, error)
        finally:
            self._end_call(operator)

    def _seen_by(self, operator: tls.Subject, id_: str) -> QueuedJob:
        """A job, if it is in one of the operator's projects.

        Raises:
            AdmissionRefused: there is none with that id for this operator.
        """
        entry = self.runner.queue.get(id_)
        if not self.runner.projects.may_see(operator.name, entry.project):
            raise no_such_job(id_)
        return entry

    async def _record(self, action: str, operator: tls.Subject, **details: str) -> None:
        """Write an operator's action to the audit log.

        Raises:
            UserError: it cannot be written; the action itself was carried out.
        """
        # To its end also if the caller is gone meanwhile: the action was carried out.
        await to_the_end(
            asyncio.to_thread(
                audit.record,
                self.members.directory,
                action,
                by=f"operator {operator.name}",
                **details,
            )
        )

    # -- authentication ----------------------------------------------------------------------------

    def _unary(
        self, kind: type[_Request], answer: Callable[[_Request, tls.Subject], Awaitable[Message]]
    ) -> grpc.RpcMethodHandler:
        async def call(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> bytes:
            operator = await self._authenticate(context)
            try:
                reply = await answer(kind.FromString(await _first(requests)), operator)
            except (IsthmusError, DecodeError, sqlite3.Error, OSError) as error:
                await _refuse(context, error)
                raise AssertionError("abort raises") from error
            finally:
                self._end_call(operator)
            return reply.SerializeToString()

        # Unary for the caller. As a unary handler, gRPC would wait for the request without a limit
        # before the certificate is checked.
        return grpc.stream_unary_rpc_method_handler(call)

    async def _authenticate(self, context: grpc.aio.ServicerContext) -> tls.Subject:
        certificate = certificate_of(context)
        try:
            if certificate is None:
                raise AdmissionRefused("this server requires a certificate")
            subject = tls.subject_of(tls.read_certificate(certificate))
            if subject.kind != "operator":
                raise AdmissionRefused(f"{subject.name!r} is a {subject.kind}, not an operator")
            await self.members.check(subject)
        except AdmissionRefused as error:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
            raise AssertionError("abort raises") from error
        calls = self._calls.get(subject.name, 0)
        if calls >= _MAX_CALLS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls at a time")
        self._calls[subject.name] = calls + 1
        return subject

    def _end_call(self, operator: tls.Subject) -> None:
        self._calls[operator.name] -= 1
        if not self._calls[operator.name]:
            del self._calls[operator.name]


class ObservedServer:
    """What a server tells `/readyz` and Prometheus."""

    def __init__(
        self,
        server: ControlPlaneServer,
        runner: JobRunner,
        presence: FleetPresence | None = None,
    ) -> None:
        self._server = server
        self._runner = runner
        self._presence = presence

    def pair(self) -> tuple[bytes, bytes]:
        """The server's current key and certificate (PEM)."""
        return self._server.pair

    def authority(self) -> x509.Certificate:
        """The certificate that signed those of all participants."""
        return self._server.members.authority_certificate

    async def registered(self, subject: tls.Subject) -> None:
        """Check that the holder of a certificate is a participant now, and may see all jobs.

        Raises:
            AdmissionRefused: it is not, or is an operator of projects.
        """
        await self._server.members.check(subject)
        if not self._runner.projects.may_see(subject.name, ""):
            raise AdmissionRefused(
                f"{subject.name!r} is an operator of projects, and this shows all jobs"
            )

    async def problems(self) -> list[str]:
        """Whether the registry or the queue cannot be read; the link listens meanwhile."""
        found = []
        for what, read in (
            ("registry", self._server.members.clients),
            ("queue of jobs", self._runner.queue.seconds_until_due),
        ):
            try:
                read()
            except (IsthmusError, sqlite3.Error, OSError) as error:
                found.append(f"the {what} cannot be read: {error}")
        return found

    def mirrored(self) -> Mapping[str, int]:
        """The blobs of the mirror that devices got, by where; none without a mirror."""
        mirror = self._server.link.mirror
        return {} if mirror is None else dict(mirror.use.taken)

    async def jobs(self) -> Counter[str]:
        """The jobs that have not ended, by state."""
        return Counter(entry.state for entry in self._runner.queue.entries(0))

    async def fleet(self) -> FleetFigures | None:
        """Where its devices are; None if nobody follows them."""
        return None if self._presence is None else self._presence.figures()


async def serve_queue(
    server: ControlPlaneServer,
    runner: JobRunner,
    host: str,
    port: int,
    console: tuple[str, int] | None = None,
    *,
    one_port: bool = False,
    fair_link: bool = False,
    balancer: BalancerListener | None = None,
) -> None:
    """Listen, and run the jobs that operators submit, until cancelled or until `runner.leave`.

    `console` is where the web console listens; None for nowhere. With `one_port` joining is at the
    port of the link, and so are the metrics of a listener that is for it; `fair_link` and
    `balancer` as in `ControlPlaneServer.listening`.

    Raises:
        UserError: it cannot listen at the address.
    """
    services = {SERVICE: OperatorService(server.members, runner).methods()}
    # Closed after the server, because operators may follow a log until it stops.
    with contextlib.closing(runner.queue):
        async with server.listening(
            host, port, services, one_port=one_port, fair_link=fair_link, balancer=balancer
        ):
            if server.one_port is not None and (metrics := runner.observers.metrics) is not None:
                server.one_port.metrics = metrics.taking(server.link_port)
            where = f"link at {host}:{server.link_port}, joining at "
            if server.one_port is not None and server.join_port:
                where = f"link and joining at {host}:{server.link_port}"
            else:
                where += f"{host}:{server.join_port}" if server.join_port else "its authority"
            if balancer is not None:
                where += f", for balancers at {balancer.host}:{server.balancer_port}"
            runner.console.print(where, soft_wrap=True)
            presence = FleetPresence(server.members.directory, server.link, runner.waiting)
            runner.observers.followers.append(presence.following)
            async with (
                presence.kept(),
                runner.observers.serving(ObservedServer(server, runner, presence)),
                _console_of(server, runner, console),
            ):
                await runner.run()


@asynccontextmanager
async def _console_of(
    server: ControlPlaneServer, runner: JobRunner, address: tuple[str, int] | None
) -> AsyncIterator[None]:
    """Show the server's jobs in browsers during the block, in a thread of its own."""
    if address is None:
        yield
        return
    from isthmus_server.read.console.access import TOKEN_FILE, kept_token
    from isthmus_server.read.console.serving import ConsoleListener

    state = server.members.directory
    served = ObservedServer(server, runner)
    check = OperatorsOnly(served.pair, served.authority, LoopObserver(), served.registered)
    host, port = address
    local = tls.is_loopback(host)
    token = kept_token(state) if local else ""
    listener = ConsoleListener(state, host, port, token=token, check=check)
    async with listener.serving():
        where = f"console at {listener.address}"
        if local and runner.console.is_terminal:
            where += f"?token={token}"
        elif local:  # a journal is no place for it
            where += f"?token=..., with the token in {state / TOKEN_FILE}"
        runner.console.print(where, soft_wrap=True, highlight=False, markup=False)
        yield


async def _first(requests: AsyncIterator[bytes]) -> bytes:
    """Receive the single message of a call.

    Raises:
        AdmissionRefused: it does not arrive in time.
    """
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            return await anext(requests)
    except (TimeoutError, StopAsyncIteration):
        raise AdmissionRefused("a call without a request") from None


async def _refuse(context: grpc.aio.ServicerContext, error: Exception) -> None:
    code = grpc.StatusCode.FAILED_PRECONDITION
    sentence = str(error)
    if isinstance(error, TakenOver) or is_fenced(error):
        code = grpc.StatusCode.UNAVAILABLE  # the next call finds the server that serves now
        sentence = "another server has taken over from this one"
    elif isinstance(error, DecodeError):
        sentence = "the request is not a valid message"
    elif isinstance(error, sqlite3.Error | OSError):
        log.error("a file of this server cannot be used: %s", error)
        sentence = (
            f"a file of the server cannot be used: {error}; check it on the server's machine with "
            "`isthmus server verify`"
        )
    await context.abort(code, sentence)
