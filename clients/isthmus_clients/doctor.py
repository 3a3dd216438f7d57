"""``isthmus doctor device``: check an edge device."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from isthmus.doctor import checks
from isthmus.doctor.checks import Diagnosis, diagnose
from isthmus.doctor.commands import tell
from isthmus.identity.membership import Membership, default_state
from isthmus.identity.proxies import ProxyChoice
from isthmus.identity.proxy_options import proxy_options
from isthmus_clients.device.sandbox.landlock import abi_version
from isthmus_clients.training.history_files import lost_file


@click.command("device")
@click.argument(
    "state",
    metavar="[DIR]",
    type=click.Path(file_okay=False, path_type=Path),
    default=lambda: default_state("client"),
)
@click.option(
    "--server",
    "servers",
    multiple=True,
    metavar="HOST:PORT",
    help="Address to try, as for `client start`, in place of the one that was joined; may be "
    "repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@proxy_options
def doctor_device(state: Path, servers: tuple[str, ...], as_json: bool, proxy: ProxyChoice) -> None:
    """Check the device whose keys and history are in DIR, by default that of `client start`."""
    tell(_results(state, servers, proxy), as_json=as_json)


def _results(state: Path, servers: Sequence[str], proxy: ProxyChoice) -> Iterator[Diagnosis]:
    yield from diagnose("versions", checks.versions)
    yield checks.tls_version()
    is_member = (state / "member.json").exists()
    yield from diagnose("membership", lambda: checks.membership(state, ("client",), proxy, servers))
    if not is_member:
        for address in servers:
            before = functools.partial(checks.road_before_joining, proxy, address)
            yield from diagnose("road", before)
    if not state.is_dir():
        return
    yield from diagnose("disk", lambda: checks.disk(state))
    if is_member:
        yield from diagnose("history", lambda: _history(state))
    yield _sandbox()
    yield from diagnose("memory", _memory)


def _history(state: Path) -> Diagnosis:
    member = Membership(state)
    lost = lost_file(member)
    if lost is not None:
        return Diagnosis(
            "FAIL",
            "history",
            f"{lost} is lost, so the device takes part in no secure sum",
            "restore it, or see isthmus client new-history",
        )
    return Diagnosis("OK", "history", "it is there" if member.has_history else "none yet")


def _sandbox() -> Diagnosis:
    version = abi_version()
    if not version:
        return Diagnosis(
            "WARN",
            "sandbox",
            "this kernel has no Landlock, so tasks from packages are less confined",
            "boot a kernel with Landlock (5.13 or newer, lsm=landlock)",
        )
    return Diagnosis("OK", "sandbox", f"Landlock version {version}")


def _memory() -> Diagnosis:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = f"{free / 1e6:.0f} MB are free"
    if free < 300e6:
        return Diagnosis("WARN", "memory", found, "PyTorch alone needs 200 MB; end other programs")
    return Diagnosis("OK", "memory", found)
