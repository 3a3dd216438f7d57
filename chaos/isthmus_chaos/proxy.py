"""A TCP proxy between two parts of a deployment, whose connections can be disturbed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable

_CHUNK = 1 << 16


class DisturbedLink:
    """Forwards connections of one participant; by default without any disturbance."""

    def __init__(self, server_port: int | Callable[[], int | None]) -> None:
        """Connect to the server at a loopback port, or at one that is found for each connection."""
        self._server_port = server_port
        self._server: asyncio.Server | None = None
        self._ends: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._passing = asyncio.Event()
        self._passing.set()
        self._refusing = False
        self._delay = 0.0
        self.port = 0

    @property
    def connected(self) -> bool:
        """Whether the participant has a connection to the server."""
        return bool(self._ends)

    async def listen(self) -> None:
        """Listen at a free loopback port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Close every connection, and stop."""
        if self._server is not None:
            self._server.close()
        self.reset()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def reset(self) -> None:
        """Reset the open connections, in both directions (TCP RST)."""
        for end in self._ends:
            handle = end.get_extra_info("socket")
            if handle is not None and handle.fileno() >= 0:
                linger = struct.pack("ii", 1, 0)
                handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            end.transport.abort()
        self._ends.clear()

    def cut(self) -> None:
        """Reset the open connections, and refuse others until `restore`."""
        self._refusing = True
        self.reset()

    def hold(self) -> None:
        """Forward nothing until `restore`; both ends see open connections."""
        self._passing.clear()

    def delay(self, seconds: float) -> None:
        """Forward every chunk later by this time."""
        self._delay = seconds

    def restore(self) -> None:
        """End every disturbance; connections that were held are reset."""
        held = not self._passing.is_set()
        self._refusing = False
        self._delay = 0.0
        if held:
            self.reset()
        self._passing.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        port = self._server_port if isinstance(self._server_port, int) else self._server_port()
        try:
            if port is None:
                raise ConnectionRefusedError("no server listens")
            server, to_server = await asyncio.open_connection("127.0.0.1", port)
        except OSError:  # the server is down
            writer.transport.abort()
            return
        self._ends |= {writer, to_server}
        for source, sink in ((reader, to_server), (server, writer)):
            pump = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(_CHUNK):
                await self._passing.wait()
                if self._delay:
                    await asyncio.sleep(self._delay)
                sink.write(data)
                await sink.drain()
        self._ends.discard(sink)
        sink.transport.abort()
