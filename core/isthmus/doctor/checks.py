"""Checks of a machine that every role makes, and how their results are told."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import shutil
import socket
import sqlite3
import ssl
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import grpc
from cryptography import x509

from isthmus import __version__
from isthmus.errors import IsthmusError
from isthmus.grpc_errors import NOT_LINKED, short_message
from isthmus.identity import tls
from isthmus.identity.approach import approach_to
from isthmus.identity.membership import Membership
from isthmus.identity.obstacles import ENDED, check_no_inspection, obstacle, presented
from isthmus.identity.proxies import ProxyChoice, Road, RoadBlocked, road_to
from isthmus.system.clocks import CLOCK_METADATA, utc
from isthmus.transport.uplink import CHANNEL_OPTIONS, METHOD

Level = Literal["OK", "WARN", "FAIL"]

_LOW_DISK = 2e9
_NO_DISK = 200e6
"""Free bytes."""
_SOON = 24 * 3600.0
"""Seconds before its end at which a certificate should have been renewed."""
_DIAL_SECONDS = 5.0
_ANSWER_SECONDS = 10.0
"""Time for an authenticated connection and the server's first answer on it."""
_SILENT_SECONDS = 4.0
"""A server that closes the connection after this time has waited in vain for this machine; one that
does not accept its certificate closes it at once."""
_CLOCK_SECONDS = 60.0
"""A difference to the server's clock that disturbs neither hours nor certificates."""
_SILENT_REMEDY = (
    "try again, as the server may be busy; if it is the same, something between most likely loses "
    "large packets, of which a participant's certificate is the first: give this machine's "
    "interface a smaller MTU, as with ip link set dev eth0 mtu 1280, or ask the network's owner "
    "about it"
)


_RENEWING = {
    "client": "`isthmus client start`",
    "datacenter": "`isthmus datacenter launch`",
    tls.AGGREGATOR: "`isthmus server aggregator start`",
}
"""The commands that renew a membership's certificate, by its kind."""


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The result of one check."""

    level: Level
    what: str
    found: str
    remedy: str = ""
    """What to do; empty if nothing."""


def diagnose(
    what: str, check: Callable[[], Diagnosis | Iterable[Diagnosis]]
) -> Iterator[Diagnosis]:
    """The results of a check; it has failed if it raises."""
    try:
        results = check()
        yield from [results] if isinstance(results, Diagnosis) else results
    except (IsthmusError, OSError, ValueError, sqlite3.Error) as error:
        yield Diagnosis("FAIL", what, str(error) or type(error).__name__)


def versions() -> Diagnosis:
    """Versions of what every role needs."""
    import torch

    python = ".".join(map(str, sys.version_info[:3]))
    found = f"isthmus {__version__}, Python {python}, PyTorch {torch.__version__}, SQLite "
    found += sqlite3.sqlite_version
    if sqlite3.sqlite_version_info < (3, 37):
        return Diagnosis("FAIL", "versions", found, "install SQLite 3.37 or newer")
    return Diagnosis("OK", "versions", found)


def disk(directory: Path) -> Diagnosis:
    """Free space where a directory is."""
    free = shutil.disk_usage(directory).free
    level: Level = "FAIL" if free < _NO_DISK else "WARN" if free < _LOW_DISK else "OK"
    remedy = "" if level == "OK" else "free space, for example with isthmus runs prune"
    return Diagnosis(level, "disk", f"{free / 1e9:.1f} GB are free at {directory}", remedy)


def modes(directory: Path, secrets: Iterable[str]) -> Diagnosis:
    """Who can read the secrets of a state directory, and whether this user can write it."""
    for path in (directory, *(directory / name for name in secrets)):
        if path.exists() and path.stat().st_mode & 0o077:
            mode = 700 if path.is_dir() else 600
            found = f"{path} can be read by others on this machine"
            return Diagnosis("FAIL", "file modes", found, f"chmod {mode} {path}")
    if not os.access(directory, os.W_OK):
        found = f"this user cannot write {directory}"
        return Diagnosis("FAIL", "file modes", found, "run it as the user of the service")
    return Diagnosis("OK", "file modes", "secrets can be read by this user only")


def certificate(
    what: str,
    found: x509.Certificate,
    remedy: str,
    ended: str = "",
    ahead: float | None = None,
) -> Diagnosis:
    """How long a certificate is valid.

    Args:
        what: the name of the check.
        found: the certificate.
        remedy: what to do about one that ends soon.
        ended: what to do about one that has ended; by default the same.
        ahead: seconds by which this machine's clock is ahead of the server's, which decides; None
            if that is not known.
    """
    end = found.not_valid_after_utc.timestamp()
    own = time.time()
    now = own - (ahead or 0.0)
    clock = "the server's clock" if ahead is not None else "this machine's clock"
    by = f"by {clock}, which is at {utc(now)}"
    left = end - now
    if left < 0:
        return Diagnosis("FAIL", what, f"it ended at {utc(end)} {by}", ended or remedy)
    if found.not_valid_before_utc.timestamp() > now:
        return Diagnosis("FAIL", what, f"it is not valid yet {by}", "set the clock that is wrong")
    if left < _SOON:
        return Diagnosis("WARN", what, f"it ends at {utc(end)} and was not renewed", remedy)
    return Diagnosis("OK", what, f"it is valid until {utc(end)}")


def server_reached(member: Membership, road: Road) -> Diagnosis:
    """Whether a server of the fleet's authority answers at the end of the road."""
    blocked = asyncio.run(obstacle(road, member.authority))
    if blocked is not None:
        return Diagnosis("FAIL", "server", blocked.found, blocked.remedy)
    return Diagnosis("OK", "server", f"{road.address} accepts connections")


def road_before_joining(proxy: ProxyChoice, address: str) -> Iterator[Diagnosis]:
    """Whether a server answers at an address that this machine has not joined.

    Args:
        proxy: what the owner says about proxies now.
        address: of the server, for joining or for the link.
    """
    road = road_to(address, proxy)
    road.check_used(proxy)
    yield Diagnosis("OK", "road", f"connections to {road.address} go {road}")
    try:
        with contextlib.suppress(*ENDED):  # a server was reached, and has no place now
            check_no_inspection(road, asyncio.run(presented(road)))
    except RoadBlocked as blocked:
        yield Diagnosis("FAIL", "server", blocked.found, blocked.remedy)
    else:
        yield Diagnosis("OK", "server", f"{road.address} accepts connections")


def clock(
    member: Membership,
    road: Road,
    seconds: float = _ANSWER_SECONDS,
    note: Callable[[float], None] = lambda ahead: None,
) -> Diagnosis:
    """How far this machine's clock is from the server's, which authenticates itself.

    A server that says nothing within `seconds` is a matter of the road, and not of the clock.
    `note` is given the seconds by which this machine's is ahead, if the server has told its time.
    """
    credentials = member.channel_credentials()
    with contextlib.ExitStack() as opened:
        approach = opened.enter_context(approach_to(road))
        options = (*CHANNEL_OPTIONS, *approach.options())
        channel = opened.enter_context(grpc.secure_channel(approach.target, credentials, options))
        began = time.monotonic()
        call = channel.stream_stream(METHOD)(iter(()), timeout=seconds)
        try:
            told = dict(call.initial_metadata()).get(CLOCK_METADATA)
            now = time.time()
            waited = time.monotonic() - began
            is_over = told is None and call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            error = "" if told is not None else short_message(call.details() or "")
        finally:
            call.cancel()
    if told is None and (is_over or waited >= _SILENT_SECONDS):
        what = "takes connections, and nobody answered within"
        found = f"{road.address}{road.detour} {what} {waited:.0f} s"
        return Diagnosis("FAIL", "answer", found, _SILENT_REMEDY)
    if error == NOT_LINKED:
        remedy = "try again, as its server may be starting; if it is the same, tell the operator"
        return Diagnosis("FAIL", "answer", f"{road.address}{road.detour}: {error}", remedy)
    remedy = "set the clock of this machine, for example with timedatectl set-ntp true"
    if told is None:
        found = f"{road.address} did not tell its time: {error}"
        return Diagnosis(
            "FAIL", "clock", found, f"if this machine is at {utc(now)} wrongly, {remedy}"
        )
    ahead = now - float(told)
    note(ahead)
    if abs(ahead) < _CLOCK_SECONDS:
        return Diagnosis("OK", "clock", "it agrees with the server's to within a minute")
    way = "ahead of" if ahead > 0 else "behind"
    return Diagnosis("WARN", "clock", f"it is {_span(abs(ahead))} {way} the server's", remedy)


def _span(seconds: float) -> str:
    """A difference of clocks, in a unit of which there are at least two.

    >>> _span(90.0), _span(7200.0), _span(864000.4)
    ('90 s', '2 hours', '10 days')
    """
    for unit, length in (("days", 24 * 3600.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length - 1:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def membership(
    state: Path, kinds: Iterable[str], proxy: ProxyChoice, servers: Sequence[str] = ()
) -> Iterator[Diagnosis]:
    """The membership of a participant: its keys, its certificate, and the roads to its server.

    Args:
        state: where it is.
        kinds: of participants, one of which it has to be of.
        proxy: what the owner says about proxies now.
        servers: addresses to try; none for the one that was joined.
    """
    if state.exists():  # there is none before the join
        yield modes(state, ("identity.key", "credentials.pem", "member.json"))
    member = Membership(state)
    if member.kind not in kinds:
        article = "an" if member.kind[0] in "ao" else "a"
        found = f"{state} is the membership of {article} {member.kind}"
        yield Diagnosis("FAIL", "membership", found, "give the directory of another role")
        return
    yield Diagnosis("OK", "membership", f"{member.name} at {member.server}")
    ahead: list[float] = []
    for address in servers or (member.server,):
        on_the_road = functools.partial(_on_the_road, member, proxy, address, ahead.append)
        yield from diagnose("road", on_the_road)
    yield certificate(
        "certificate",
        member.certificate,
        f"have {_RENEWING[member.kind]} run, which renews it",
        ("" if ahead else "if that clock is right, ") + "join again with a new token",
        ahead[0] if ahead else None,
    )


def _on_the_road(
    member: Membership, proxy: ProxyChoice, address: str, note: Callable[[float], None]
) -> Iterator[Diagnosis]:
    road = member.road(proxy, address)
    yield Diagnosis("OK", "road", f"connections to {road.address} go {road}")
    reached = server_reached(member, road)
    yield reached
    if reached.level == "OK":
        yield from diagnose("clock", lambda: clock(member, road, note=note))


def port(address: str, number: int) -> Diagnosis:
    """Whether a service can listen, or listens already."""
    what = f"port {number}"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, number))
        except OSError as error:
            with socket.socket() as other:
                other.settimeout(_DIAL_SECONDS)
                if other.connect_ex(("127.0.0.1", number)) == 0:
                    return Diagnosis("OK", what, "something listens: the server, if it runs")
            return Diagnosis("FAIL", what, str(error.strerror), "free it, or use --address")
    return Diagnosis("OK", what, "it is free")


def tls_version() -> Diagnosis:
    """Whether TLS 1.3 is there, which gRPC and the metrics use."""
    if ssl.HAS_TLSv1_3:
        return Diagnosis("OK", "TLS", ssl.OPENSSL_VERSION)
    return Diagnosis("FAIL", "TLS", f"{ssl.OPENSSL_VERSION} has no TLS 1.3", "install a newer one")
