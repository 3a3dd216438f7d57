"""``isthmus doctor server``: check the machine and the state directory of a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from isthmus.doctor import checks
from isthmus.doctor.checks import Diagnosis, diagnose
from isthmus.doctor.commands import tell
from isthmus.errors import UserError
from isthmus.identity import tls
from isthmus.identity.membership import Membership
from isthmus_server.fleet import registry_file, remote_authority
from isthmus_server.fleet.authority import CertificateAuthority, is_separate
from isthmus_server.fleet.presence import read_snapshot
from isthmus_server.runs.jobs import queue
from isthmus_server.storage import audit
from isthmus_server.transport.balancer_port import takes_websockets

_SECRETS = (
    "authority.pem",
    "enroller.key",
    "server.pem",
    "credentials.pem",
    "identity.key",
    "fleet.sqlite",
)

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - what listens everywhere


@click.command("server")
@click.argument("state", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--address", default="0.0.0.0:9400", show_default=True, help="Where the server listens."
)
@click.option(
    "--one-port", is_flag=True, help="The server has one port, as with this option of its start."
)
@click.option(
    "--balancer",
    metavar="HOST:PORT",
    help="Where the server listens for balancers, as with this option of its start.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def doctor_server(
    state: Path, address: str, one_port: bool, balancer: str | None, as_json: bool
) -> None:
    """Check the server, or separate authority, of the state directory DIR."""
    tell(_results(state, address, one_port, balancer), as_json=as_json)


def _results(
    state: Path, address: str, one_port: bool, balancer: str | None
) -> Iterator[Diagnosis]:
    yield from diagnose("versions", checks.versions)
    yield checks.tls_version()
    if not (state / "authority.pem").exists():
        found = f"{state} is the state directory of no server"
        yield Diagnosis("FAIL", "state", found, f"isthmus server init {state}")
        return
    yield from diagnose("disk", lambda: checks.disk(state))
    yield from diagnose("file modes", lambda: checks.modes(state, _SECRETS))
    yield from diagnose("certificate", lambda: _certificate(state))
    for what, check in (
        ("queue of jobs", lambda: queue.check(state)),
        ("audit log", lambda: audit.read(state)),
        (
            "registry",
            lambda: (
                remote_authority.check(state) if is_separate(state) else registry_file.check(state)
            ),
        ),
    ):

        def intact(what: str = what, check: object = check) -> Diagnosis:
            assert callable(check)
            check()
            return Diagnosis("OK", what, "it is intact")

        yield from diagnose(what, intact)
    ports = list(diagnose("ports", lambda: _ports(state, address, one_port)))
    yield from ports
    if balancer is not None:
        yield from diagnose("balancer", lambda: _balancer(balancer))
    fleet = read_snapshot(state)
    free = any("it is free" in port.found for port in ports)
    if fleet is not None and fleet.is_current() and free:
        found = "it ran less than a minute ago, and nothing listens at its port now"
        remedy = f"if it was killed, isthmus server start {state}; if it runs, give its --address"
        yield Diagnosis("WARN", "server", found, remedy)
    elif fleet is not None and fleet.is_current():
        online = sum(seen.online for seen in fleet.participants.values())
        yield Diagnosis("OK", "server", f"it runs, and {online} participants are connected")
    else:
        yield Diagnosis("WARN", "server", "it is not running", f"isthmus server start {state}")


def _certificate(state: Path) -> Diagnosis:
    if is_separate(state):
        remedy = "start the server while its authority can be reached"
        return checks.certificate("certificate", Membership(state).certificate, remedy)
    _, found = CertificateAuthority(state).read_server_pair()
    return checks.certificate("certificate", found, "start the server, which renews it")


def _balancer(address: str) -> Diagnosis:
    """Whether a server takes what a balancer forwards to it."""
    host, port = tls.split_address(address, "--balancer")
    host = _LOOPBACK.get(host.strip("[]"), host)
    try:
        taken = takes_websockets(host, port)
    except OSError as error:
        found = f"nothing answers at {address} ({error.strerror or error})"
        remedy = "start the server with --one-port and --balancer, or correct the address"
        return Diagnosis("WARN", "balancer", found, remedy)
    if not taken:
        found = f"what answers at {address} is not a server that takes WebSockets of a balancer"
        return Diagnosis("FAIL", "balancer", found, "correct the address, or --balancer")
    return Diagnosis("OK", "balancer", f"the server takes WebSockets at {address}")


def _ports(state: Path, address: str, one_port: bool) -> Iterator[Diagnosis]:
    host, port = tls.split_address(address, "--address")
    if port == 0:
        raise UserError(f"--address {address!r} is no port at which a server is found")
    if port == 65535 and not one_port:
        raise UserError(f"--address {address!r} has no next port, which is needed for joining")
    yield checks.port(host, port)
    if not is_separate(state) and not one_port:
        yield checks.port(host, port + 1)
