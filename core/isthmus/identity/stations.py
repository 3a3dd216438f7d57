"""The first stations of a road: a name, a port and a proxy, each of which may be in the way."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
import time

from isthmus.identity.proxies import LoginRefused, Proxy, Road, RoadBlocked
from isthmus.printable import in_a_line
from isthmus.system.clocks import utc

_NEXT_ADDRESS_SECONDS = 0.25
"""A name's next address is tried after this time, so that a dead one costs no more."""
_REFUSED = (401, 403, 405, 451)
"""Statuses by which a proxy says that it does not want to connect to a server."""
_SCHEMES_NAMED = 3
"""Most kinds of login that a message names."""
MOST_HEADERS = 128
"""Lines of an answer's head that are read."""
_OUT_OF_TIME = (9, 10)
"""OpenSSL's numbers for a certificate that is not valid yet, and for one that has expired."""


async def first_stations(road: Road) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to where a road's TLS begins: to the server or its balancer, through any proxy.

    Raises:
        RoadBlocked: a name is not known, nothing listens, or the proxy does not connect.
        TimeoutError: of the caller.
    """
    reader, writer = await _connected(road)
    if road.proxy is not None:
        try:
            await _pass(road, road.proxy, reader, writer)
        except BaseException:
            writer.transport.abort()
            raise
    return reader, writer


async def _connected(road: Road) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the first station of a road, at whichever of its addresses answers."""
    proxy = road.proxy
    if proxy is None:
        host = road.host
        port = road.port
        what = road.place if road.balancer is None else str(road.balancer)
        named = f"the name {host}"
        know = "check it, and the name servers of this machine"
        know += "; where only a proxy knows names, give it with --proxy"
        reach = road.unreached
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


def tls_reason(error: ssl.SSLError) -> str:
    """Why TLS failed, in the words of OpenSSL.

    >>> tls_reason(ssl.SSLError(1, "[SSL] tlsv1 alert no application protocol (_ssl.c:1006)"))
    'tlsv1 alert no application protocol'
    """
    # Those that Python itself raises have none.
    reason = getattr(error, "reason", None)
    text = reason or re.sub(r"^\[\w+\] | \(_ssl\.c:\d+\)$", "", error.strerror or str(error))
    return in_a_line(text).replace("_", " ").lower()


def silent_proxy(road: Road) -> str:
    """What to do where nothing comes through the proxy of a road."""
    return (
        f"the proxy may not find {road.host}, or not reach it: compare the address with the "
        "operator's, or ask the network's owner"
    )


def not_passed(
    station: str, error: ssl.SSLCertVerificationError, remedy: str, keeper: str
) -> RoadBlocked:
    """What to say of a certificate that TLS does not accept.

    Args:
        station: whose it is.
        error: of TLS.
        remedy: what to do, unless the certificate is of another time.
        keeper: who can renew it.
    """
    if error.verify_code in _OUT_OF_TIME:
        remedy = (
            f"check this machine's clock, which is at {utc(time.time())}; if that is right, ask "
            f"{keeper} for a new certificate"
        )
    return RoadBlocked(
        f"the certificate of {station} does not pass: {in_a_line(error.verify_message)}", remedy
    )


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
    lines = [f"CONNECT {road.place} HTTP/1.1", f"Host: {road.place}"]
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
    if head.count(b"\n") > MOST_HEADERS:
        raise RoadBlocked(
            f"the proxy {proxy} answers with more than {MOST_HEADERS} lines", f"check {road.reason}"
        )
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
                f"ask the network's owner to permit {road.place} without a login",
            )
        if not proxy.has_login:
            return RoadBlocked(
                f"the proxy {proxy} asks for a user name and a password",
                "write USER:PASSWORD into a file of mode 0600 and give it with --proxy-login",
            )
        where = road.reason if proxy.login_file is None else proxy.login_file
        return LoginRefused(
            f"the proxy {proxy} does not accept the user name and the password of {where}",
            "correct them",
        )
    if number in _REFUSED:
        return RoadBlocked(
            f"the proxy {proxy} refuses connections to {road.place} ({answer})",
            "compare address and port with the operator's; if they are right, ask the network's "
            "owner to permit CONNECT to them",
        )
    return RoadBlocked(
        f"the proxy {proxy} cannot connect to {road.place} ({answer})",
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
