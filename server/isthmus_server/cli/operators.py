"""``isthmus operator`` and the commands for jobs, ``submit`` to ``cancel``: use a remote server."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import queue
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import grpc
from google.protobuf.message import Message
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from isthmus.errors import AdmissionRefused, UserError
from isthmus.grpc_errors import details_of, short_message
from isthmus.identity.approach import approach_to
from isthmus.identity.membership import Membership, default_state
from isthmus.identity.obstacles import is_clear, obstacle, with_remedy
from isthmus.identity.proxies import ProxyChoice
from isthmus.identity.proxy_options import proxy_options
from isthmus.identity.token_options import token_options
from isthmus.job import Job, load_job, write_job
from isthmus.printable import in_a_line
from isthmus.transport.uplink import CHANNEL_OPTIONS
from isthmus.wire import operator_pb2 as pb

if TYPE_CHECKING:
    from isthmus.identity.joining import Token
    from isthmus_server.storage.events import Event

_SERVICE = "/isthmus.operator.v1.Operator/"
_TIMEOUT = 30.0
_MB = 1_000_000
_RETRY_SECONDS = 10.0
"""Seconds that a repeated submission waits for a server that did not answer."""
_SILENT_SECONDS = 30.0
"""Seconds without an event after which a log that is followed asks whether the server answers."""
_REDIAL_SECONDS = 2.0
"""Seconds between two tries to go on with a log that is followed."""
_GONE_SECONDS = 600.0
"""Seconds without any server after which such a log ends."""
_NO_ANSWER = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
"""Status codes after which it is unknown whether the server has executed the call."""
_Reply = TypeVar("_Reply", bound=Message)


_STATE = click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    default=lambda: default_state("operator"),
    show_default="~/.local/state/isthmus/operator",
    help="Directory with this operator's keys.",
)


class ServerUnreachable(AdmissionRefused):
    """No server answers, or it answers no more: another one may have to take over first."""


class OperatorClient:
    """One operator's connection to the server that was joined."""

    def __init__(self, state: Path, proxy: ProxyChoice | None = None, server: str = "") -> None:
        """Connect; a certificate that expires soon is renewed first.

        Args:
            state: directory with the operator's keys.
            proxy: what the operator says about proxies; by default what was said with the join, and
                else the variables decide.
            server: the server's address; by default the one that was joined.

        Raises:
            UserError: this machine has not joined as an operator, or a proxy cannot be used.
            AdmissionRefused: the server refuses, or cannot be reached.
        """
        self.member = Membership(state)
        if self.member.kind != "operator":
            raise UserError(f"{state} is the membership of a {self.member.kind}, not an operator's")
        self.member.check_valid()
        self._road = self.member.road(proxy, server)
        opened = contextlib.ExitStack()
        weakref.finalize(self, opened.close)
        self._approach = opened.enter_context(approach_to(self._road))
        self._channel = self._dial()
        if time.time() > self.member.renew_at:
            request = pb.RenewRequest(signing_request=self.member.next_request())
            self.member.renewed(self.call("Renew", request, pb.RenewReply).certificate)
            self._channel.close()
            self._channel = self._dial()

    def _dial(self) -> grpc.Channel:
        credentials = self.member.channel_credentials()
        options = (*CHANNEL_OPTIONS, *self._approach.options())
        return grpc.secure_channel(self._approach.target, credentials, options)

    def call(self, method: str, request: Message, reply: type[_Reply]) -> _Reply:
        """Call a method and return its reply."""
        call = self._channel.unary_unary(_SERVICE + method)
        try:
            return reply.FromString(call(request.SerializeToString(), timeout=_TIMEOUT))
        except grpc.RpcError as error:
            raise self._refusal(error) from None

    def submit(self, job: Job, share: float = 1.0, project: str = "") -> str:
        """Queue a job exactly once, even if the server's first reply is lost; returns its id.

        `share` is that of the participants, while other jobs run too.

        Raises:
            AdmissionRefused: the server refuses, or did not answer twice.
        """
        key = uuid.uuid4().hex
        request = pb.SubmitRequest(job=write_job(job), key=key, share=share, project=project)
        data = request.SerializeToString()
        call = self._channel.unary_unary(_SERVICE + "Submit")
        try:
            try:
                return pb.SubmitReply.FromString(call(data, timeout=_TIMEOUT)).id
            except grpc.RpcError as error:
                if error.code() not in _NO_ANSWER:
                    raise
                again = call(data, timeout=_RETRY_SECONDS, wait_for_ready=True)
                return pb.SubmitReply.FromString(again).id
        except grpc.RpcError as error:
            raise self._refusal(
                error, "; it may have the job: see `isthmus jobs` before you submit it again"
            ) from None

    def events(self, request: pb.LogsRequest) -> Iterator[pb.Event]:
        """Yield the events of a log as they arrive."""
        try:
            for data in self._channel.unary_stream(_SERVICE + "Logs")(request.SerializeToString()):
                yield pb.Event.FromString(data)
        except grpc.RpcError as error:
            raise self._refusal(error) from None

    def follow(self, request: pb.LogsRequest) -> Iterator[pb.Event | None]:
        """Yield the events of a log as they arrive, and None as soon as the server sends them.

        Raises:
            ServerUnreachable: it does not answer any more, also while its connection is open.
            AdmissionRefused: the server refuses.
        """
        call = self._channel.unary_stream(_SERVICE + "Logs")(request.SerializeToString())
        arrived: queue.SimpleQueue[pb.Event | Exception | None] = queue.SimpleQueue()

        def read() -> None:
            try:
                call.initial_metadata()
                if call.is_active():
                    arrived.put(None)
                for data in call:
                    arrived.put(pb.Event.FromString(data))
            except Exception as error:  # noqa: BLE001 - it is raised where events are read
                arrived.put(error)
            else:
                arrived.put(StopIteration())

        threading.Thread(target=read, name="logs", daemon=True).start()
        try:
            while True:
                try:
                    found = arrived.get(timeout=_SILENT_SECONDS)
                except queue.Empty:  # nothing happens, or the server hangs
                    self._check_answers()
                    continue
                if isinstance(found, StopIteration):
                    return
                if isinstance(found, grpc.RpcError):
                    raise self._refusal(found) from None
                if isinstance(found, Exception):
                    raise found
                yield found
        finally:
            call.cancel()

    def _check_answers(self) -> None:
        """Check that the server answers, whatever that is.

        Raises:
            ServerUnreachable: it does not.
        """
        try:
            self.call("Jobs", pb.JobsRequest(ended=0), pb.JobsReply)
        except ServerUnreachable:
            raise
        except AdmissionRefused:  # such as too many calls at a time
            pass

    def close(self) -> None:
        """End the connection."""
        self._channel.close()

    def fetch(self, job: str, what: str, path: Path, limit: int) -> None:
        """Write a job's result into a file, which appears when it is complete.

        Args:
            job: its id.
            what: `model` or `report`.
            path: of the file; one that exists is replaced.
            limit: largest size in bytes.

        Raises:
            UserError: it is larger, or not what the server announced.
            AdmissionRefused: the server refuses, or cannot be reached.
        """
        request = pb.FetchRequest(id=job, what=what)
        call = self._channel.unary_stream(_SERVICE + "Fetch")(request.SerializeToString())
        part = path.with_name(path.name + ".part")
        try:
            head = pb.FetchReply.FromString(next(call))
            if head.size > limit:
                raise UserError(
                    f"the {what} of {job} has {head.size / 1e6:.1f} MB; allow them with --max-mb"
                )
            digest = hashlib.sha256()
            left = head.size
            # Made anew: in a folder that others can write, it could be a link to another file.
            part.unlink(missing_ok=True)
            with part.open("xb") as file:
                for data in call:
                    received = pb.FetchReply.FromString(data).data
                    left -= len(received)
                    if left < 0:
                        break
                    digest.update(received)
                    file.write(received)
            if left or digest.digest() != head.sha256:
                raise UserError(f"the {what} of {job} did not arrive as the server announced it")
            part.replace(path)
        except grpc.RpcError as error:
            raise self._refusal(error) from None
        finally:
            call.cancel()
            part.unlink(missing_ok=True)

    def _refusal(self, error: grpc.RpcError, unsure: str = "") -> AdmissionRefused:
        assert isinstance(error, grpc.Call)
        doubt = unsure if error.code() in _NO_ANSWER else ""
        details = details_of(error)
        kind = AdmissionRefused
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            problem = f" cannot be reached{self._road.detour}: {self._reason(details)}"
            kind = ServerUnreachable
        elif error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            problem = " did not answer in time"
            kind = ServerUnreachable
        else:
            problem = f": {details}"
        return kind(f"the server at {self._road.address}{problem}{doubt}")

    def _reason(self, details: str) -> str:
        """Why the server cannot be reached, by what is in the way if that is found."""
        reason = short_message(details)
        if self._approach.blocked is not None:
            return str(self._approach.blocked)
        if is_clear(self._road, reason):
            return with_remedy(self._road, reason)
        blocked = asyncio.run(obstacle(self._road, self.member.authority))
        return reason if blocked is None else str(blocked)


Dial = Callable[[], OperatorClient]


@click.group()
def operator() -> None:
    """Operate a remote server."""


@operator.command()
@token_options
@_STATE
@proxy_options
def join(url: str, token: Token, state: Path, proxy: ProxyChoice) -> None:
    """Join the server with an operator's TOKEN.

    It is at HOST:PORT, or behind a balancer that ends TLS at wss://HOST/PATH.
    """
    from isthmus.identity import joining

    member = asyncio.run(joining.join(url, token, state, "operator", proxy))
    click.echo(f"joined {member.server} as {member.name!r}")


def _dialling(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of a connection, and `dial`, which opens it."""

    @_STATE
    @click.option(
        "--server",
        default="",
        metavar="ADDRESS",
        help="Address of the server, if it differs from the one that was joined: HOST:PORT, or "
        "wss://HOST/PATH behind a balancer that ends TLS.",
    )
    @proxy_options
    @functools.wraps(command)
    def with_options(state: Path, server: str, proxy: ProxyChoice, **others: Any) -> None:
        command(dial=lambda: OperatorClient(state, proxy, server), **others)

    return with_options


@click.command()
@click.argument("job", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one key.")
@click.option(
    "--share",
    type=click.FloatRange(0.01, 1000),
    default=1.0,
    show_default=True,
    help="Of the participants' time, relative to other jobs that run at the same time.",
)
@click.option(
    "--project",
    default="",
    metavar="NAME",
    help="Project of the server whose participants train it. Default: the operator's own, if any.",
)
@_dialling
def submit(job: Path, overrides: tuple[str, ...], share: float, project: str, dial: Dial) -> None:
    """Append JOB to the server's queue and print the job's id.

    The server uses its own copy of the task: a file in `tasks/` of the server's state directory.
    """
    loaded = load_job(job, overrides)
    click.echo(in_a_line(dial().submit(loaded, share, project)))


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option(
    "--ended",
    type=click.IntRange(0, 1000),
    default=20,
    show_default=True,
    metavar="N",
    help="List the latest N ended jobs.",
)
@_dialling
def jobs(as_json: bool, ended: int, dial: Dial) -> None:
    """List the server's running, paused and queued jobs, and the latest ended ones.

    Below the id of a job is that of its run, by which logs of devices and reports name it.
    """
    reply = dial().call("Jobs", pb.JobsRequest(ended=ended), pb.JobsReply)
    keys = (
        "id",
        "state",
        "reason",
        "submitted_by",
        "submitted_at",
        "round",
        "rounds",
        "next_try",
        "share",
        "participations",
        "participant_seconds",
        "project",
        "run_id",
    )
    if as_json:
        click.echo(
            json.dumps([{key: getattr(job, key) for key in keys} for job in reply.jobs], indent=1)
        )
        return
    table = Table("job, run", "state", "round", "by", "since (UTC)", "share", box=None)
    grouped = any(job.project for job in reply.jobs)
    if grouped:
        table.add_column("project")
    table.add_column("reason", overflow="fold")
    for job in reply.jobs:
        since = time.strftime("%Y-%m-%d %H:%M", time.gmtime(job.submitted_at))
        rounds = f"{job.round} of {job.rounds}"
        reason = job.reason
        if job.next_try:
            reason = f"next try {_time_of_day(job.next_try)}: {reason}"
        share = f"{job.share:g}"
        if job.participations:
            share += f" ({job.participations} participations)"
        projects = [job.project] if grouped else []
        texts = (job.state, rounds, job.submitted_by, since, share, *projects, reason)
        names = "\n".join(escape(in_a_line(name)) for name in (job.id, job.run_id) if name)
        table.add_row(names, *(escape(in_a_line(text)) for text in texts))
    none = "nothing has been submitted yet" if ended else "no job is running or queued"
    Console().print(table if reply.jobs else none)


@click.command()
@click.argument("job")
@click.option("-f", "--follow", is_flag=True, help="Continue until the job has ended.")
@_dialling
def logs(job: str, follow: bool, dial: Dial) -> None:
    """Print the result of each round of JOB.

    Followed, it goes on where it was after a server has taken over, or has been started again.
    """
    from isthmus_server.read.report.progress import ProgressView, waiting_for
    from isthmus_server.storage.events import (
        JobEnded,
        JobPaused,
        Paused,
        WaitingForParticipants,
        event_from_json,
    )

    view = ProgressView(Console())
    request = pb.LogsRequest(id=job, follow=follow)
    shown: set[tuple[object, ...]] = set()
    for message in _followed(dial, request) if follow else dial().events(request):
        event = event_from_json(json.loads(message.data))
        if (key := _once(event)) is not None:
            if key in shown:  # another server tells all of them again
                continue
            shown.add(key)
        if isinstance(event, JobEnded):
            reason = in_a_line(event.reason)
            click.echo(f"{job} {event.state}" + (f": {reason}" if reason else ""))
        elif isinstance(event, JobPaused):
            until = _time_of_day(event.next_try)
            click.echo(f"{job} is paused, next try {until}: {in_a_line(event.reason)}")
        elif isinstance(event, Paused) and not event.round:  # by an operator, and in no round
            click.echo(f"{job} is {in_a_line(event.reason)}")
        elif isinstance(event, WaitingForParticipants):
            click.echo(f"{job} is {waiting_for(event)}")
        else:
            view(event)


def _followed(dial: Dial, request: pb.LogsRequest) -> Iterator[pb.Event]:
    """The events of a log until its job has ended, whichever server has the job.

    Raises:
        AdmissionRefused: the server refuses, or cannot be reached at first, or no server answers
            for long.
    """
    client: OperatorClient | None = dial()
    was_linked = False
    gone_at: float | None = None
    while True:
        try:
            client = client or dial()
            for event in client.follow(request):
                was_linked = True
                if gone_at is not None:
                    gone_at = None
                    click.echo("a server answers: the log goes on", err=True)
                if event is not None:
                    yield event
            return
        except ServerUnreachable as error:
            if not was_linked:
                raise
            if gone_at is None:
                gone_at = time.monotonic()
                click.echo(
                    f"{in_a_line(str(error))}; the log goes on as soon as it, or the server that "
                    "takes over from it, answers",
                    err=True,
                )
            if time.monotonic() - gone_at > _GONE_SECONDS:
                raise ServerUnreachable(
                    f"{error}; no server has answered for {_GONE_SECONDS / 60:.0f} minutes: follow "
                    f"the log again with  isthmus logs -f {request.id}"
                ) from None
        if client is not None:
            client.close()
            client = None
        time.sleep(_REDIAL_SECONDS)  # nothing says when a server answers again


def _once(event: Event) -> tuple[object, ...] | None:
    """What an event is recognised by if it is shown once; None for one of the present state."""
    from isthmus_server.storage.events import RoundAttemptFailed, RoundCommitted, ServerTakenOver

    if isinstance(event, RoundCommitted | RoundAttemptFailed):
        record = event.record
        return event.kind, record.round, record.attempt, record.started_at
    return (event.kind, event.at) if isinstance(event, ServerTakenOver) else None


@click.command()
@click.argument("job")
@_dialling
def cancel(job: str, dial: Dial) -> None:
    """Remove JOB from the queue, or stop it; committed rounds are kept."""
    reply = dial().call("Cancel", pb.CancelRequest(id=job), pb.CancelReply)
    click.echo(f"{job} is {in_a_line(reply.state)}")


@click.command()
@click.argument("job")
@_dialling
def pause(job: str, dial: Dial) -> None:
    """Let JOB rest after its running round, until `isthmus resume`."""
    reply = dial().call("Pause", pb.PauseRequest(id=job), pb.PauseReply)
    click.echo(f"{job} is {in_a_line(reply.state)}; continue it with  isthmus resume {job}")


@click.command()
@click.argument("job")
@_dialling
def resume(job: str, dial: Dial) -> None:
    """Try the paused or failed JOB again at once, or as soon as the running one ends or is paused.

    A failed one goes on from its last committed round, once what made it fail is repaired.
    """
    dial().call("Resume", pb.ResumeRequest(id=job), pb.ResumeReply)
    click.echo(f"{job} is tried again as soon as it is its turn")


@click.command()
@click.argument("job")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the files. Default: JOB.",
)
@click.option(
    "--max-mb",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="Refuse larger files, in MB.",
)
@_dialling
def fetch(job: str, output: Path | None, max_mb: int, dial: Dial) -> None:
    """Fetch the report of JOB, and its final model, model.safetensors, when it has finished."""
    client = dial()
    folder = output or Path(job)
    if Path(job).name != job:
        raise UserError(f"{job!r} is not the id of a job; see `isthmus jobs`")
    folder.mkdir(parents=True, exist_ok=True)
    for what, name in (("report", "report.json"), ("model", "model.safetensors")):
        client.fetch(job, what, folder / name, max_mb * _MB)
        click.echo(f"{what:<7} {folder / name}")


def _time_of_day(timestamp: float) -> str:
    """When a next try is, which is at most minutes away."""
    return time.strftime("%H:%M:%S UTC", time.gmtime(timestamp))
