"""The server's memory in rounds with 32 clients of a model with 5M float32 parameters.

The server is the real one, a process of its own (`isthmus run` with no devices on this machine,
waiting for participants that dial in). The 32 clients are 32 real ends of the link in the
benchmark's process; they compute nothing, receive the model and send an update of full size.

  * Idle is what is resident when everybody has joined and the run is open: the model is loaded and
    published, and the last client holds its answer back, so that no round can have begun.
  * The peak is the kernel's own (VmHWM, reset at idle), read when the server closes the run, so
    that it covers sending, receiving, aggregation, server optimizer, evaluation, checkpoint and
    commit.

Figure: `peak_over_model`, what the peak is above idle, over the model's size.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path

import torch
from harness import figures
from harness.processes import Program, free_port, memory, reset_peak, started, wait_for_port

from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import Buffer, describe
from isthmus.transport.uplink import Uplink
from isthmus.transport.worker import ReportProgress
from isthmus.wire import link_pb2

HARNESS = Path(__file__).parent / "harness"
CLIENTS = 32
PARAMETERS = 5_000_000


class Fleet:
    """What the clients share: one buffer, one update, and the moments they wait for each other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.opened = 0
        self.open = asyncio.Event()
        """The server has asked all of them to open the run."""
        self.may_begin = asyncio.Event()
        self.closed = asyncio.Event()
        """The server has asked one of them to close it."""
        self.may_end = asyncio.Event()
        self.received = 0
        """Models that arrived whole."""
        self._received_into: bytearray | None = None
        self._update: tuple[bytearray, link_pb2.Blob] | None = None

    def prepare(self, header: bytes) -> None:
        """Make the update that everybody sends."""
        if self._update is None:
            layout = TensorLayout.from_header(header)
            payload = layout.encode(torch.randn(layout.size) / 1000)
            self._update = payload, describe(payload)

    @property
    def update(self) -> tuple[bytearray, link_pb2.Blob]:
        """The update and its name."""
        assert self._update is not None, "the server asked for training before it opened the run"
        return self._update

    def buffer(self, size: int) -> Buffer:
        """Memory for the model: they all receive the same bytes."""
        if self._received_into is None or len(self._received_into) != size:
            self._received_into = bytearray(size)
        return self._received_into


class Device:
    """A client that computes nothing: `isthmus.transport.worker.Worker`."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet

    def buffer(self, request: link_pb2.Request, size: int) -> Buffer:
        return self.fleet.buffer(size)

    async def work(
        self, request: link_pb2.Request, model: Buffer | None, progress: ReportProgress
    ) -> tuple[link_pb2.Reply, Buffer | None]:
        fleet, kind = self.fleet, request.WhichOneof("work")
        if kind == "open":
            fleet.prepare(request.open.layout)
            fleet.opened += 1
            if fleet.opened == fleet.size:
                fleet.open.set()
                await fleet.may_begin.wait()
            return link_pb2.Reply(opened=link_pb2.Opened(examples=1)), None
        if kind == "train_local":
            fleet.received += model is not None
            payload, name = fleet.update
            return link_pb2.Reply(trained=link_pb2.Trained(result=name, examples=1)), payload
        if kind == "close":
            fleet.closed.set()
            await fleet.may_end.wait()
            return link_pb2.Reply(closed=link_pb2.Closed()), None
        return link_pb2.Reply(failure=link_pb2.Failure(reason=f"no {kind} here")), None

    def acknowledged(self, request: link_pb2.Request, accepted: bool, reason: str) -> None:
        if not accepted:
            print(f"an update was refused: {reason}", file=sys.stderr)

    def cancel(self, request: link_pb2.Request, reason: str) -> None:
        pass


def main() -> None:
    """Measure, print, write."""
    asked = figures.options(__doc__ or "")
    rounds = 2 if asked.quick else 5
    with tempfile.TemporaryDirectory(prefix="server-memory-") as scratch:
        idle, peak = asyncio.run(measure(Path(scratch), rounds))
    model = 4 * PARAMETERS
    over = (peak - idle) / model
    header = ("the server's memory", "MB", "of the model")
    sizes = (("model", model), ("idle", idle), ("peak", peak), ("peak above idle", peak - idle))
    rows = [(what, f"{size / 1e6:.1f}", figures.times(size / model)) for what, size in sizes]
    print(f"{CLIENTS} clients, {PARAMETERS / 1e6:g}M parameters, {rounds} rounds")
    print(figures.table(header, rows))
    figures.write(asked.json, "server_memory", figures.machine(), {"peak_over_model": over})


async def measure(scratch: Path, rounds: int) -> tuple[int, int]:
    """Resident bytes of the server at idle, and at their highest in the rounds after."""
    port = free_port()
    settings = {
        "rounds": rounds,
        "task.settings.parameters": PARAMETERS,
        "federated.clients": 0,
        "federated.cohort": CLIENTS,
        "federated.quorum": CLIENTS,
    }
    command = [
        str(Path(sys.executable).parent / "isthmus"),
        "run",
        str(HARNESS / "null_job.toml"),
    ]
    command += ["--run-dir", str(scratch / "run"), "--address", f"127.0.0.1:{port}"]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    with started(command, scratch / "server.log") as server:
        await asyncio.to_thread(wait_for_port, port, server, 60.0)
        fleet = Fleet(CLIENTS)
        links = [
            asyncio.create_task(
                Uplink(f"127.0.0.1:{port}", f"client-{i:02}", link_pb2.CLIENT, Device(fleet)).run()
            )
            for i in range(CLIENTS)
        ]
        try:
            await _reach(fleet.open, "everybody has joined", server, links)
            idle = await _settled(server.popen.pid)
            reset_peak(server.popen.pid)
            fleet.may_begin.set()
            await _reach(fleet.closed, "the rounds are over", server, links)
            peak = memory(server.popen.pid, "VmHWM")
            fleet.may_end.set()
            await asyncio.to_thread(server.wait, 60.0)
        finally:
            for link in links:
                link.cancel()
            await asyncio.gather(*links, return_exceptions=True)
    if fleet.received != CLIENTS * rounds:
        raise server.failure(f"sent {fleet.received} models, not {CLIENTS} a round")
    return idle, peak


async def _settled(pid: int) -> int:
    """Resident bytes, once they have not grown for a second: start-up is over."""
    highest, since = 0, time.monotonic()
    until = since + 20.0
    while time.monotonic() < min(since + 1.0, until):
        now = memory(pid, "VmRSS")
        if now > highest:
            highest, since = now, time.monotonic()
        await asyncio.sleep(0.05)
    return memory(pid, "VmRSS")


async def _reach(
    event: asyncio.Event, what: str, server: Program, links: list[asyncio.Task[None]]
) -> None:
    """Wait for an event, or fail when the server or a link ends first."""
    until = time.monotonic() + 300.0
    while not event.is_set():
        for link in links:
            if link.done():
                link.result()
        if server.popen.poll() is not None or time.monotonic() > until:
            raise server.failure(f"was waited for in vain: {what}")
        await asyncio.sleep(0.02)


if __name__ == "__main__":
    main()
