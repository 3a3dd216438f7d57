"""One device whose connection is cut at chunk boundaries, in both directions.

The connection passes through a TCP proxy in this process. The proxy resets both ends after the
device received a chunk of the model and after it sent a chunk of its update, once per boundary.
Device and server react as in a real failure: the device reconnects after a pause and the transfer
continues.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from device_fleet.devices import DeviceGroup, IdleDevice, UpdateSendingUplink, value
from device_fleet.server import BenchmarkServer, report
from harness.processes import Program
from safetensors.numpy import load_file

from isthmus.identity.membership import Membership
from isthmus.transport.blobs import BROADCAST_BYTES, SMALL_BYTES, Buffer, chunk_size
from isthmus.transport.requests import send_result
from isthmus.transport.stream import Stream
from isthmus.wire import link_pb2


class CuttableProxy:
    """A TCP proxy between devices and a server that counts bytes and can cut all connections."""

    def __init__(self, port: int) -> None:
        """Connect to the server at this loopback port."""
        self._server_port = port
        self._open: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.cuts = 0
        self.down = 0
        """Bytes from the server, including TLS."""
        self.up = 0

    async def listen(self) -> int:
        """Start listening and return the port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def cut(self) -> None:
        """Reset every connection without notice to either end."""
        self.cuts += 1
        self._abort()

    def close(self) -> None:
        """Stop the proxy."""
        self._abort()
        for pump in self._pumps:
            pump.cancel()
        if self._server is not None:
            self._server.close()

    def _abort(self) -> None:
        for end in self._open:
            end.transport.abort()

    async def _accept(self, device: asyncio.StreamReader, to_device: asyncio.StreamWriter) -> None:
        server, to_server = await asyncio.open_connection("127.0.0.1", self._server_port)
        self._open |= {to_device, to_server}
        for pump in (self._pass(device, to_server, "up"), self._pass(server, to_device, "down")):
            task = asyncio.create_task(pump)
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)

    async def _pass(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, direction: str
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                setattr(self, direction, getattr(self, direction) + len(data))
                sink.write(data)
                await sink.drain()
        sink.transport.abort()
        self._open.discard(sink)


class InterruptedUplink(UpdateSendingUplink):
    """An uplink that has its connection cut once at each of the given offsets."""

    proxy: CuttableProxy
    cut_offsets: dict[str, set[int]]
    """Offsets in the blob, by direction, at which to cut the connection."""

    def _chunk(self, stream: Stream, chunk: link_pb2.Chunk) -> None:
        super()._chunk(stream, chunk)
        self._transferred("down", chunk.offset + len(chunk.data))

    async def _send_update(self, stream: Stream, pull: link_pb2.Pull) -> None:
        reporting = _OffsetReportingStream(stream, pull.offset, self._transferred)
        # It has the only method that is used.
        await send_result(reporting, self._jobs, pull, self._machine, self.sent)  # type: ignore[arg-type]

    def _transferred(self, direction: str, offset: int) -> None:
        if offset in self.cut_offsets[direction]:
            self.cut_offsets[direction].discard(offset)
            self.proxy.cut()


class _OffsetReportingStream:
    """A stream that reports the offset in the blob after each chunk."""

    def __init__(self, stream: Stream, offset: int, report: Any) -> None:
        self._stream, self._offset, self._report = stream, offset, report

    async def send(self, message: bytes | link_pb2.Envelope) -> None:
        await self._stream.send(message)
        if isinstance(message, bytes):
            self._offset += len(link_pb2.Envelope.FromString(message).chunk.data)
            self._report("up", self._offset)


async def resume(
    benchmark_server: BenchmarkServer, server: Program, member: Path, parameters: int, every: int
) -> tuple[CuttableProxy, int]:
    """Run a round of one device whose connection is cut at every `every`-th chunk boundary.

    Returns:
        The proxy, and the size of the blob transferred in each direction.

    Raises:
        RuntimeError: the resulting model differs from the one without cuts.
    """
    proxy = CuttableProxy(benchmark_server.port)
    port = await proxy.listen()
    group = DeviceGroup()
    index = 6
    membership = Membership(member)
    link = InterruptedUplink(
        f"127.0.0.1:{port}",
        membership.name,
        link_pb2.CLIENT,
        _CutPlanner(group, value(index), every),
        membership=membership,
        longest_pause=0.1,  # bytes are measured, not seconds
    )
    link.proxy, link.cut_offsets = proxy, {"down": set(), "up": set()}
    link.worker.link = link  # type: ignore[attr-defined]  # only `_CutPlanner` has one
    running = asyncio.create_task(link.run())
    try:
        run = await asyncio.to_thread(benchmark_server.submit, 1, parameters, 1)
        while not await asyncio.to_thread(benchmark_server.job_finished):
            if running.done():
                running.result()
            if server.popen.poll() is not None:
                raise server.failure("ended")
            await asyncio.sleep(0.05)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        proxy.close()
    if any(link.cut_offsets.values()):
        raise RuntimeError(f"the connection was not cut at these offsets: {link.cut_offsets}")
    (vector,) = load_file(report(run)["final"]["model_path"]).values()
    if not bool((vector == -value(index)).all()):
        raise RuntimeError("the update was corrupted by the cuts")
    return proxy, 4 * parameters


class _CutPlanner(IdleDevice):
    """A device that chooses the offsets for the cuts when it learns the size of the model."""

    link: InterruptedUplink

    def __init__(self, group: DeviceGroup, value: float, every: int) -> None:
        super().__init__(group, value)
        self.every = every

    def buffer(self, request: link_pb2.Request, size: int) -> Buffer:
        up = chunk_size(size)
        down = max(up, BROADCAST_BYTES) if size <= SMALL_BYTES else up
        for direction, chunk in (("down", down), ("up", up)):
            step = self.every * chunk
            self.link.cut_offsets[direction] = set(range(step, size, step))
        return super().buffer(request, size)
