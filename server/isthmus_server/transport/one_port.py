"""One port for everything that a server offers.

Those that join have no certificate yet, and everybody else has to present one, so that one TLS
server cannot serve both. This port reads what the first message of a connection offers (ALPN) and
gives the connection, with that message still unread, to the listener that it is for:

  * `isthmus-join`: joining, at which nothing else is served;
  * HTTP/2 alone, as gRPC offers it: the link and the service of operators, by mutual TLS;
  * HTTP/1.1, or nothing, as a scraper offers it: metrics, by mutual TLS.

Each listener authenticates its callers as it does at a port of its own. Who offers something else
than he is reaches a listener that refuses him.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import socket
from collections.abc import Callable

from isthmus.identity.join_channel import JOIN_PROTOCOL
from isthmus_server.transport.client_hello import (
    LARGEST_HELLO,
    NotAClientHello,
    protocols_of,
    size_of,
)
from isthmus_server.transport.limits import CALLER_CONNECTIONS
from isthmus_server.transport.listening import listening_sockets
from isthmus_server.transport.places import least_needed, network_of

_HELLO_SECONDS = 5.0
"""Time for a caller to send its first message."""
_IDLE_SECONDS = 1.0
"""A connection that has not sent it after this time is idle."""
_AT_A_TIME = 64
"""Most connections that are accepted before the event loop does anything else."""
_PAUSE_SECONDS = 1.0
"""Pause after a connection that could not be accepted, for want of files or memory."""
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Take = Callable[[socket.socket, str], None]
"""Takes over a connection, which does not block and of which nothing has been read; the text is its
caller's address, see `isthmus_server.transport.places.network_of`."""

log = logging.getLogger(__name__)


class OnePort:
    """Accepts connections, and gives each to the listener that its first message is for.

    Guarantees:
      * it reads at most one record of TLS, within a few seconds, and closes the connection if that
        is not a ClientHello to the last byte, or offers what no listener here is for;
      * connections whose first message is not complete have few places, shared out among addresses
        (`isthmus_server.transport.places`).
    """

    def __init__(self, places: int = CALLER_CONNECTIONS) -> None:
        """`places`: most connections whose first message is not complete."""
        self.joining: Take | None = None
        self.link: Take | None = None
        self.metrics: Take | None = None
        self._places = places
        self._arriving: set[_Arriving] = set()
        self._sockets: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port (0: any).

        Raises:
            UserError: the port is in use, or the host is not an address of this machine.
        """
        self._sockets, port = await listening_sockets(host, port)
        loop = asyncio.get_running_loop()
        self._accepting = [loop.create_task(self._accept(each)) for each in self._sockets]
        return port

    async def stop(self) -> None:
        """Stop listening, and close the connections that no listener has yet."""
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        for each in self._sockets:
            each.close()
        for arriving in list(self._arriving):
            arriving.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            for _ in range(_AT_A_TIME):
                try:
                    connection, peer = await loop.sock_accept(listener)
                except OSError as error:  # one that its caller has ended already is none to log
                    if error.errno in _SCARCE:
                        log.error("a connection cannot be accepted: %s", error.strerror)
                        await asyncio.sleep(_PAUSE_SECONDS)
                    continue
                self._admit(connection, network_of(peer[0]))
            await asyncio.sleep(0)

    def _admit(self, connection: socket.socket, network: str) -> None:
        if len(self._arriving) >= self._places:
            leaving = least_needed(network, self._arriving)
            if leaving is None:
                connection.close()
                return
            leaving.close()
        sort = functools.partial(self.sort, network=network)
        arriving = _Arriving(connection, network, sort, self._arriving.discard)
        self._arriving.add(arriving)
        arriving.start()

    def sort(self, connection: socket.socket, protocols: tuple[bytes, ...], network: str) -> None:
        """Give a connection to the listener that is for what its first message offers.

        Args:
            connection: does not block, and nothing of it has been read.
            protocols: see `isthmus_server.transport.client_hello.protocols_of`.
            network: its caller's address.
        """
        take: Take | None = None
        if JOIN_PROTOCOL.encode() in protocols:
            take = self.joining
        elif not protocols or b"http/1.1" in protocols:
            take = self.metrics
        elif b"h2" in protocols:
            take = self.link
        if take is None:
            connection.close()
        else:
            take(connection, network)


class _Arriving:
    """A connection whose first message is not complete. Nothing of it is taken from the socket."""

    def __init__(
        self,
        connection: socket.socket,
        network: str,
        sort: Callable[[socket.socket, tuple[bytes, ...]], None],
        left: Callable[[_Arriving], None],
    ) -> None:
        self.network = network
        self._connection = connection
        self._sort = sort
        self._left = left
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._seen = 0
        """Bytes of the message that have been here."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """See `isthmus_server.transport.places.Placed`."""
        return self._loop.time() - self._since > _IDLE_SECONDS

    @property
    def dispensable(self) -> tuple[bool, float]:
        """The oldest one is needed least."""
        return self.is_idle, -self._since

    def start(self) -> None:
        """Wait for the message."""
        self._timer = self._loop.call_later(_HELLO_SECONDS, self.close)
        try:
            self._loop.add_reader(self._connection, self._look)
        except OSError as error:  # the kernel has no memory, or no room, for a further one
            log.error("a connection cannot be watched: %s", error.strerror)
            self.close()

    def close(self) -> None:
        """Close the connection."""
        self._leave()
        self._connection.close()

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._connection)
        self._left(self)

    def _look(self) -> None:
        try:
            data = self._connection.recv(LARGEST_HELLO, socket.MSG_PEEK)
            size = size_of(data)
            if len(data) < size:
                if len(data) <= self._seen:  # there is no more: its caller has ended it
                    self.close()
                    return
                self._seen = len(data)
                # The kernel tells of the connection again once the rest is there.
                self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
                return
            protocols = protocols_of(data[:size])
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, NotAClientHello):
            self.close()
            return
        self._leave()
        self._sort(self._connection, protocols)
