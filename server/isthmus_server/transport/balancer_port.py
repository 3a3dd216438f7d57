"""A port for a balancer that ends TLS, which forwards a WebSocket for each connection.

Within the WebSocket is a connection to the server's one port, with its own TLS, as those that dial
the port directly have it. It is given to the same listeners (`isthmus_server.transport.one_port`),
which authenticate, bound and share it as any other. The port itself offers nothing else, and what
reaches it without a balancer gets no further than through one.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import socket
import weakref
from collections.abc import Sequence
from http import HTTPStatus
from typing import cast

from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import CONNECTING, OPEN
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from isthmus.errors import UserError
from isthmus.identity.balancers import PROTOCOL
from isthmus.identity.tunnel import LARGEST_FRAME, SLICE, FrameAllowance, Tunnel
from isthmus_server.transport.client_hello import (
    LARGEST_HELLO,
    NotAClientHello,
    protocols_of,
    size_of,
)
from isthmus_server.transport.limits import CALLER_CONNECTIONS
from isthmus_server.transport.listening import WAITING, listening_sockets
from isthmus_server.transport.one_port import OnePort
from isthmus_server.transport.places import balancer_network, least_needed, network_of

LARGEST_HEAD = 16 << 10
"""Bytes of the largest request that is read."""
HEAD_SECONDS = 6.0
"""Time for a request to come, and then for the first message of TLS."""
MORE_FILES = 2
"""Open files of a forwarded connection besides those of a direct one."""

_IDLE_SECONDS = 1.0
"""A connection that has not sent its first message after this time is idle."""
_ASK_SECONDS = 5.0
"""Time for an answer to `takes_websockets`."""
_LAST_SECONDS = 5.0
"""Time for a refusal to be read."""
_AT_A_TIME = 64
"""Most connections that are accepted before the event loop does anything else."""
_MOST_FORWARDED = 32
"""Entries of `X-Forwarded-For` that are looked at, from the end."""
_MOST_WAITING = 64 << 10
"""Bytes that may wait for a balancer which does not take what it is answered."""
_LISTS = ("Connection", "Upgrade", "Sec-WebSocket-Protocol")
_MOST_LISTED = 64
"""Names in these headers. The library takes a microsecond for each, and they may be of a byte."""
_END = b"\r\n\r\n"
"""What ends the head of a request."""

_REFUSAL = f"a balancer has to forward a WebSocket here ({PROTOCOL})\n".encode()

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

log = logging.getLogger(__name__)


class BalancerPort:
    """Accepts the WebSockets of balancers, and gives what is within them to the one port.

    Guarantees:
      * at most `places` connections are open whose first message of TLS is not complete, shared out
        among addresses (`isthmus_server.transport.places`), each for a few seconds;
      * before that, at most `LARGEST_HEAD` bytes of a request and one record of TLS are read of
        each;
      * `X-Forwarded-For` counts only from addresses that the operator trusts with it; the callers
        of other balancers count as one address.
    """

    def __init__(
        self, one: OnePort, trusted: Sequence[Network] = (), places: int = CALLER_CONNECTIONS
    ) -> None:
        """`trusted`: balancers that say who their callers are."""
        self._one = one
        self._trusted = trusted
        self._places = places
        self._arriving: set[_Forwarded] = set()
        self._tunnels: weakref.WeakSet[Tunnel] = weakref.WeakSet()
        """Tunnels whose connections may be open."""
        self._servers: list[asyncio.Server] = []
        self._starting: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port (0: any).

        Raises:
            UserError: the port is in use, or the host is not an address of this machine.
        """
        loop = asyncio.get_running_loop()
        sockets, port = await listening_sockets(host, port)
        for each in sockets:
            server = await loop.create_server(
                lambda: _Forwarded(self), sock=each, backlog=_AT_A_TIME
            )
            self._servers.append(server)
            each.listen(WAITING)
        return port

    async def stop(self) -> None:
        """Stop listening, and close all connections."""
        for server in self._servers:
            server.close()
        for arriving in list(self._arriving):
            arriving.abort()
        for task in list(self._starting):
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        for tunnel in list(self._tunnels):
            tunnel.abort()

    def admit(self, arriving: _Forwarded) -> bool:
        """Give a new connection a place; returns whether there is one."""
        if len(self._arriving) >= self._places:
            leaving = least_needed(arriving.network, self._arriving)
            if leaving is None:
                return False
            leaving.abort()
        self._arriving.add(arriving)
        return True

    def forget(self, arriving: _Forwarded) -> None:
        """A connection has left, or its first message is complete."""
        self._arriving.discard(arriving)

    def network_of(self, peer: str, forwarded: Sequence[str]) -> str:
        """The address of a caller.

        Args:
            peer: the address of the connection.
            forwarded: the headers `X-Forwarded-For` of its request.
        """
        if not self._is_trusted(peer):
            return balancer_network(peer)
        entries = re.split(r"[ \t]*,[ \t]*", ",".join(forwarded).strip())[-_MOST_FORWARDED:]
        for entry in reversed(entries):
            host = _host_of(entry)
            if host is None:  # it was written by no trusted balancer
                return balancer_network(peer)
            if not self._is_trusted(host):
                return network_of(host)
        return balancer_network(peer)

    def _is_trusted(self, host: str) -> bool:
        address = ipaddress.ip_address(host.partition("%")[0])
        address = getattr(address, "ipv4_mapped", None) or address
        return any(address in network for network in self._trusted)

    def pass_on(
        self,
        protocol: ServerProtocol,
        outer: asyncio.Transport,
        early: bytes,
        protocols: tuple[bytes, ...],
        network: str,
        allowance: FrameAllowance,
    ) -> None:
        """Give a connection, whose first message is complete, to its listener."""
        protocol.max_fragment_size = LARGEST_FRAME
        try:
            near, far = socket.socketpair()
        except OSError:  # there are too many open files
            outer.abort()
            return
        tunnel = Tunnel(protocol, outer, early=early, allowance=allowance)
        self._tunnels.add(tunnel)
        task = asyncio.get_running_loop().create_task(tunnel.start(near))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)
        # One that is cancelled before it begins would leave its socket open.
        task.add_done_callback(lambda done: near.close() if done.cancelled() else None)
        far.setblocking(False)
        self._one.sort(far, protocols, network)


class _Forwarded(asyncio.Protocol):
    """A connection of a balancer until the first message of TLS within it is complete."""

    def __init__(self, port: BalancerPort) -> None:
        self.network = ""
        self._port = port
        self._peer = ""
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._head = 0
        """Bytes of the request."""
        self._tail = b""
        """The last of them, which may be the beginning of its end."""
        self._first = bytearray()
        """What has come of the first message."""
        self._timer: asyncio.TimerHandle | None = None
        self._protocol = ServerProtocol(
            origins=[None],  # a page in a browser has no business here
            subprotocols=[Subprotocol(PROTOCOL)],
            max_size=(None, LARGEST_HELLO),  # all that is kept of it before it is passed on
            logger=log,
        )
        self._allowance = FrameAllowance()

    @property
    def is_idle(self) -> bool:
        """See `isthmus_server.transport.places.Placed`."""
        return self._loop.time() - self._since > _IDLE_SECONDS

    @property
    def dispensable(self) -> tuple[bool, float]:
        """The oldest one is needed least."""
        return self.is_idle, -self._since

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        if peer is None:  # it has ended already
            self._transport.abort()
            return
        self._peer = peer[0]
        self.network = balancer_network(self._peer)
        if not self._port.admit(self):
            self._transport.abort()
            return
        self._expire(HEAD_SECONDS)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        if self._protocol.handshake_exc is not None:
            return  # it was refused
        if self._protocol.state is CONNECTING:
            size = self._size_of_head(data)
            self._head += size
            if self._head > LARGEST_HEAD:
                self.abort()
                return
            # The library would read what is behind a request before the request is answered.
            self._take(data[:size])
            data = data[size:]
        for begin in range(0, len(data), SLICE):
            if self._protocol.state is not OPEN or self._transport.is_closing():
                break
            self._take(data[begin : begin + SLICE])
        self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()

    def abort(self) -> None:
        """Close the connection at once."""
        self._leave()
        if self._transport is not None:
            self._transport.abort()

    def _size_of_head(self, data: bytes) -> int:
        """How many of these bytes belong to the head of the request."""
        begin = len(self._tail)
        seen = self._tail + data
        at = seen.find(_END)
        self._tail = seen[1 - len(_END) :]
        return len(data) if at < 0 else at + len(_END) - begin

    def _take(self, data: bytes) -> None:
        self._protocol.receive_data(data)
        events = self._protocol.events_received()
        if not self._allowance.spend(len(events)):
            self.abort()
        for event in events:
            if isinstance(event, Request):
                self._answer(event)
            elif isinstance(event, Frame) and event.opcode in (Opcode.BINARY, Opcode.CONT):
                self._first += event.data
            elif isinstance(event, Frame) and event.opcode is Opcode.TEXT:
                self.abort()

    def _answer(self, request: Request) -> None:
        listed = [value for name in _LISTS for value in request.headers.get_all(name)]
        if sum(value.count(",") for value in listed) > _MOST_LISTED:
            self.abort()
            return
        response = self._protocol.accept(request)
        if response.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
            response.body = _REFUSAL
            del response.headers["Content-Length"]
            response.headers["Content-Length"] = str(len(_REFUSAL))
        self._protocol.send_response(response)
        if self._protocol.state is OPEN:
            forwarded = request.headers.get_all("X-Forwarded-For")
            self.network = self._port.network_of(self._peer, forwarded)
            self._expire(HEAD_SECONDS)

    def _go_on(self) -> None:
        """Send what the protocol has to say, and look whether the first message is complete."""
        transport = self._transport
        assert transport is not None
        if transport.is_closing():
            return
        transport.writelines([part for part in self._protocol.data_to_send() if part])
        if self._protocol.state is not OPEN:
            if self._protocol.handshake_exc is not None or self._protocol.eof_sent:
                transport.close()
                self._expire(_LAST_SECONDS)
            return
        if transport.get_write_buffer_size() > _MOST_WAITING:
            self.abort()
            return
        try:
            size = size_of(bytes(self._first[:8]))
            if len(self._first) < size:
                return
            protocols = protocols_of(bytes(self._first[:size]))
        except NotAClientHello:
            self.abort()
            return
        self._leave()
        self._port.pass_on(
            self._protocol,
            transport,
            bytes(self._first),
            protocols,
            self.network,
            self._allowance,
        )

    def _expire(self, seconds: float) -> None:
        """Have the connection closed after that time, and not before."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self.abort)

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._port.forget(self)


def _host_of(entry: str) -> str | None:
    """The address in an entry of `X-Forwarded-For`; None if it has none.

    >>> [_host_of(text) for text in ("192.0.2.7", "192.0.2.7:80", "[2001:db8::7]:80", "unknown")]
    ['192.0.2.7', '192.0.2.7', '2001:db8::7', None]
    """
    text = entry.strip()
    for form in (r"\[([0-9A-Fa-f:.]+)\](?::[0-9]{1,5})?", r"([0-9.]+):[0-9]{1,5}"):
        if match := re.fullmatch(form, text):
            text = match[1]
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None


def takes_websockets(host: str, port: int) -> bool:
    """Whether a server here takes what a balancer forwards; the request has no headers of one.

    Raises:
        OSError: nothing listens there, or it does not answer.
    """
    with socket.create_connection((host.strip("[]"), port), timeout=_ASK_SECONDS) as probe:
        probe.sendall(b"GET / HTTP/1.1\r\nHost: isthmus\r\nConnection: close\r\n\r\n")
        answer = bytearray()
        while len(answer) < LARGEST_HEAD and (data := probe.recv(LARGEST_HEAD)):
            answer += data
    return answer.startswith(b"HTTP/1.1 426 ") and PROTOCOL.encode() in answer


def network_named(text: str) -> Network:
    """An address or a range of addresses, as an operator writes it.

    Raises:
        UserError: it is neither.
    """
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise UserError(
            f"--balancer-trusts {text!r} is neither an address nor a range such as 10.0.0.0/8"
        ) from None
