"""A connection within a WebSocket: what comes from a socket of this machine is sent in messages.

Both ends are alike: that of a participant, which opened the WebSocket through a balancer, and that
of the server, which accepted it. Where a message begins and ends means nothing, and nothing is read
of what is passed on, which is TLS between the participant and the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from typing import cast

from websockets.exceptions import WebSocketException
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import CLIENT, OPEN, Protocol

from isthmus.printable import in_a_line

LARGEST_FRAME = 256 << 10
"""Bytes of the largest frame that is read."""

PING_SECONDS = 20.0
"""Time between two pings of the participant's end: balancers end quiet connections, nginx after a
minute."""
SILENT_SECONDS = 3 * PING_SECONDS + 10.0
"""A connection on which nothing has come for this time is closed."""

_PART = 64 << 10
"""Bytes that are sent in a message."""
_MOST_WAITING = 2 << 20
"""Bytes that may wait for a receiver of pongs who does not take them."""
_LAST_SECONDS = 5.0
"""Time for the last bytes of a connection that has ended."""

log = logging.getLogger(__name__)

SLICE = 16 << 10
"""Bytes of a WebSocket that are read before its frames are counted."""
_FIRST_FRAMES = 64.0
_MOST_FRAMES = 1024.0
"""Frames that may come at once: in the beginning, and at most."""
_FRAMES_PER_SECOND = 50.0
_BYTES_PER_FRAME = 128
"""A connection may have a further frame for so many bytes that pass, in either direction."""

Ended = Callable[[str], None]
"""Is told what the balancer did that ended it, or nothing if the near or the other's end ended."""


class FrameAllowance:
    """How many more frames may come on a connection.

    A frame costs the reader several microseconds however small it is. One who sends nothing but
    empty ones, six bytes each, would keep an event loop busy with less than a megabyte a second.
    """

    def __init__(self) -> None:
        self._left = _FIRST_FRAMES
        self._at = time.monotonic()

    def earn(self, count: int) -> None:
        """So many bytes have passed."""
        self._left += count / _BYTES_PER_FRAME

    def spend(self, frames: int) -> bool:
        """Count frames that have come; returns whether they were not too many."""
        now = time.monotonic()
        self._left += _FRAMES_PER_SECOND * (now - self._at)
        self._left = min(self._left, _MOST_FRAMES) - frames
        self._at = now
        return self._left >= 0


class Tunnel:
    """Passes bytes on between a WebSocket and a socket of this machine.

    Guarantees:
      * of each direction at most a few parts wait in this process: nothing is read for a receiver
        that does not take what it has been sent, and no frame is larger than `LARGEST_FRAME`;
      * one that sends many small frames and little in them is closed (`FrameAllowance`);
      * a quiet connection is kept open by pings, and a silent one is closed;
      * the end of one side is the end of the other, once that was sent what came before.
    """

    def __init__(
        self,
        protocol: Protocol,
        outer: asyncio.Transport,
        ended: Ended = lambda why: None,
        *,
        early: bytes = b"",
        allowance: FrameAllowance | None = None,
        kept: object = None,
    ) -> None:
        """Take over the connection of an opened WebSocket; `start` passes on what comes.

        Args:
            protocol: of the WebSocket, whose state is open.
            outer: its connection.
            ended: see `Ended`; called once.
            early: what the WebSocket has brought already.
            allowance: that of the frames it came in.
            kept: what has to live as long as the connection.
        """
        self._kept = kept
        self._protocol = protocol
        self._outer = outer
        self._inner: asyncio.Transport | None = None
        self._ended = ended
        self._is_open = True
        self._loop = asyncio.get_running_loop()
        self._received = self._loop.time()
        """When something came last."""
        self._is_paused = False
        """Whether nothing is read of the WebSocket."""
        self._allowance = allowance or FrameAllowance()
        self._fault = ""
        """What is wrong with what has come."""
        self._early = bytearray(early)
        """What came before there was a socket."""
        self._timers: list[asyncio.TimerHandle] = []
        self._lost: set[asyncio.Transport] = set()
        """Connections that are closed."""
        outer.set_protocol(_Outer(self))
        self.pause_outer()

    async def start(self, near: socket.socket) -> None:
        """Begin to pass on; the socket belongs to the tunnel."""
        try:
            near.setblocking(False)
            await self._loop.connect_accepted_socket(lambda: _NearEnd(self), near)
        except BaseException:
            near.close()
            self._close(CloseCode.INTERNAL_ERROR)
            raise
        self._watch()

    # -- what the transports tell -----------------------------------------------------------------

    def inner_opened(self, transport: asyncio.Transport) -> None:
        """The socket is there."""
        self._inner = transport
        if not self._is_open:
            transport.abort()
            return
        self.resume_outer()
        if self._early:
            transport.write(self._early)
            self._early = bytearray()

    def outer_received(self, data: bytes) -> None:
        """Bytes of the WebSocket have come."""
        self._received = self._loop.time()
        if not self._is_open:
            return
        for begin in range(0, len(data), SLICE):
            if not self._is_open:
                return
            self._protocol.receive_data(data[begin : begin + SLICE])
            self.take_events()

    def take_events(self) -> None:
        """Pass on what the protocol has read."""
        events = self._protocol.events_received()
        if not events and self._protocol.state is OPEN:
            return  # there is a part of a frame
        for event in events:
            if not isinstance(event, Frame):
                continue
            if event.opcode in (Opcode.BINARY, Opcode.CONT):
                self._allowance.earn(len(event.data))
                if self._inner is None:
                    self._early += event.data
                else:
                    self._inner.write(event.data)
            elif event.opcode is Opcode.TEXT:
                self._fail(CloseCode.UNSUPPORTED_DATA, "sends text, which is none of a server's")
        if not self._allowance.spend(len(events)):
            self._fail(CloseCode.POLICY_VIOLATION, "sends many frames and little in them")
        self._send()
        if self._protocol.state is not OPEN:
            self._finish(self._reason())
        elif self._outer.get_write_buffer_size() > _MOST_WAITING:
            self._outer.abort()

    def inner_received(self, data: bytes) -> None:
        """Bytes of the socket have come."""
        if not self._is_open:
            return
        view = memoryview(data)
        for begin in range(0, len(data), _PART):
            self._protocol.send_binary(view[begin : begin + _PART])
        self._allowance.earn(len(data))
        self._send()

    def inner_lost(self) -> None:
        """The socket was closed."""
        if self._inner is not None:
            self._lost.add(self._inner)
        self._close(CloseCode.NORMAL_CLOSURE)

    def outer_lost(self) -> None:
        """The WebSocket's connection is closed."""
        self._lost.add(self._outer)
        self._finish("ended the connection without a goodbye")

    def pause_outer(self) -> None:
        """Read nothing of the WebSocket until `resume_outer`."""
        self._is_paused = True
        with contextlib.suppress(RuntimeError):  # it closes
            self._outer.pause_reading()

    def resume_outer(self) -> None:
        """Read the WebSocket again."""
        self._is_paused = False
        self._received = self._loop.time()
        with contextlib.suppress(RuntimeError):
            self._outer.resume_reading()

    def pause_inner(self) -> None:
        """Read nothing of the socket until `resume_inner`."""
        if self._inner is not None:
            self._inner.pause_reading()

    def resume_inner(self) -> None:
        """Read the socket again."""
        if self._inner is not None:
            self._inner.resume_reading()

    # -- ends --------------------------------------------------------------------------------------

    def _fail(self, code: CloseCode, why: str) -> None:
        """End the WebSocket for what has come on it."""
        self._fault = self._fault or why
        self._protocol.fail(code)

    def _reason(self) -> str:
        """How the other end, or something between, has ended the WebSocket; empty if as usual."""
        if self._fault:
            return self._fault
        close = self._protocol.close_rcvd
        if close is None:
            error = self._protocol.parser_exc
            return f"sends what is no WebSocket ({in_a_line(str(error))})" if error else ""
        if close.code == CloseCode.NORMAL_CLOSURE:
            return ""
        return f"closed the WebSocket ({close.code})"

    def _close(self, code: CloseCode) -> None:
        """Say goodbye, and end both sides."""
        if self._is_open and self._protocol.state is OPEN:
            with contextlib.suppress(WebSocketException):
                self._protocol.send_close(code)
            self._send()
        self._finish("")

    def abort(self) -> None:
        """End both sides at once."""
        self._finish("")
        for transport in (self._outer, self._inner):
            if transport is not None:
                self._abort(transport)

    def _abort(self, transport: asyncio.Transport) -> None:
        # asyncio fails for one that was closed with something left to send, and has sent it.
        if transport not in self._lost:
            transport.abort()

    def _finish(self, why: str) -> None:
        if not self._is_open:
            return
        self._is_open = False
        for timer in self._timers:
            timer.cancel()
        self._ended(why)
        for transport in (self._outer, self._inner):
            if transport is not None and not transport.is_closing():
                transport.close()  # once it has sent what it was given
                # One whose receiver takes nothing would stay.
                self._loop.call_later(_LAST_SECONDS, self._abort, transport)

    def _send(self) -> None:
        parts = [part for part in self._protocol.data_to_send() if part]
        if parts and not self._outer.is_closing():
            self._outer.writelines(parts)

    # -- silence -----------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Ping from time to time, and close what is silent."""
        if not self._is_open:
            return
        silent = self._loop.time() - self._received
        if silent > SILENT_SECONDS and not self._is_paused:
            self._finish(f"has passed nothing on for {SILENT_SECONDS:.0f} s")
            self._outer.abort()
            return
        if self._protocol.side is CLIENT and not self._outer.get_write_buffer_size():
            self._protocol.send_ping(b"")
            self._send()
        self._timers = [self._loop.call_later(PING_SECONDS, self._watch)]


class _Outer(asyncio.Protocol):
    """The connection of the WebSocket."""

    def __init__(self, tunnel: Tunnel) -> None:
        self._tunnel = tunnel

    def data_received(self, data: bytes) -> None:
        self._tunnel.outer_received(data)

    def pause_writing(self) -> None:
        self._tunnel.pause_inner()

    def resume_writing(self) -> None:
        self._tunnel.resume_inner()

    def connection_lost(self, exc: Exception | None) -> None:
        self._tunnel.outer_lost()


class _NearEnd(asyncio.Protocol):
    """The socket of this machine."""

    def __init__(self, tunnel: Tunnel) -> None:
        self._tunnel = tunnel

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._tunnel.inner_opened(cast(asyncio.Transport, transport))

    def data_received(self, data: bytes) -> None:
        self._tunnel.inner_received(data)

    def pause_writing(self) -> None:
        self._tunnel.pause_outer()

    def resume_writing(self) -> None:
        self._tunnel.resume_outer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._tunnel.inner_lost()
