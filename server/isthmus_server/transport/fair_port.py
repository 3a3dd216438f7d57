"""A port whose connections are shared out among the addresses that open them.

gRPC takes a number of connections and refuses all further ones. A caller that opens as many and
sends nothing would keep everybody else out. Here a connection from an address with few of them
always finds a place, at the expense of an address with many. gRPC listens on a socket in a private
directory and is passed what callers send; TLS is between them and gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from typing import Any, cast

import grpc
import grpc.aio

from isthmus.system.private_socket import private_socket
from isthmus_server.transport.limits import Services, listen, server_options
from isthmus_server.transport.listening import WAITING, listening_sockets
from isthmus_server.transport.places import least_needed, network_of

_ANSWER_SECONDS = 5.0
"""Time for a caller to answer the first that it is sent: to go on with its TLS handshake."""
_IDLE_SECONDS = 1.0
"""A connection on which it was the caller's turn for this time is idle."""
_SILENT_SECONDS = 4.0
"""One on which nobody has sent anything for this time is idle in any case."""
_AT_A_TIME = 64
"""Most connections that are accepted before the event loop does anything else."""
_BUFFER_BYTES = 32 << 10
"""Bytes of each direction of a connection that wait in this process."""


class FairPort:
    """A gRPC server that is reached through a port of this process.

    Guarantees:
      * at most `places` connections are open;
      * a new one is refused only if no other address has as many as its own, and none of its own is
        idle; otherwise one of the address with most is closed for it;
      * one whose caller does not go on with its handshake is closed after a few seconds, and each
        one after `seconds`.

    An IPv6 network of 64 bits counts as one address: who has one address of it has all.
    """

    def __init__(self, places: int, seconds: float | None = None) -> None:
        """`seconds`: longest time of a connection; None for no limit."""
        self._places = places
        self._seconds = seconds
        self._callers: set[_Caller] = set()
        self._networks: dict[str, str] = {}
        """Addresses of open connections, by the names that gRPC has for them."""
        self._grpc: grpc.aio.Server | None = None
        self._servers: list[asyncio.Server] = []
        self._connecting: set[asyncio.Task[Any]] = set()
        self._target = ""
        """The socket on which gRPC listens."""
        self._opened = contextlib.ExitStack()
        self._ends = False

    async def start(
        self,
        services: Services,
        host: str,
        port: int,
        credentials: grpc.ServerCredentials,
        *,
        message_bytes: int,
        idle_seconds: float,
    ) -> int:
        """Listen; returns the port.

        Args:
            services: what gRPC serves.
            host: where to listen; a wildcard is for both IPv4 and IPv6, as in gRPC.
            port: 0 for any.
            credentials: of this server, for TLS between callers and gRPC.
            message_bytes: see `isthmus_server.transport.limits.server_options`.
            idle_seconds: likewise.

        Raises:
            UserError: the port is in use, the host is not an address of this machine, or there can
                be no socket in the temporary folder.
        """
        await self.open(
            services, credentials, message_bytes=message_bytes, idle_seconds=idle_seconds
        )
        try:
            return await self._listen(host, port)
        except BaseException:
            await self.stop()
            raise

    async def open(
        self,
        services: Services,
        credentials: grpc.ServerCredentials,
        *,
        message_bytes: int,
        idle_seconds: float,
    ) -> None:
        """Have gRPC serve callers whose connections come by `take`.

        The arguments are as in `start`.

        Raises:
            UserError: there can be no socket in the temporary folder.
        """
        # Twice as many: gRPC sees later than this process that a connection is closed.
        options = server_options(2 * self._places, message_bytes, idle_seconds)
        address = self._opened.enter_context(private_socket())
        self._target = address.removeprefix("unix:")
        try:
            self._grpc, _ = await listen(services, address, credentials, options, self._places)
        except BaseException:
            await self.stop()
            raise

    def take(self, connection: socket.socket, network: str) -> None:
        """Serve a connection that another port has accepted; it belongs to this one now.

        `network` is its caller's address.
        """
        if self._ends:
            connection.close()
            return
        loop = asyncio.get_running_loop()
        new = functools.partial(self._new_caller, network)
        task = loop.create_task(loop.connect_accepted_socket(new, connection))
        task.add_done_callback(lambda done: connection.close() if done.cancelled() else None)
        self._keep(task)

    def _new_caller(self, network: str = "") -> _Caller:
        return _Caller(self, self._target, asyncio.get_running_loop(), network)

    async def _listen(self, host: str, port: int) -> int:
        loop = asyncio.get_running_loop()
        sockets, port = await listening_sockets(host, port)
        for each in sockets:
            server = await loop.create_server(self._new_caller, sock=each, backlog=_AT_A_TIME)
            self._servers.append(server)
            each.listen(WAITING)
        return port

    async def stop(self) -> None:
        """Stop listening, and close all connections."""
        self._ends = True  # also for those that the event loop has accepted already
        for server in self._servers:
            server.close()
        for task in self._connecting:
            task.cancel()
        for caller in list(self._callers):
            caller.abort()
        if self._grpc is not None:
            await self._grpc.stop(grace=0.2)
        self._opened.close()

    def address_of(self, peer: str) -> str:
        """The address of a caller of gRPC, or the network of an IPv6 address.

        `peer` is gRPC's name for the connection; it is returned if that has just been closed.
        """
        return self._networks.get(peer, peer)

    def admit(self, caller: _Caller) -> bool:
        """Give a new connection a place; returns whether there is one."""
        if self._ends:
            return False
        if len(self._callers) >= self._places:
            leaving = least_needed(caller.network, self._callers)
            if leaving is None:
                return False
            leaving.abort()
        self._callers.add(caller)
        return True

    def name(self, caller: _Caller, peer: str) -> None:
        """Note gRPC's name for a connection."""
        self._networks[peer] = caller.network

    def forget(self, caller: _Caller, peer: str) -> None:
        """A connection is closed."""
        self._callers.discard(caller)
        self._networks.pop(peer, None)

    def spawn(self, caller: _Caller) -> None:
        """Connect a caller with gRPC, and close it when its time is over."""
        self._keep(asyncio.get_running_loop().create_task(caller.connect(self._seconds)))

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)


class _End(asyncio.Protocol):
    """One end of a connection that is passed on; what it receives is sent at the other end."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _End | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(_BUFFER_BYTES)

    def data_received(self, data: bytes) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()  # once it has sent what it was given


class _Caller(_End):
    """The end of a caller."""

    def __init__(
        self, port: FairPort, target: str, loop: asyncio.AbstractEventLoop, network: str
    ) -> None:
        """`network`: its address; empty for that of the connection."""
        super().__init__()
        self.network = network
        self._port = port
        self._target = target
        self._loop = loop
        self._peer = ""
        self._early = b""
        """What it has sent before gRPC had the connection."""
        self._moved = loop.time()
        """When the last bytes came, in either direction."""
        self._has_turn = True
        """The caller did not send the last of them."""
        self._was_answered = False
        self._answered = False
        """The caller has sent something after it was sent something."""
        self._timers: list[asyncio.TimerHandle] = []

    @property
    def dispensable(self) -> tuple[bool, float]:
        """How little the connection is needed: the less, the larger the value."""
        return self._has_turn, self._loop.time() - self._moved

    @property
    def is_idle(self) -> bool:
        """Whether nothing happens on the connection."""
        silent = self._loop.time() - self._moved
        return silent > (_IDLE_SECONDS if self._has_turn else _SILENT_SECONDS)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self.transport is not None
        peer = transport.get_extra_info("peername")
        if not self.network:
            self.network = network_of(peer[0]) if peer else ""
        if not self._port.admit(self):
            self.transport.abort()
            return
        self._port.spawn(self)

    async def connect(self, seconds: float | None) -> None:
        """Pass the connection on to gRPC, for at most that time."""
        assert self.transport is not None
        if self.transport.is_closing():  # another one has its place already
            return
        self._timers = [self._loop.call_later(_ANSWER_SECONDS, self._expect_answer)]
        if seconds is not None:
            self._timers.append(self._loop.call_later(seconds, self.abort))
        try:
            inner = socket.socket(socket.AF_UNIX)
        except OSError:  # there are too many open files
            self.abort()
            return
        try:
            inner.setblocking(False)
            inner.bind("")  # the kernel chooses a name, by which gRPC knows its caller
            self._peer = f"unix-abstract:{inner.getsockname()[1:].decode()}"
            self._port.name(self, self._peer)
            await self._loop.sock_connect(inner, self._target)
            await self._loop.create_unix_connection(lambda: _Inner(self), sock=inner)
        except BaseException as error:
            inner.close()
            self.abort()
            if isinstance(error, OSError):  # gRPC has ended, or there are too many open files
                return
            raise
        if not self.transport.is_closing():
            # Resumed before, so that a full buffer of the other end can pause it again.
            self.transport.resume_reading()
            super().data_received(self._early)
            self._early = b""

    def data_received(self, data: bytes) -> None:
        self._moved = self._loop.time()
        self._has_turn = False
        self._answered = self._was_answered
        if self.other is None:
            # Not paused earlier: Python 3.11.2 reads on after a pause in `connection_made`.
            assert self.transport is not None
            self._early = data
            self.transport.pause_reading()
            return
        super().data_received(data)

    def answered(self) -> None:
        """The caller is sent something."""
        self._moved = self._loop.time()
        self._has_turn = self._was_answered = True

    def abort(self) -> None:
        """Close the connection at once."""
        if self.transport is not None:
            self.transport.abort()
        self._leave()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        super().connection_lost(exc)

    def _expect_answer(self) -> None:
        if not self._answered:
            self.abort()

    def _leave(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._port.forget(self, self._peer)


class _Inner(_End):
    """The end of gRPC."""

    def __init__(self, caller: _Caller) -> None:
        super().__init__()
        self._caller = caller

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.other = self._caller
        self._caller.other = self
        if self._caller.transport is None or self._caller.transport.is_closing():
            transport.close()

    def data_received(self, data: bytes) -> None:
        self._caller.answered()
        super().data_received(data)
