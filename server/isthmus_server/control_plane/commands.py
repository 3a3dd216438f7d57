"""``isthmus server``: the command line of the server's operator."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from isthmus.errors import IsthmusError, UserError
from isthmus.identity import tls
from isthmus.system.clocks import utc
from isthmus_server.storage import audit
from isthmus_server.storage.sealed_database import database_error

if TYPE_CHECKING:
    from isthmus_server.control_plane.registry import Registry

_STATE = click.argument("state", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
LAST_PORT = 65535
_UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0}


@click.group()
def server() -> None:
    """Run a server that participants on other machines join."""


@server.command()
@_STATE
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Name or address that participants connect to; may be repeated. "
    "Default: this machine's own.",
)
@click.option(
    "--authority",
    metavar="HOST:PORT",
    help="Where to join an authority that is another process (isthmus authority).",
)
@click.option(
    "--token-file", metavar="PATH", help="File with the authority's token; - for standard input."
)
def init(
    state: Path, hosts: tuple[str, ...], authority: str | None, token_file: str | None
) -> None:
    """Create a new server in DIR: its authority, certificate and registry of participants.

    With --authority, only its own certificate: who may join is decided at the authority.
    """
    from isthmus_server.control_plane.authority import default_hosts, initialise
    from isthmus_server.control_plane.registry import Registry

    if authority is not None:
        from isthmus.identity import joining

        if hosts:
            raise UserError("--host is decided at the authority; remove it, or --authority")
        given = joining.Token.given(None, token_file)
        member = asyncio.run(joining.join(authority, given, state, tls.SERVER))
        click.echo(f"the server {member.name!r} is ready in {state}; keep that directory private")
        return
    if token_file is not None:
        raise UserError("--token-file is the token of an authority; also give --authority")
    names = list(hosts) or default_hosts()
    initialise(state, names)
    Registry(state).close()
    click.echo(f"a server for {', '.join(names)} is ready in {state}; keep that directory private")


@server.group()
def token() -> None:
    """Manage the tokens with which participants join."""


@token.command()
@_STATE
@click.option("--name", required=True, help="Name of the participant.")
@click.option(
    "--kind",
    type=click.Choice((*tls.KINDS, tls.SERVER)),
    default="client",
    show_default=True,
    help="Kind of the participant.",
)
@click.option(
    "--expires",
    default="24h",
    show_default=True,
    metavar="TIME",
    help="Validity of the token in minutes, hours or days, as in 30m, 24h, 7d.",
)
def create(state: Path, name: str, kind: str, expires: str) -> None:
    """Print a token that lets one participant join, once."""
    from isthmus.identity.joining import SECRET_BYTES, Token
    from isthmus_server.control_plane.authority import CertificateAuthority

    seconds = _seconds(expires)
    with _registry(state):
        certificates = CertificateAuthority(state)
    if kind == tls.SERVER and certificates.serves is None:
        raise UserError(
            "a token of kind 'server' is made by an authority that is another process "
            f"(isthmus authority init), and {state} is a server's own"
        )
    fingerprint = tls.fingerprint(certificates.certificate)
    new_token = Token(os.urandom(SECRET_BYTES), fingerprint)
    with _registry(state) as registry:
        registry.add_token(new_token.digest, name=name, kind=kind, expires=time.time() + seconds)
        audit.record(
            state,
            "token",
            by=audit.local_user(),
            name=name,
            kind=kind,
            expires=expires,
            token=new_token.digest.hex(),
        )
    click.echo(str(new_token))


@server.command()
@_STATE
@click.argument("name")
def revoke(state: Path, name: str) -> None:
    """Exclude participant NAME immediately and permanently; unused tokens for it become invalid."""
    with _registry(state) as registry:
        registry.revoke(name)
        audit.record(state, "revoke", by=audit.local_user(), name=name)
    click.echo(f"{name} is revoked; a running server closes its connection at once")


@server.command()
@_STATE
def participants(state: Path) -> None:
    """List the participants that have joined."""
    with _registry(state) as registry:
        entries = registry.participants()
    table = Table("name", "kind", "joined (UTC)", "certificate until (UTC)", box=None)
    for entry in entries:
        if entry.revoked is not None or entry.not_after is None:
            until = "revoked"
        else:
            until = _date(entry.not_after) if entry.not_after > time.time() else "expired"
        table.add_row(entry.name, entry.kind, _date(entry.joined), until)
    Console().print(table if entries else "no participant has joined yet")


@server.command()
@_STATE
def verify(state: Path) -> None:
    """Check the keys and databases in DIR, and print what is intact and what is damaged.

    Nothing is changed, and no other machine is asked. The exit code is 1 if something is damaged.
    `isthmus runs verify` checks a run.
    """
    from isthmus_server.control_plane import job_queue, registry, remote_authority
    from isthmus_server.control_plane.authority import CertificateAuthority, is_separate

    identity: tuple[tuple[str, Callable[[], object]], ...] = (
        ("keys and certificates", lambda: CertificateAuthority(state).read_server_pair()),
        ("registry of participants", lambda: registry.check(state)),
    )
    if is_separate(state):
        identity = (("membership and copy of the registry", lambda: remote_authority.check(state)),)
    damaged = False
    for what, check in (
        *identity,
        ("queue of jobs", lambda: job_queue.check(state)),
        ("audit log", lambda: audit.read(state)),
    ):
        try:
            check()
            click.echo(f"intact   {what}")
        except (IsthmusError, OSError) as error:
            damaged = True
            click.echo(f"damaged  {error}")
    if damaged:
        raise click.exceptions.Exit(1)


@server.command("audit")
@_STATE
def show_audit(state: Path) -> None:
    """Print who made tokens, joined, revoked, submitted or cancelled, and verify the log.

    Times are in UTC. Keep a copy of the last line elsewhere: it also shows whether lines are
    missing at the end.
    """
    from isthmus_server.control_plane.authority import is_separate

    if not is_separate(state):
        with _registry(state):  # refuses a directory without a server
            pass
    entries = audit.read(state)
    for entry in entries:
        details = " ".join(f"{key}={value}" for key, value in entry.details.items())
        click.echo(f"{utc(entry.time)}  {entry.by}  {entry.action}  {details}")
    last = entries[-1].digest if entries else "empty"
    click.echo(f"{len(entries)} records, unbroken; the last one is {last}")


@server.command()
@_STATE
@click.option(
    "--address",
    default="0.0.0.0:9400",
    show_default=True,
    help="Where participants connect; the next port is for joining.",
)
@click.option(
    "--grace",
    default=30.0,
    show_default=True,
    type=click.FloatRange(0),
    help="Seconds for a running round to end after SIGTERM or Ctrl-C.",
)
def start(state: Path, address: str, grace: float) -> None:
    """Serve the participants that have joined, and run the jobs that operators submit.

    SIGTERM or Ctrl-C ends it after the running round; a second one, or the end of --grace, gives
    that round up. After a restart, queued jobs and an interrupted run continue.
    """
    from isthmus_server.commands import prepare, run_until_stopped
    from isthmus_server.control_plane.job_runner import JobRunner
    from isthmus_server.control_plane.operator_service import serve_queue
    from isthmus_server.control_plane.server import ControlPlaneServer

    host, port = tls.split_address(address, "--address")
    if port == LAST_PORT:
        raise UserError(f"--address {address!r} has no next port, which is needed for joining")
    prepare()
    logging.getLogger("isthmus_server.control_plane").setLevel(logging.INFO)
    runner = JobRunner(ControlPlaneServer(state), state, Console())
    with contextlib.suppress(click.Abort):  # the queue is kept
        run_until_stopped(serve_queue(runner, host, port), runner.leave, grace)


@contextlib.contextmanager
def _registry(state: Path) -> Iterator[Registry]:
    """Open the registry of the server in a state directory.

    Raises:
        UserError: there is no server, or its registry cannot be used.
    """
    from isthmus_server.control_plane.authority import CertificateAuthority, is_separate
    from isthmus_server.control_plane.registry import Registry

    if is_separate(state):
        raise UserError(
            f"the authority of {state} is another process, which has the registry; use "
            "`isthmus authority` there"
        )
    CertificateAuthority(state)  # raises if there is no server, before a registry is created
    with contextlib.closing(Registry(state)) as registry:
        try:
            yield registry
        except sqlite3.Error as error:
            raise database_error(state / "fleet.sqlite", error) from error


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d{1,4})([mhd])", text)
    if match is None or int(match[1]) == 0:
        raise UserError(f"--expires {text!r} is not a time such as 30m, 24h or 7d")
    return int(match[1]) * _UNITS[match[2]]


def _date(timestamp: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(timestamp))
