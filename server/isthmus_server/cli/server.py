"""``isthmus server``: the command line of the server's operator."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from isthmus.errors import IsthmusError, UserError
from isthmus.identity import tls
from isthmus.identity.balancers import is_behind_balancer
from isthmus.identity.proxies import ProxyChoice
from isthmus.identity.proxy_options import NAMES, proxy_options
from isthmus.system.clocks import utc
from isthmus_server.cli.aggregator import aggregator, check_name
from isthmus_server.fleet.durations import seconds_of
from isthmus_server.fleet.rollouts import MAX_USES
from isthmus_server.observability.options import LogFormat, observed
from isthmus_server.storage import audit
from isthmus_server.storage.sealed_database import database_error

if TYPE_CHECKING:
    from isthmus_server.fleet.registry import Registry
    from isthmus_server.mirror.place import MirrorPlace
    from isthmus_server.service.server import BalancerListener

_DIRECTORY = click.Path(file_okay=False, path_type=Path)
_STATE = click.argument("state", metavar="DIR", type=_DIRECTORY)
LAST_PORT = 65535


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
@proxy_options
def init(
    state: Path,
    hosts: tuple[str, ...],
    authority: str | None,
    token_file: str | None,
    proxy: ProxyChoice,
) -> None:
    """Create a new server in DIR: its authority, certificate and registry of participants.

    With --authority, only its own certificate: who may join is decided at the authority.
    """
    from isthmus_server.fleet.authority import default_hosts, initialise
    from isthmus_server.fleet.registry import Registry

    if authority is not None:
        from isthmus.identity import joining

        if hosts:
            raise UserError("--host is decided at the authority; remove it, or --authority")
        if is_behind_balancer(authority):
            raise UserError(
                f"--authority {authority!r}: a separate authority has ports of its own and is not "
                "behind a balancer; give HOST:PORT of its port for joining"
            )
        given = joining.Token.given(None, token_file)
        member = asyncio.run(joining.join(authority, given, state, tls.SERVER, proxy))
        click.echo(f"the server {member.name!r} is ready in {state}; keep that directory private")
        return
    if token_file is not None:
        raise UserError("--token-file is the token of an authority; also give --authority")
    if proxy:
        raise UserError(f"{NAMES} lead to an authority; also give --authority")
    names = list(hosts) or default_hosts()
    initialise(state, names)
    Registry(state).close()
    click.echo(f"a server for {', '.join(names)} is ready in {state}; keep that directory private")


server.add_command(aggregator)


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
@click.option(
    "--uses",
    type=click.IntRange(2, MAX_USES),
    metavar="N",
    help="Let N participants join with it, as NAME-1 to NAME-N; revoke --rollout ends them all.",
)
def create(state: Path, name: str, kind: str, expires: str, uses: int | None) -> None:
    """Print a token that lets one participant join, once, or with --uses many."""
    from isthmus.identity.joining import SECRET_BYTES, Token
    from isthmus_server.fleet.authority import CertificateAuthority

    seconds = seconds_of(expires, "--expires")
    if kind == tls.AGGREGATOR:
        check_name(name, uses)
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
        ends = time.time() + seconds
        registry.add_token(new_token.digest, name=name, kind=kind, expires=ends, uses=uses)
    click.echo(str(new_token))


@server.command()
@_STATE
@click.argument("name")
@click.option(
    "--rollout",
    is_flag=True,
    help="NAME is of a token with --uses: end all of its participants.",
)
def revoke(state: Path, name: str, rollout: bool) -> None:
    """Exclude participant NAME immediately and permanently; unused tokens for it become invalid."""
    if rollout:
        with _registry(state) as registry:
            members = registry.revoke_rollout(name)
        click.echo(f"the token {name} and its {len(members)} participants are revoked")
        return
    with _registry(state) as registry:
        registry.revoke(name)
    click.echo(f"{name} is revoked; a running server closes its connection at once")


@server.command()
@_STATE
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def participants(state: Path, as_json: bool) -> None:
    """List the participants that have joined, and what each does now.

    It shows who is connected, when each was last seen, which round it works on, its version and the
    last job that it declined; then what jobs wait for.
    """
    from isthmus_server.fleet.authority import is_separate
    from isthmus_server.fleet.presence import read_snapshot
    from isthmus_server.fleet.table import print_fleet

    if is_separate(state):
        from isthmus_server.fleet.remote_authority import RegistryCopy

        entries = RegistryCopy(state).participants()
    else:
        with _registry(state) as registry:
            entries = registry.participants()
    print_fleet(entries, read_snapshot(state), as_json=as_json)


@server.command()
@_STATE
def verify(state: Path) -> None:
    """Check the keys, databases and ledgers in DIR; print what is intact and what is damaged.

    Nothing is changed, and no other machine is asked. The exit code is 1 if something is damaged.
    `isthmus runs verify` checks a run.
    """
    from isthmus_server.budgets.populations import check_populations
    from isthmus_server.fleet import registry_file, remote_authority
    from isthmus_server.fleet.authority import CertificateAuthority, is_separate
    from isthmus_server.runs.jobs import queue

    identity: tuple[tuple[str, Callable[[], object]], ...] = (
        ("keys and certificates", lambda: CertificateAuthority(state).read_server_pair()),
        ("registry of participants", lambda: registry_file.check(state)),
    )
    if is_separate(state):
        identity = (("membership and copy of the registry", lambda: remote_authority.check(state)),)
    damaged = False
    for what, check in (
        *identity,
        ("queue of jobs", lambda: queue.check(state)),
        ("audit log", lambda: audit.read(state)),
        ("privacy ledgers of populations", lambda: check_populations(state)),
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
    from isthmus_server.fleet.authority import is_separate

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
    "--one-port",
    is_flag=True,
    help="Have joining at the port of --address, too, and --metrics if that is the same address.",
)
@click.option(
    "--fair-link",
    is_flag=True,
    help="Share out connections of the link among addresses, so that one address cannot take all; "
    "with --one-port it is so. The server then passes on each byte.",
)
@click.option(
    "--balancer",
    metavar="HOST:PORT",
    help="Where a balancer that ends TLS forwards WebSockets to, without TLS; with --one-port.",
)
@click.option(
    "--balancer-trusts",
    multiple=True,
    metavar="NETWORK",
    help="Address or range of a balancer whose X-Forwarded-For says who calls; may be repeated. "
    "Default: all its callers count as one.",
)
@click.option(
    "--grace",
    default=30.0,
    show_default=True,
    type=click.FloatRange(0),
    help="Seconds for a running round to end after SIGTERM or Ctrl-C.",
)
@click.option(
    "--console",
    metavar="HOST:PORT",
    help="Where to show jobs in browsers; beyond loopback only to operators. Default: nowhere.",
)
@click.option(
    "--jobs",
    default=1,
    show_default=True,
    type=click.IntRange(1, 64),
    help="Most jobs that run at a time; they take turns with the participants by their shares.",
)
@click.option(
    "--connected",
    default=10_000,
    show_default=True,
    type=click.IntRange(1, 18_000),
    metavar="N",
    help="Devices that stay connected; with more enrolled, the others hang up and check in by a "
    "schedule.",
)
@click.option(
    "--mirror",
    metavar="KIND:TARGET",
    help="Where to put models for a web server, which devices fetch them from: file:/FOLDER, or "
    "s3:BUCKET/PREFIX. Default: nowhere, and the server sends them.",
)
@click.option(
    "--mirror-url",
    metavar="URL",
    help="Address of that folder for devices, https://HOST/FOLDER. Default for s3: signed ones of "
    "the store.",
)
@click.option(
    "--uploads",
    metavar="KIND:TARGET",
    help="Where devices put large updates of plain rounds, by signed addresses: s3:BUCKET/PREFIX. "
    "Default: nowhere, and they send them to the server.",
)
@click.option(
    "--standby",
    is_flag=True,
    help="Wait while another server runs from DIR, and take its place as soon as it is gone; both "
    "need it.",
)
@observed
def start(
    state: Path,
    address: str,
    one_port: bool,
    fair_link: bool,
    balancer: str | None,
    balancer_trusts: tuple[str, ...],
    grace: float,
    console: str | None,
    jobs: int,
    connected: int,
    mirror: str | None,
    mirror_url: str | None,
    uploads: str | None,
    standby: bool,
    log_format: LogFormat,
    quiet: bool,
    metrics: str | None,
    track: tuple[str, ...],
) -> None:
    """Serve the participants that have joined, and run the jobs that operators submit.

    SIGTERM or Ctrl-C ends it after the running round; a second one, or the end of --grace, gives
    that round up. After a restart, queued jobs and an interrupted run continue.
    """
    from isthmus_server.cli.run import prepare, run_until_stopped
    from isthmus_server.fleet import registry_file
    from isthmus_server.fleet.authority import CertificateAuthority, is_separate
    from isthmus_server.mirror.mirrored_blobs import MirroredBlobs
    from isthmus_server.mirror.options import store_named
    from isthmus_server.mirror.stored_updates import StoredUpdates
    from isthmus_server.observability.observers import Observers
    from isthmus_server.runs.jobs.runner import JobRunner
    from isthmus_server.runs.jobs.running import import_training
    from isthmus_server.service.operator_service import serve_queue
    from isthmus_server.service.server import ControlPlaneServer
    from isthmus_server.service.tenure import begin

    host, port = tls.split_address(address, "--address")
    if port == LAST_PORT and not one_port:
        raise UserError(
            f"--address {address!r} has no next port, which is needed for joining; choose another, "
            "or add --one-port"
        )
    behind = _balancer(balancer, balancer_trusts, one_port=one_port)
    place = _mirror(mirror, mirror_url)
    store = None if uploads is None else store_named(uploads)
    shown = None if console is None else tls.split_address(console, "--console")
    prepare()
    # Who joins, and who may not, and which aggregator is there. Of each stream of a device a line
    # would be too much.
    for part in ("service", "fleet", "transport.aggregators"):
        logging.getLogger(f"isthmus_server.{part}").setLevel(logging.INFO)
    shared = one_port and metrics is not None and _same(metrics, host, port)
    observers = Observers.of_options(
        log_format, quiet, metrics, track, certified=True, shared=shared
    )
    if not is_separate(state):
        CertificateAuthority(state)  # raises if there is no server, before anything is made
    told = partial(observers.console.print, highlight=False, markup=False, soft_wrap=True)
    with contextlib.ExitStack() as stack:
        waiting: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if standby:
            _check_free(host, (port,) if one_port else (port, port + 1))
            # Of this version, and intact; there is none before the first token.
            if not is_separate(state) and (state / registry_file.NAME).exists():
                registry_file.check(state, may_be_new=True)
            waiting = observers.answering("it is a standby, and another server may be serving")
            import_training()  # now, and not while nobody serves
        with waiting:
            tenure = stack.enter_context(begin(state, standby=standby, tell=told))
        observers.note_tenure(tenure.fence.epoch, tenure.takeover)
        blobs = None if place is None else MirroredBlobs(place)
        updates = None if store is None else StoredUpdates(store)
        server = ControlPlaneServer(
            state, locked=True, connected=connected, mirror=blobs, uploads=updates
        )
        took = (tenure.takeover, tenure.earlier)
        runner = JobRunner(server.link, state, observers, jobs, tenure.fence, *took)
        stack.enter_context(contextlib.suppress(click.Abort))  # the queue is kept
        served = serve_queue(
            server,
            runner,
            host,
            port,
            shown,
            one_port=one_port,
            fair_link=fair_link,
            balancer=behind,
        )
        run_until_stopped(tenure.during(served, runner.give_up), runner.leave, grace)


def _check_free(host: str, ports: Sequence[int]) -> None:
    """Refuse the ports of another process here, which would keep them if it is stopped.

    Raises:
        UserError: one of them is in use.
    """
    from isthmus_server.transport.listening import listening_sockets

    for port in ports if ports[0] else ():
        try:
            sockets, _ = asyncio.run(listening_sockets(host, port))
        except UserError as error:
            raise UserError(
                f"{error}; give a standby on the machine of the first server another --address"
            ) from None
        for each in sockets:
            each.close()


def _balancer(
    address: str | None, trusted: tuple[str, ...], *, one_port: bool
) -> BalancerListener | None:
    """What the options about a balancer say.

    Raises:
        UserError: one of them is of another form, or another option is missing.
    """
    from isthmus_server.service.server import BalancerListener
    from isthmus_server.transport.balancer_port import network_named

    if address is None:
        if trusted:
            raise UserError("--balancer-trusts is about a balancer; also give --balancer")
        return None
    if not one_port:
        raise UserError(
            "--balancer leads to the one port for participants, operators and joining; also give "
            "--one-port"
        )
    host, port = tls.split_address(address, "--balancer")
    return BalancerListener(host, port, tuple(map(network_named, trusted)))


def _mirror(named: str | None, url: str | None) -> MirrorPlace | None:
    """What the options about a mirror say.

    Raises:
        UserError: one of them is of another form, or missing.
    """
    from isthmus_server.mirror.options import place_named

    if named is None:
        if url is not None:
            raise UserError("--mirror-url is about a mirror; also give --mirror")
        return None
    return place_named(named, url)


def _same(metrics: str, host: str, port: int) -> bool:
    """Whether metrics are to be at the address of the link."""
    return tls.split_address(metrics, "--metrics") == (host, port)


@contextlib.contextmanager
def _registry(state: Path) -> Iterator[Registry]:
    """Open the registry of the server in a state directory.

    Raises:
        UserError: there is no server, or its registry cannot be used.
    """
    from isthmus_server.fleet.authority import CertificateAuthority, is_separate
    from isthmus_server.fleet.registry import Registry

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


@server.command()
@_STATE
@click.argument("target", metavar="BACKUP", type=_DIRECTORY)
def backup(state: Path, target: Path) -> None:
    """Copy the state directory DIR into the new directory BACKUP, also while the server runs.

    It has the keys of the server: keep it as private as DIR.
    """
    from isthmus_server.runs.operations.backup import back_up

    manifest = back_up(state, target)
    size = sum(size for size, _ in manifest.files.values())
    click.echo(f"{len(manifest.files)} files, {size / 1e6:.1f} MB, are backed up in {target}")


@server.command()
@click.argument("source", metavar="BACKUP", type=_DIRECTORY)
@click.argument("state", metavar="DIR", type=_DIRECTORY)
@click.option(
    "--lost",
    type=_DIRECTORY,
    metavar="OLD",
    help="What is left of the directory that was lost: its newer audit log and privacy ledgers are "
    "used.",
)
@click.option(
    "--nothing-ran-since",
    is_flag=True,
    help="State that the server was stopped before the backup and never started again.",
)
def restore(source: Path, state: Path, lost: Path | None, nothing_ran_since: bool) -> None:
    """Make the new state directory DIR of a BACKUP, after checking every file of it.

    What happened after the backup is not known: unused tokens end, unfinished jobs are cancelled,
    and no population with a privacy ledger is asked again before `isthmus server population`.
    """
    from isthmus_server.runs.operations import restore as restoring

    done = restoring.restore(source, state, lost=lost, nothing_ran_since=nothing_ran_since)
    click.echo(f"{state} is as it was at {utc(done.manifest.made_at)}")
    for line in done.newer:
        click.echo(f"newer than the backup: {line}")
    for name in done.closed:
        click.echo(f"cancelled: {name}; submit it again")
    for name in done.populations:
        click.echo(f"not asked any more: the population {name}")
    if nothing_ran_since:
        return
    click.echo("unused tokens have ended; make new ones")
    if not done.revocations_known:
        click.echo("revoke again whom you have revoked since then: the backup does not know them")


@server.command()
@_STATE
@click.argument("name")
def population(state: Path, name: str) -> None:
    """State that population NAME was asked nothing between a backup and its restore into DIR.

    Only then is its privacy ledger complete. The statement is in the audit log.
    """
    from isthmus_server.budgets.populations import accept_population

    if not (state / "privacy").is_dir():
        raise UserError(f"{state} has no privacy ledgers of populations")
    accept_population(state / "privacy", name)
    audit.record(state, "population", by=audit.local_user(), name=name)
    click.echo(f"the population {name} may be asked again")
