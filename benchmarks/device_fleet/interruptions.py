"""One device behind a wire that is cut at the borders of chunks, in both directions.

The wire is a TCP proxy in this process. It is cut (both ends reset) when a device has taken a chunk
of the model, and when it has handed on a chunk of its update, once at every border; the device and
the server do what they do in a real break: dial again, after a pause, and go on.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from device_fleet.devices import Crowd, Device, value
from device_fleet.server import Place, report
from harness.processes import Program
from safetensors.numpy import load_file

from isthmus.identity.membership import Membership
from isthmus.transport.blobs import Buffer, chunk_size
from isthmus.transport.stream import Stream
from isthmus.transport.uplink import Uplink
from isthmus.wire import link_pb2


class Wire:
    """Between devices and a server: what passes is counted, and it can be cut."""

    def __init__(self, port: int) -> None:
        """`port`: the server's, on loopback."""
        self._to = port
        self._open: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.cuts = 0
        self.down = 0
        """Bytes from the server, TLS and all."""
        self.up = 0

    async def listen(self) -> int:
        """Returns the port to dial."""
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def cut(self) -> None:
        """Break every connection, without a word to either end."""
        self.cuts += 1
        self._abort()

    def close(self) -> None:
        """Stop."""
        self._abort()
        for pump in self._pumps:
            pump.cancel()
        if self._server is not None:
            self._server.close()

    def _abort(self) -> None:
        for end in self._open:
            end.transport.abort()

    async def _join(self, device: asyncio.StreamReader, to_device: asyncio.StreamWriter) -> None:
        server, to_server = await asyncio.open_connection("127.0.0.1", self._to)
        self._open |= {to_device, to_server}
        for pump in (self._pass(device, to_server, "up"), self._pass(server, to_device, "down")):
            task = asyncio.create_task(pump)
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)

    async def _pass(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, way: str
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                setattr(self, way, getattr(self, way) + len(data))
                sink.write(data)
                await sink.drain()
        sink.transport.abort()
        self._open.discard(sink)


class Severed(Uplink):
    """An uplink that has its wire cut, once at each of some borders of chunks."""

    wire: Wire
    left: dict[str, set[int]]
    """Where it is still to be cut, in bytes of the content, by direction."""

    def _chunk(self, stream: Stream, chunk: link_pb2.Chunk) -> None:
        super()._chunk(stream, chunk)
        self._at("down", chunk.offset + len(chunk.data))

    async def _pump(self, stream: Stream, pull: link_pb2.Pull) -> None:
        await super()._pump(_Counted(stream, pull.offset, self._at), pull)  # type: ignore[arg-type]  # it has what `_pump` uses of a stream

    def _at(self, way: str, offset: int) -> None:
        if offset in self.left[way]:
            self.left[way].discard(offset)
            self.wire.cut()


class _Counted:
    """A stream that says where in a content it is."""

    def __init__(self, stream: Stream, offset: int, at: Any) -> None:
        self._stream, self._offset, self._at = stream, offset, at

    async def send(self, message: bytes | link_pb2.Envelope) -> None:
        await self._stream.send(message)
        if isinstance(message, bytes):
            self._offset += len(link_pb2.Envelope.FromString(message).chunk.data)
            self._at("up", self._offset)


async def resume(
    place: Place, server: Program, member: Path, parameters: int, every: int
) -> tuple[Wire, int]:
    """A round of one device whose wire is cut at every so many borders.

    Returns:
        The wire, and the size of what went over it each way.

    Raises:
        RuntimeError: the model that came of it is not the one without cuts.
    """
    wire = Wire(place.port)
    port = await wire.listen()
    crowd = Crowd()
    index = 6
    membership = Membership(member)
    link = Severed(
        f"127.0.0.1:{port}",
        membership.name,
        link_pb2.CLIENT,
        _Sized(crowd, value(index), every),
        membership=membership,
        longest_pause=0.1,  # no link holds here for long; bytes are counted, not seconds
    )
    link.wire, link.left = wire, {"down": set(), "up": set()}
    link.worker.link = link  # type: ignore[attr-defined]  # `_Sized` has one, workers in general do not
    running = asyncio.create_task(link.run())
    try:
        run = await asyncio.to_thread(place.submit, 1, parameters, 1)
        while not await asyncio.to_thread(place.ended):
            if running.done():
                running.result()
            if server.popen.poll() is not None:
                raise server.failure("ended")
            await asyncio.sleep(0.05)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        wire.close()
    if any(link.left.values()):
        raise RuntimeError(f"the wire was not cut where it should have been: {link.left}")
    (vector,) = load_file(report(run)["final"]["model_path"]).values()
    if not bool((vector == -value(index)).all()):
        raise RuntimeError("the update did not come whole through the cuts")
    return wire, 4 * parameters


class _Sized(Device):
    """A device that knows where its wire is to be cut when it hears how large the model is."""

    link: Severed

    def __init__(self, crowd: Crowd, value: float, every: int) -> None:
        super().__init__(crowd, value)
        self.every = every

    def buffer(self, request: link_pb2.Request, size: int) -> Buffer:
        step = self.every * chunk_size(size)
        for way in ("down", "up"):
            self.link.left[way] = set(range(step, size, step))
        return super().buffer(request, size)
