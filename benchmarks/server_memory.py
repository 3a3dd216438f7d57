"""Memory of the server in rounds with 32 clients and a model of 5M float32 parameters.

The server is a separate `isthmus run` process that waits for clients to connect. The 32 clients
are real protocol clients in the benchmark's process; they compute nothing, receive the model and
send an update of full size.

  * Idle memory: resident bytes when all clients have joined and the run is open. The model is
    loaded and published, and the last client delays its reply, so that no round has begun.
  * Peak memory: the kernel's VmHWM, reset at idle and read when the server closes the run. It
    covers sending, receiving, aggregation, server optimizer, evaluation, checkpoint and commit.

Figures: `peak_over_model`, the peak minus the idle memory, over the size of the model.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from harness import command_line, figures
from harness.figures import Target
from harness.processes import (
    ISTHMUS,
    Program,
    free_port,
    memory,
    reset_peak,
    started,
    wait_for_port,
)

from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import Buffer, describe
from isthmus.transport.uplink import Uplink
from isthmus.transport.worker import ReportProgress
from isthmus.wire import link_pb2

HARNESS = Path(__file__).parent / "harness"
CLIENTS = 32
PARAMETERS = 5_000_000
LIMIT_SECONDS = 300.0
"""For each step; a busy machine is slow."""
TARGETS = {"peak_over_model": Target(at_most=4)}


class ClientGroup:
    """State that the clients share: one buffer, one update, and the events they wait for."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.opened = 0
        self.all_opened = asyncio.Event()
        """All clients have received the request to open the run."""
        self.may_begin = asyncio.Event()
        self.closed = asyncio.Event()
        """A client has received the request to close the run."""
        self.may_end = asyncio.Event()
        self.received = 0
        """Models received completely."""
        self._model_buffer: bytearray | None = None
        self._update: tuple[bytearray, link_pb2.Blob] | None = None

    def prepare(self, header: bytes) -> None:
        """Create the update that every client sends."""
        if self._update is None:
            layout = TensorLayout.from_header(header)
            payload = layout.encode(torch.randn(layout.size) / 1000)
            self._update = payload, describe(payload)

    @property
    def update(self) -> tuple[bytearray, link_pb2.Blob]:
        """The encoded update and its blob."""
        assert self._update is not None, "the server asked for training before it opened the run"
        return self._update

    def buffer(self, size: int) -> Buffer:
        """A shared buffer for the model, of which all clients receive the same bytes."""
        if self._model_buffer is None or len(self._model_buffer) != size:
            self._model_buffer = bytearray(size)
        return self._model_buffer


class IdleDevice:
    """A worker that computes nothing; implements `isthmus.transport.worker.Worker`."""

    def __init__(self, group: ClientGroup) -> None:
        self.group = group

    def buffer(self, request: link_pb2.Request, size: int) -> Buffer:
        return self.group.buffer(size)

    async def work(
        self, request: link_pb2.Request, model: Buffer | None, progress: ReportProgress
    ) -> tuple[link_pb2.Reply, Buffer | None]:
        group, kind = self.group, request.WhichOneof("work")
        if kind == "prepare":  # to have the files that a model starts from
            return link_pb2.Reply(prepared=link_pb2.Prepared()), None
        if kind == "open":
            group.prepare(request.open.layout)
            group.opened += 1
            if group.opened == group.size:
                group.all_opened.set()
                await group.may_begin.wait()
            return link_pb2.Reply(opened=link_pb2.Opened(examples=1)), None
        if kind == "train_local":
            group.received += model is not None
            payload, name = group.update
            return link_pb2.Reply(trained=link_pb2.Trained(result=name, examples=1)), payload
        if kind == "close":
            group.closed.set()
            await group.may_end.wait()
            return link_pb2.Reply(closed=link_pb2.Closed()), None
        return link_pb2.Reply(failure=link_pb2.Failure(reason=f"no {kind} here")), None

    def acknowledged(self, request: link_pb2.Request, accepted: bool, reason: str) -> None:
        if not accepted:
            print(f"an update was refused: {reason}", file=sys.stderr)

    def cancel(self, request: link_pb2.Request, reason: str) -> None:
        pass


@command_line.script
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = command_line.options(__doc__ or "", argv)
    clients, parameters, rounds = command_line.of_size(
        options,
        full=(CLIENTS, PARAMETERS, 5),
        quick=(CLIENTS, PARAMETERS, 2),
        smoke=(2, 1000, 1),
    )
    with tempfile.TemporaryDirectory(prefix="server-memory-") as scratch:
        idle, peak = asyncio.run(measure(Path(scratch), clients, parameters, rounds))
    model = 4 * parameters
    over = (peak - idle) / model
    header = ("the server's memory", "MB", "of the model")
    sizes = (("model", model), ("idle", idle), ("peak", peak), ("peak above idle", peak - idle))
    rows = [(what, f"{size / 1e6:.1f}", figures.times(size / model)) for what, size in sizes]
    print(f"{clients} clients, {parameters / 1e6:g}M parameters, {rounds} rounds")
    print(figures.table(header, rows))
    results = {"peak_over_model": over}
    figures.write(options.json, "server_memory", figures.machine(), results, TARGETS)
    return 0


async def measure(scratch: Path, clients: int, parameters: int, rounds: int) -> tuple[int, int]:
    """Resident bytes of the server when idle, and at the peak of the following rounds."""
    settings = {"task.settings.parameters": parameters}
    return await measure_job(scratch, HARNESS / "null_job.toml", settings, clients, rounds)


async def measure_job(
    scratch: Path, job: Path, changes: Mapping[str, object], clients: int, rounds: int
) -> tuple[int, int]:
    """Resident bytes likewise, in any job whose updates are single ones.

    Args:
        scratch: an empty folder.
        job: its file.
        changes: keys of the job, and their values in TOML.
        clients: of each round.
        rounds: of the run.
    """
    port = free_port()
    settings = {
        **changes,
        "rounds": rounds,
        "federated.clients": 0,
        "federated.cohort": clients,
        "federated.quorum": clients,
    }
    command = [ISTHMUS, "run", str(job)]
    command += ["--run-dir", str(scratch / "run"), "--address", f"127.0.0.1:{port}"]
    command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    with started(command, scratch / "server.log") as server:
        await asyncio.to_thread(wait_for_port, port, server, LIMIT_SECONDS)
        group = ClientGroup(clients)
        links = [
            asyncio.create_task(
                Uplink(
                    f"127.0.0.1:{port}", f"client-{i:02}", link_pb2.CLIENT, IdleDevice(group)
                ).run()
            )
            for i in range(clients)
        ]
        try:
            await _reach(group.all_opened, "all clients have joined", server, links)
            idle = await _stable_memory(server.popen.pid)
            reset_peak(server.popen.pid)
            group.may_begin.set()
            await _reach(group.closed, "the rounds are finished", server, links)
            peak = memory(server.popen.pid, "VmHWM")
            group.may_end.set()
            await asyncio.to_thread(server.wait, LIMIT_SECONDS)
        finally:
            for link in links:
                link.cancel()
            await asyncio.gather(*links, return_exceptions=True)
    if group.received != clients * rounds:
        raise server.failure(f"sent {group.received} models, not {clients} a round")
    return idle, peak


async def _stable_memory(pid: int) -> int:
    """Resident bytes once they have not grown for a second, or after 20 s."""
    highest, since = 0, time.monotonic()
    deadline = since + 20.0
    while time.monotonic() < min(since + 1.0, deadline):
        current = memory(pid, "VmRSS")
        if current > highest:
            highest, since = current, time.monotonic()
        await asyncio.sleep(0.05)
    return memory(pid, "VmRSS")


async def _reach(
    event: asyncio.Event, what: str, server: Program, links: list[asyncio.Task[None]]
) -> None:
    """Wait for an event; fail if the server or a connection ends first."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not event.is_set():
        for link in links:
            if link.done():
                link.result()
        if server.popen.poll() is not None or time.monotonic() > deadline:
            raise server.failure(f"did not reach this within {LIMIT_SECONDS:g} s: {what}")
        await asyncio.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
