"""What is in the way between this machine and a server: a name, a port, a proxy, an inspection.

gRPC's own texts say little about it, and change. A connection that is opened for this asks each
station in turn, and trusts nothing that it is shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.x509.oid import NameOID

from isthmus.grpc_errors import NO_PROTOCOL, NOT_PASSED, UNREACHED
from isthmus.identity import tls
from isthmus.identity.proxies import OtherFleet, Road, RoadBlocked
from isthmus.identity.stations import first_stations, not_passed, silent_proxy, tls_reason
from isthmus.printable import in_a_line

if TYPE_CHECKING:
    from isthmus.identity.tunnel import Tunnel

ENDED = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionResetError, BrokenPipeError)
"""Errors of a connection that the server has ended in the handshake; which of them depends on the
version of Python and OpenSSL."""

_SECONDS = 10.0
"""Time for all stations of a road together."""
_ROUNDS = 5
"""Rounds of an event loop in which it closes what was aborted, TLS within TLS too."""


async def obstacle(road: Road, authority: x509.Certificate) -> RoadBlocked | None:
    """What is in the way to a server of this authority; None if nothing is found."""
    try:
        certificate = await presented(road)
        check_issuer(road, certificate, authority)
    except RoadBlocked as blocked:
        return blocked
    except OSError:
        return None  # a server was reached, and ended the connection because it is busy
    return None


def is_clear(road: Road, reason: str) -> bool:
    """Whether the reason that gRPC gives says what is in the way, so that `obstacle` adds nothing.

    `reason` is one of `isthmus.grpc_errors.short_message`.
    """
    return road.is_plain and NOT_PASSED not in reason and NO_PROTOCOL not in reason


def with_remedy(road: Road, reason: str) -> str:
    """A reason that `is_clear`, with what to do about it as far as that is known."""
    if reason not in UNREACHED or tls.is_socket(road.address):
        return reason
    return f"{reason}; {road.unreached}"


async def presented(
    road: Road, seconds: float = _SECONDS, protocols: Sequence[str] = ("h2",)
) -> x509.Certificate:
    """The certificate that is presented at the end of a road, unverified.

    `protocols` are those that TLS offers.

    Raises:
        RoadBlocked: nothing that speaks TLS is reached.
        OSError: the connection was ended in the handshake; one of `ENDED`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(list(protocols))
    async with opened(road, context, seconds) as (_, writer):
        return certificate_at(road, writer)


def certificate_at(road: Road, writer: asyncio.StreamWriter) -> x509.Certificate:
    """The certificate that was presented on a connection of `opened`.

    Raises:
        RoadBlocked: it has none that can be read.
    """
    data = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    try:
        certificate = x509.load_der_x509_certificate(data)
        certificate.issuer.rfc4514_string()  # which is parsed only now
    except (ValueError, TypeError, x509.InvalidVersion):
        raise RoadBlocked(f"what answers at {_end(road)} has no usable certificate") from None
    return certificate


@contextlib.asynccontextmanager
async def opened(
    road: Road, context: ssl.SSLContext, seconds: float
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A TLS connection to the end of a road, which is open during the block.

    Args:
        road: to whom; the name in its address is the one that TLS asks for.
        context: what TLS verifies and offers.
        seconds: time for the connection, and then for its handshake.

    Raises:
        RoadBlocked: nothing that speaks TLS is reached, or its certificate is not accepted.
        OSError: the connection was ended in the handshake; one of `ENDED`.
    """
    tunnels: list[Tunnel] = []
    try:
        reader, writer = await _secured(road, context, seconds, tunnels)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()
    finally:
        for tunnel in tunnels:
            tunnel.abort()
            await closed()


async def closed() -> None:
    """Wait until the event loop has closed what was aborted."""
    for _ in range(_ROUNDS):
        await asyncio.sleep(0)


async def _secured(
    road: Road, context: ssl.SSLContext, seconds: float, tunnels: list[Tunnel]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """See `opened`; a tunnel that it takes is added to `tunnels`."""
    station = road.address if road.proxy is None else f"the proxy {road.proxy}"
    if road.balancer is not None:
        station = f"the server behind {road.balancer}"
    ends: list[str] = []
    """Why the balancer's connection has ended."""
    try:
        reader, writer = await _begun(road, seconds, ends.append, tunnels)
        async with asyncio.timeout(seconds):
            try:
                if road.proxy is not None and road.balancer is None:
                    station = _end(road)
                await writer.start_tls(context, server_hostname=road.host.strip("[]"))
                if writer.get_extra_info("ssl_object") is None:
                    raise ConnectionResetError("the connection was ended in the TLS handshake")
            except BaseException:
                writer.transport.abort()
                raise
    except TimeoutError:
        remedy = silent_proxy(road)
        if road.proxy is None:
            remedy = f"check the address and the firewalls between{road.other_way}"
        if road.balancer is not None:
            remedy = "the balancer has to pass on at once what comes, in both directions"
        raise RoadBlocked(f"{station} did not answer in time", remedy) from None
    except OSError as error:
        if any(ends):
            raise RoadBlocked(f"{road.balancer} {ends[0]}") from None
        if isinstance(error, ssl.SSLError) and not isinstance(error, ENDED):
            raise _no_server(station, error) from None
        raise
    except UnicodeError:  # of TLS; without a proxy the look-up of the name has said so
        raise RoadBlocked(
            f"{road.host!r} can be no name of a server", "check the address"
        ) from None
    return reader, writer


def _no_server(station: str, error: ssl.SSLError) -> RoadBlocked:
    """What a failure of TLS says about the end of a road."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return not_passed(
            station,
            error,
            "check that all addresses of the name are those of one server",
            "its operator",
        )
    reason = tls_reason(error)
    remedy = "check address and port"
    if "application protocol" in reason:
        remedy += (
            "; a balancer that ends TLS may be there: ask the operator for its address with wss://"
        )
    return RoadBlocked(
        f"what answers at {station} does not speak TLS as a server does ({reason})", remedy
    )


async def _begun(
    road: Road, seconds: float, ended: Callable[[str], None], tunnels: list[Tunnel]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which TLS with the server can begin.

    `ended` is told how that of a balancer has ended, see `isthmus.identity.tunnel.Ended`.

    Raises:
        RoadBlocked: it does not come about.
        TimeoutError: not in time, without a balancer.
    """
    if road.balancer is None:
        async with asyncio.timeout(seconds):
            return await first_stations(road)
    from isthmus.identity.crossing import cross  # most roads do without WebSockets

    near, far = socket.socketpair()
    try:
        try:
            tunnels.append(await cross(road, far, seconds, ended))
        except BaseException:
            far.close()
            raise
        return await asyncio.open_connection(sock=near)
    except BaseException:
        near.close()
        raise


def _end(road: Road) -> str:
    """The end of a road, for messages."""
    return road.address + ("" if road.proxy is None else f" through the proxy {road.proxy}")


def check_issuer(road: Road, certificate: x509.Certificate, authority: x509.Certificate) -> None:
    """Check that a certificate is of the authority.

    Raises:
        OtherFleet: the authority of another fleet issued it.
        RoadBlocked: a third party did.
    """
    if tls.issued_by(certificate, authority):
        return
    check_no_inspection(road, certificate)
    raise OtherFleet(
        f"the server at {_end(road)} is of another fleet: its certificate is not of the authority "
        "that this machine has joined",
        "check the address; at a new server join again",
    )


def check_no_inspection(road: Road, certificate: x509.Certificate) -> None:
    """Check that a certificate may be a server's, as far as its issuer's name says.

    It proves nothing, and gives the likely reason before TLS refuses the certificate.

    Raises:
        RoadBlocked: the issuer has another name than Isthmus's authorities have.
    """
    issuer = certificate.issuer
    names = [
        str(attribute.value)
        for kind in (NameOID.COMMON_NAME, NameOID.ORGANIZATION_NAME)
        for attribute in issuer.get_attributes_for_oid(kind)
    ]
    if tls.AUTHORITY_NAME in names:
        return
    name = in_a_line(names[0] if names else issuer.rfc4514_string() or "nobody")
    raise RoadBlocked(
        f"the certificate that {road.address} shows{road.detour} was issued by {name!r}, and not "
        "by the authority of an Isthmus server: something on the way inspects TLS or ends it, "
        "as some balancers do, or another service answers",
        f"ask the network's owner to exempt {road.address} from TLS inspection"
        + ("" if road.balancer else "; behind a balancer, give its address with wss://"),
    )
