"""Pass connections on to a gRPC server that listens on a socket of this machine.

gRPC takes no connection that somebody else has accepted. What is passed on is TLS between the
caller and gRPC, of which nothing is read here.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket

from isthmus_server.transport.places import least_needed

_PART = 256 << 10
"""Most bytes that are read at a time."""
_PARTS = 4
"""Parts of one connection that are passed on before the event loop does anything else."""
_STALLED_SECONDS = 60.0
"""A connection whose receiver has taken nothing for this time is closed."""
_LAST_SECONDS = 0.2
"""Time for the last messages of a gRPC server that has ended."""
_IDLE_SECONDS = 1.0
"""A connection of an unknown caller whose turn it was for this time is idle."""
_SILENT_SECONDS = 4.0
"""One of an unknown caller on which nobody has sent anything for this time is idle in any case."""
_FILES = 3
"""Open files of a connection: its caller's end, and both ends of the one to gRPC."""


class Relay:
    """Passes connections on to one socket.

    Guarantees:
      * at most `places` connections are open, and fewer if the process may not open three files for
        each, besides `reserved` others;
      * those of callers that are not known yet are shared out among their addresses
        (`isthmus_server.transport.places`): a new one is refused only if its own address has most
        of them and none that is idle, or if all places have participants;
      * no connection of a participant is closed for a caller;
      * of each direction of a connection at most one part waits in this process, and nothing is
        read for a receiver that does not take what it has been sent;
      * one whose receiver has stalled for a minute is closed.
    """

    def __init__(self, target: str, places: int, reserved: int, more_files: int = 0) -> None:
        """`target` is the path of the socket, `more_files` are open elsewhere per connection."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.places = max(64, min(places, (files - reserved) // (_FILES + more_files)))
        self._target = target
        self._loop = asyncio.get_running_loop()
        self._connections: set[_Connection] = set()
        self._unknown: dict[str, _Connection] = {}
        """Connections of callers that are not known, by the names that gRPC has for them."""
        self._emptied: asyncio.Event | None = None
        """Set when no connection is open any more, while this ends."""
        self._buffer = memoryview(bytearray(_PART))
        """What is read goes on at once, or is copied; so one buffer is enough for all."""

    def __len__(self) -> int:
        """Number of open connections."""
        return len(self._connections)

    def take(self, caller: socket.socket, network: str) -> None:
        """Pass on a connection that a port has accepted; it is closed if there is no place.

        `network` is its caller's address, see `isthmus_server.transport.places.network_of`.
        """
        if len(self._connections) >= self.places:
            leaving = least_needed(network, self._unknown.values())
            if leaving is None:
                caller.close()
                return
            leaving.close()
        try:
            inner = socket.socket(socket.AF_UNIX)
        except OSError:  # there are too many open files
            caller.close()
            return
        try:
            inner.setblocking(False)
            inner.bind("")  # the kernel chooses a name, by which gRPC knows its caller
            peer = f"unix-abstract:{inner.getsockname()[1:].decode()}"
            inner.connect(self._target)
            if caller.family != socket.AF_UNIX:  # of a balancer's connection, within this process
                caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:  # gRPC has ended, too many wait for it, or the caller has left
            inner.close()
            caller.close()
            return
        connection = _Connection(self, self._loop, self._buffer, caller, inner, network, peer)
        self._connections.add(connection)
        self._unknown[peer] = connection
        connection.start()

    def admitted(self, peer: str) -> None:
        """The caller that gRPC knows by this name is a participant."""
        self._unknown.pop(peer, None)

    def forget(self, connection: _Connection) -> None:
        """A connection is closed."""
        self._connections.discard(connection)
        self._unknown.pop(connection.peer, None)
        if self._emptied is not None and not self._connections:
            self._emptied.set()

    async def stop(self) -> None:
        """Close all connections, once what gRPC has sent at its end is passed on."""
        if self._connections:
            self._emptied = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_SECONDS):
                    await self._emptied.wait()
        for connection in list(self._connections):
            connection.close()


class _Connection:
    """Both directions of a connection."""

    __slots__ = (
        "_buffer",
        "_caller",
        "_has_turn",
        "_inner",
        "_is_open",
        "_loop",
        "_moved",
        "_relay",
        "_waiting",
        "network",
        "peer",
    )

    def __init__(
        self,
        relay: Relay,
        loop: asyncio.AbstractEventLoop,
        buffer: memoryview,
        caller: socket.socket,
        inner: socket.socket,
        network: str,
        peer: str,
    ) -> None:
        """`network` is the caller's address, `peer` gRPC's name for it."""
        self.network = network
        self.peer = peer
        self._moved = loop.time()
        self._has_turn = True
        self._relay = relay
        self._loop = loop
        self._buffer = buffer
        self._caller = caller
        self._inner = inner
        self._is_open = True
        self._waiting: dict[socket.socket, tuple[bytes, asyncio.TimerHandle]] = {}
        """What a receiver has not taken yet, and what closes the connection if it takes none."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing happens on the connection."""
        silent = self._loop.time() - self._moved
        return silent > (_IDLE_SECONDS if self._has_turn else _SILENT_SECONDS)

    @property
    def dispensable(self) -> tuple[bool, float]:
        """How little the connection is needed: the less, the larger the value."""
        return self._has_turn, self._loop.time() - self._moved

    def start(self) -> None:
        """Pass on what comes, in both directions."""
        self._loop.add_reader(self._caller, self._move, self._caller, self._inner)
        self._loop.add_reader(self._inner, self._move, self._inner, self._caller)

    def close(self) -> None:
        """Close both ends."""
        if not self._is_open:
            return
        self._is_open = False
        for _, timer in self._waiting.values():
            timer.cancel()
        self._waiting.clear()
        for end in (self._caller, self._inner):
            self._loop.remove_reader(end)
            self._loop.remove_writer(end)
            with contextlib.suppress(OSError):
                end.close()
        self._relay.forget(self)

    def _move(self, source: socket.socket, target: socket.socket) -> None:
        self._moved = self._loop.time()
        self._has_turn = source is self._inner
        for _ in range(_PARTS):
            try:
                count = source.recv_into(self._buffer)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                count = 0
            if not count:
                # All that came before is sent: nothing is read while something waits.
                self.close()
                return
            sent = self._send(target, self._buffer[:count])
            if sent is None:
                return
            if sent < count:
                self._wait(target, source, bytes(self._buffer[sent:count]))
                return
            if count < _PART:
                return

    def _send(self, target: socket.socket, data: memoryview | bytes) -> int | None:
        """Send; returns how many bytes were taken, or None if the receiver has left."""
        try:
            return target.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self.close()
            return None

    def _wait(self, target: socket.socket, source: socket.socket, left: bytes) -> None:
        """Keep what is left for a receiver until it takes more, and read nothing until then."""
        timer = self._loop.call_later(_STALLED_SECONDS, self.close)
        self._waiting[target] = left, timer
        self._loop.remove_reader(source)
        self._loop.add_writer(target, self._go_on, target, source)

    def _go_on(self, target: socket.socket, source: socket.socket) -> None:
        left, timer = self._waiting[target]
        sent = self._send(target, left)
        if not sent:
            return
        timer.cancel()
        del self._waiting[target]
        if sent < len(left):
            self._wait(target, source, left[sent:])
            return
        self._loop.remove_writer(target)
        self._loop.add_reader(source, self._move, source, target)
