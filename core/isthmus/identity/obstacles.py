"""What is in the way between this machine and a server: a name, a port, a proxy, an inspection.

gRPC's own texts say little about it, and change. A connection that is opened for this asks each
station in turn, and trusts nothing that it is shown.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
from collections.abc import Sequence

from cryptography import x509
from cryptography.x509.oid import NameOID

from isthmus.identity import tls
from isthmus.identity.proxies import Proxy, Road, RoadBlocked
from isthmus.printable import in_a_line

ENDED = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionResetError)
"""Errors of a connection that the server has ended in the handshake; which of them depends on the
version of Python and OpenSSL."""

_SECONDS = 10.0
"""Time for all stations of a road together."""
_NEXT_ADDRESS_SECONDS = 0.25
"""A name's next address is tried after this time, so that a dead one costs no more."""
_REFUSED = (401, 403, 405, 451)
"""Statuses by which a proxy says that it does not want to connect to a server."""
_SCHEMES_NAMED = 3
"""Most kinds of login that a message names."""


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
    _, writer = await opened(road, context, seconds)
    try:
        return certificate_at(road, writer)
    finally:
        writer.transport.abort()


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


async def opened(
    road: Road, context: ssl.SSLContext, seconds: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a TLS connection to the end of a road, which its caller closes.

    Args:
        road: to whom; the name in its address is the one that TLS asks for.
        context: what TLS verifies and offers.
        seconds: time for the connection and its handshake.

    Raises:
        RoadBlocked: nothing that speaks TLS is reached, or its certificate is not accepted.
        OSError: the connection was ended in the handshake; one of `ENDED`.
    """
    host, port = tls.split_address(road.address, "the server's address")
    station = road.address if road.proxy is None else f"the proxy {road.proxy}"
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await _connected(road, host, port)
            try:
                if road.proxy is not None:
                    await _pass(road, road.proxy, reader, writer)
                    station = _end(road)
                await writer.start_tls(context, server_hostname=host.strip("[]"))
                if writer.get_extra_info("ssl_object") is None:
                    raise ConnectionResetError("the connection was ended in the TLS handshake")
            except BaseException:
                writer.transport.abort()
                raise
    except TimeoutError:
        raise RoadBlocked(
            f"{station} did not answer in time",
            "check the address and the firewalls between" if road.proxy is None else "",
        ) from None
    except ENDED:
        raise
    except UnicodeError:  # of TLS; without a proxy the look-up of the name has said so
        raise RoadBlocked(f"{host!r} can be no name of a server", "check the address") from None
    except ssl.SSLCertVerificationError as error:
        raise RoadBlocked(
            f"the certificate of {station} does not pass: {in_a_line(error.verify_message)}",
            "check that all addresses of the name are those of one server",
        ) from None
    except ssl.SSLError as error:
        reason = in_a_line(error.reason or str(error)).replace("_", " ").lower()
        raise RoadBlocked(
            f"what answers at {station} does not speak TLS as a server does ({reason})",
            "check address and port",
        ) from None
    return reader, writer


def _end(road: Road) -> str:
    """The end of a road, for messages."""
    return road.address + ("" if road.proxy is None else f" through the proxy {road.proxy}")


def check_issuer(road: Road, certificate: x509.Certificate, authority: x509.Certificate) -> None:
    """Check that a certificate is of the authority, or at least of another one of Isthmus.

    Raises:
        RoadBlocked: a third party issued it.
    """
    if not tls.issued_by(certificate, authority):
        check_no_inspection(road, certificate)


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
        f"ask the network's owner to exempt {road.address} from TLS inspection",
    )


async def _connected(
    road: Road, host: str, port: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the first station of a road, at whichever of its addresses answers."""
    proxy = road.proxy
    if proxy is None:
        what = road.address
        named = f"the name {host}"
        know = "check it, and the name servers of this machine"
        know += "; where only a proxy knows names, give it with --proxy"
        reach = "check that the server runs, and the firewalls between"
    else:
        host = proxy.host
        port = proxy.port
        what = f"the proxy {proxy}"
        named = f"the name {host} of {road.reason}"
        know = "check it, and the name servers of this machine"
        reach = f"check {road.reason}"
    try:
        return await asyncio.open_connection(
            host.strip("[]"), port, happy_eyeballs_delay=_NEXT_ADDRESS_SECONDS
        )
    except TimeoutError:
        raise
    except (socket.gaierror, UnicodeError):  # the latter for what can be no name
        raise RoadBlocked(f"{named} has no known address", know) from None
    except OSError as error:
        raise RoadBlocked(f"{what} cannot be reached: {_reason(error)}", reach) from None


def _reason(error: OSError) -> str:
    """Why a connection failed; of several addresses each reason once."""
    numbers = re.findall(r"\[Errno (\d+)\]", str(error))
    reasons = dict.fromkeys(os.strerror(int(number)) for number in numbers)
    return " or ".join(reasons) or error.strerror or str(error)


async def _pass(
    road: Road, proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Have a proxy connect to the server.

    Raises:
        RoadBlocked: it does not.
    """
    authorization = proxy.authorization()
    lines = [f"CONNECT {road.address} HTTP/1.1", f"Host: {road.address}"]
    if authorization:
        lines.append(f"Proxy-Authorization: {authorization}")
    writer.write("\r\n".join([*lines, "", ""]).encode("ascii"))
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        raise RoadBlocked(
            f"the proxy {proxy} closed the connection without an answer", f"check {road.reason}"
        ) from None
    except asyncio.LimitOverrunError:
        head = b""
    status = re.match(r"HTTP/1\.[01] (\d{3})(?: ([^\r\n]*))?", head.decode("latin-1"))
    if status is None:
        raise RoadBlocked(f"what answers at {proxy} is no HTTP proxy", f"check {road.reason}")
    number = int(status[1])
    if not 200 <= number < 300:
        raise _refusal(road, proxy, number, f"{number} {in_a_line(status[2] or '')}".strip(), head)


def _refusal(road: Road, proxy: Proxy, number: int, answer: str, head: bytes) -> RoadBlocked:
    """What a proxy means by a status that is not one of success."""
    if number == 407:
        offered = _logins_offered(head)
        if offered and not any(scheme.lower() == "basic" for scheme in offered):
            named = in_a_line(" or ".join(offered[:_SCHEMES_NAMED]))
            return RoadBlocked(
                f"the proxy {proxy} asks for a login by {named}, and only Basic is supported",
                f"ask the network's owner to permit {road.address} without a login",
            )
        if not proxy.has_login:
            return RoadBlocked(
                f"the proxy {proxy} asks for a user name and a password",
                "write USER:PASSWORD into a file of mode 0600 and give it with --proxy-login",
            )
        where = road.reason if proxy.login_file is None else proxy.login_file
        return RoadBlocked(
            f"the proxy {proxy} does not accept the user name and the password of {where}",
            "correct them",
        )
    if number in _REFUSED:
        return RoadBlocked(
            f"the proxy {proxy} refuses connections to {road.address} ({answer})",
            "ask the network's owner to permit CONNECT to this address and port",
        )
    return RoadBlocked(
        f"the proxy {proxy} cannot connect to {road.address} ({answer})",
        "check the address, and that the server runs",
    )


def _logins_offered(head: bytes) -> list[str]:
    """The kinds of login that the answer of a proxy names, of which one header may have several.

    >>> _logins_offered(b'Proxy-Authenticate: Negotiate, Basic realm="of Digest, too"')
    ['Negotiate', 'Basic']
    """
    offered: dict[str, None] = {}
    for header in re.findall(rb"(?im)^proxy-authenticate:([^\r\n]*)", head):
        unquoted = re.sub(rb'"(?:[^"\\]|\\.)*"', b"", header)
        for part in unquoted.split(b","):
            # A parameter of the kind before it has an equals sign after its first word.
            if match := re.match(rb"\s*([\w-]+)(?!\s*=)(?![\w-])", part):
                offered[match[1].decode()] = None
    return list(offered)
