"""Open a WebSocket through a balancer, for the connection to the server within it.

What the balancer answers says what is wrong with the road, and each answer has one sentence. It is
trusted with nothing: the server proves who it is within.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from http import HTTPStatus
from typing import cast

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidHandshake
from websockets.typing import Subprotocol
from websockets.uri import WebSocketURI

from isthmus.errors import UserError
from isthmus.identity.balancers import PROTOCOL, Balancer
from isthmus.identity.proxies import Road, RoadBlocked
from isthmus.identity.stations import (
    MOST_HEADERS,
    first_stations,
    not_passed,
    silent_proxy,
    tls_reason,
)
from isthmus.identity.tunnel import LARGEST_FRAME, Ended, Tunnel, log
from isthmus.printable import in_a_line

_ENDED = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionError, asyncio.IncompleteReadError)
_REFUSED = (401, 403, 405, 407, 451)
_NOT_UPGRADED = (400, 426, 501, 505)
_UNREACHABLE = (502, 503, 504)
_OTHER_AUTHORITY = (
    "check the address; if an authority of your organisation has issued it, give that with "
    "--balancer-ca FILE"
)


async def cross(road: Road, near: socket.socket, seconds: float, ended: Ended) -> Tunnel:
    """Connect a socket of this machine, through a balancer, with the server of a road.

    Returns when the WebSocket is open; what comes is passed on until one side ends.

    Args:
        road: with a balancer.
        near: belongs to the tunnel when this returns; if it raises, the caller closes it.
        seconds: time to open the WebSocket.
        ended: see `isthmus.identity.tunnel.Ended`.

    Raises:
        RoadBlocked: the WebSocket cannot be opened.
    """
    balancer = road.balancer
    assert balancer is not None
    station = str(balancer) if road.proxy is None else f"the proxy {road.proxy}"
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await first_stations(road)
            station = str(balancer)
            try:
                await _secured(balancer, station, writer)
                protocol = await _upgraded(balancer, station, reader, writer)
                # A writer that is not used any more would close its connection.
                tunnel = Tunnel(
                    protocol, cast(asyncio.Transport, writer.transport), ended, kept=writer
                )
                tunnel.take_events()  # that came right behind the answer
                await tunnel.start(near)
                return tunnel
            except BaseException:
                writer.transport.abort()
                raise
    except TimeoutError:
        remedy = (
            "check that it forwards to where the server listens (--balancer), and the firewalls "
            "between"
        )
        if station != str(balancer):
            remedy = silent_proxy(road)
        raise RoadBlocked(f"{station} did not answer in time", remedy) from None


async def _secured(balancer: Balancer, station: str, writer: asyncio.StreamWriter) -> None:
    """Make the outer TLS handshake.

    Raises:
        RoadBlocked: it fails.
    """
    try:
        context = await asyncio.to_thread(balancer.context)
    except UserError as error:  # the file was there when the command began
        raise RoadBlocked(str(error)) from None
    try:
        await writer.start_tls(context, server_hostname=balancer.host.strip("[]"))
        if writer.get_extra_info("ssl_object") is None:
            raise ConnectionResetError
    except ssl.SSLCertVerificationError as error:
        raise not_passed(station, error, _OTHER_AUTHORITY, "who runs the balancer") from None
    except _ENDED:
        raise RoadBlocked(
            f"{station} ended the connection in the TLS handshake",
            "check address and port; a server without a balancer before it is at HOST:PORT",
        ) from None
    except UnicodeError:
        raise RoadBlocked(
            f"{balancer.host!r} can be no name of a balancer", "check the address"
        ) from None
    except ssl.SSLError as error:
        reason = tls_reason(error)
        raise RoadBlocked(
            f"what answers at {balancer.place} does not speak TLS as a balancer does ({reason})",
            "it has to offer HTTP/1.1, which WebSockets begin with"
            if "application protocol" in reason
            else "check address and port",
        ) from None


async def _upgraded(
    balancer: Balancer, station: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> ClientProtocol:
    """Ask for the WebSocket; returns its protocol, of which something may have come already.

    Raises:
        RoadBlocked: the balancer, or what it forwards to, does not open it.
    """
    path, _, query = balancer.path.partition("?")
    protocol = ClientProtocol(
        WebSocketURI(True, balancer.host.strip("[]"), balancer.port, path, query),
        subprotocols=[Subprotocol(PROTOCOL)],
        max_size=(None, LARGEST_FRAME),
        logger=log,
    )
    protocol.send_request(protocol.connect())
    try:
        writer.writelines(protocol.data_to_send())
        head = await reader.readuntil(b"\r\n\r\n")
    except _ENDED:
        raise RoadBlocked(
            f"{station} closed the connection without an answer",
            "check that it forwards to where the server listens (--balancer)",
        ) from None
    except asyncio.LimitOverrunError:
        head = b""
    except ssl.SSLError as error:  # TLS 1.3 tells only now that it wants a certificate
        reason = tls_reason(error)
        raise RoadBlocked(
            f"{station} ended the connection after the TLS handshake ({reason})",
            "it must not ask for certificates" if "certificate" in reason else "",
        ) from None
    status = re.match(r"HTTP/1\.[01] (\d{3})(?: ([^\r\n]*))?", head.decode("latin-1"))
    if status is None or head.count(b"\n") > MOST_HEADERS:
        raise RoadBlocked(
            f"what answers at {balancer.place} is no balancer that speaks HTTP", "check the address"
        )
    if (number := int(status[1])) != HTTPStatus.SWITCHING_PROTOCOLS:
        answer = f"{number} {in_a_line(status[2] or '')}".strip()
        raise _refusal(balancer, station, number, answer, head)
    reader.feed_eof()  # nothing more is given to this reader
    protocol.receive_data(head + await reader.read())
    if protocol.handshake_exc is not None or protocol.subprotocol != PROTOCOL:
        what = protocol.handshake_exc
        why = f" ({in_a_line(str(what))})" if isinstance(what, InvalidHandshake) else ""
        raise RoadBlocked(
            f"{station} forwards {balancer.path} to a WebSocket that is not of an Isthmus server"
            f"{why}",
            "check the path, and that it forwards to where the server listens (--balancer)",
        )
    return protocol


def _refusal(
    balancer: Balancer, station: str, number: int, answer: str, head: bytes
) -> RoadBlocked:
    """What a balancer means by a status that opens no WebSocket."""
    path = balancer.path
    if number == HTTPStatus.NOT_FOUND:
        return RoadBlocked(
            f"{station} has nothing at {path} ({answer})",
            "compare the path of the address with the balancer's",
        )
    if number in _NOT_UPGRADED:
        return RoadBlocked(
            f"{station} does not open a WebSocket at {path} ({answer})",
            "it has to pass on the headers Upgrade and Connection, by HTTP/1.1, and to ask for no "
            "certificate",
        )
    if number == HTTPStatus.TOO_MANY_REQUESTS:
        return RoadBlocked(
            f"{station} lets no further connection through ({answer})",
            "try again later; ask who runs it to allow more",
        )
    if number in _UNREACHABLE:
        return RoadBlocked(
            f"{station} does not reach the server ({answer})",
            "check that the server runs, and that it listens (--balancer) where the balancer "
            "forwards to",
        )
    if number in _REFUSED:
        return RoadBlocked(
            f"{station} refuses {path} ({answer})", "ask who runs it to let WebSockets through"
        )
    if 300 <= number < 400:
        place = re.search(rb"(?im)^location:[ \t]*([^\r\n]{1,200})", head)
        where = f"to {in_a_line(place[1].decode('latin-1'))}" if place else "elsewhere"
        return RoadBlocked(
            f"{station} points {where} ({answer})",
            "give that address with wss://; if it is a page to log in at, ask who runs it to let "
            "WebSockets through",
        )
    if 200 <= number < 300:
        return RoadBlocked(
            f"{station} answers {path} with a page ({answer}), so another service is there",
            "compare the path of the address with the balancer's",
        )
    return RoadBlocked(
        f"{station} does not open a WebSocket at {path} ({answer})", "ask who runs it"
    )
