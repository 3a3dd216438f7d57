"""Limits of one server: idle connections, broadcast, restart, cut connections, a large model.

The server is a separate `isthmus server start` process with mutual TLS on loopback sockets, a
registry, and jobs submitted by an operator (`device_fleet/server.py`). The devices are real
protocol clients in two other processes; each has its own certificate and connection and computes
nothing (`device_fleet/devices.py`). All processes share the cores of this machine.

 1. Idle connections. The server's resident bytes per connection: measured after every device was
    welcomed and has been idle for two leases, minus the bytes before the first connection.
    Heartbeats go both ways meanwhile, and no device may be disconnected.
 2. Broadcast. A round of the null job: every device receives 1 MB and replies. Measured from the
    first request to the last reply. The reply only names the update, which is also 1 MB and is
    transferred afterwards; the round must then finish, or the benchmark fails. The lower bound
    (`device_fleet/socket_floor.py`) sends the same bytes to as many plain sockets, in as many
    processes, with one copy at each end and a reply. Rounds and lower bound are measured in turn
    and their medians compared. The CPU time of all processes is printed too, because other load on
    the machine changes it less.
 3. Reconnection after a restart. In the second of three rounds the server is killed and restarted
    when most updates have been accepted and four are still in transfer. The time is from the
    moment the new server listens to the last device's welcome, including each device's backoff.
    The job must finish all rounds, and the final model must contain each update exactly once
    (every device sends a different value).
 4. Cut connections. A round of one device whose connection is cut at chunk boundaries in both
    directions (`device_fleet/interruptions.py`): bytes transferred over the size of the blob.
    Restarting from byte 0 after each cut would transfer cuts / 2 times the blob.
 5. Check-ins. A million devices of which 10,000 are connected at a time, in virtual time, with the
    code that decides in the server and on the devices (`device_fleet/check_ins.py`): most
    connections in one second of two days, with an hour without a server.
 6. A large model. Two rounds of 250M float32 parameters with four devices; each receives the whole
    model and sends an update of full size. The server's peak memory (the kernel's VmHWM) minus its
    memory after a small job, over the size of the model.

Figures: `bytes_per_idle_connection`, `broadcast_over_floor`, `storm_seconds/<devices>`,
`resumed_over_content/<down|up>`, `enrolled/<devices>` (connections in the busiest second),
`large_model_peak_over_model`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from device_fleet import socket_floor
from device_fleet.check_ins import simulate
from device_fleet.devices import DeviceProcesses, Status, value
from device_fleet.interruptions import resume
from device_fleet.server import BenchmarkServer, kill, report, stable_memory
from harness import command_line, figures
from harness.figures import Target
from harness.processes import memory, reset_peak
from safetensors.numpy import load_file

HELD = 4
"""Updates in transfer when the server is killed: half of its limit of parallel transfers."""
TARGETS = {
    "bytes_per_idle_connection": Target(at_most=80_000),
    "broadcast_over_floor": Target(at_most=3),
    # What a server accepts in a second, see `isthmus_server.transport.check_ins`.
    "enrolled/1000000": Target(at_most=100),
    # The memory for loading PyTorch is a larger part of that for a smaller model.
    "large_model_peak_over_model": Target(at_most=2.5, full_size=True),
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of all measurements."""

    idle: int = 5000
    idle_seconds: float = 20.0
    broadcast: int = 1000
    broadcast_bytes: int = 1_000_000
    rounds: int = 5
    storm: int = 1000
    wire_parameters: int = 2_000_000
    wire_every: int = 1
    enrolled: int = 1_000_000
    connected: int = 10_000
    large_parameters: int = 250_000_000
    processes: int = 2
    """Processes that simulate devices."""


QUICK = Sizes(
    idle=300,
    idle_seconds=5.0,
    broadcast=100,
    rounds=3,
    storm=100,
    wire_every=8,
    enrolled=100_000,
    connected=1000,
    large_parameters=25_000_000,
)
SMOKE = Sizes(
    idle=3,
    idle_seconds=0.1,
    broadcast=3,
    broadcast_bytes=4000,
    rounds=1,
    storm=6,
    wire_parameters=80_000,
    enrolled=500,
    connected=20,
    large_parameters=1000,
    processes=1,
)

Row = tuple[str, str, str]
Result = tuple[dict[str, float], list[Row]]


@command_line.script
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parts = {
        "idle": idle,
        "broadcast": broadcast,
        "storm": storm,
        "wires": wires,
        "enrolled": enrolled,
        "large": large,
    }

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", choices=parts, help="run one of the measurements")

    options = command_line.options(__doc__ or "", argv, more)
    sizes = command_line.of_size(options, full=Sizes(), quick=QUICK, smoke=SMOKE)
    results: dict[str, float] = {}
    rows: list[Row] = []
    for name, part in parts.items():
        if options.only in (None, name):
            print(f"{name} ...", file=sys.stderr, flush=True)
            part_results, lines = part(sizes)
            results |= part_results
            rows += lines
    print(figures.table(("what", "measured", "details"), rows))
    figures.write(options.json, "fleet", figures.machine("grpcio"), results, TARGETS)
    return 0


def idle(sizes: Sizes) -> Result:
    """Measure the memory of idle connections."""
    count = sizes.idle
    with _benchmark_server() as bench:
        members = bench.join([f"device-{i}" for i in range(count)])
        with bench.serving() as server:
            pid = server.popen.pid
            before = stable_memory(pid)
            with _devices(bench, members, sizes) as devices:
                devices.wait_until(
                    "all are welcome", lambda status: status.welcomes >= count, 600.0
                )
                cpu = server.tree.cpu_seconds()
                time.sleep(sizes.idle_seconds)  # the connections must be idle while measured
                cpu = server.tree.cpu_seconds() - cpu
                after = memory(pid, "VmRSS")
                _check_no_reconnects(devices.status(), count)
    each = (after - before) / count
    return {"bytes_per_idle_connection": each}, [
        (
            f"{count} idle connections, each",
            f"{each / 1000:.1f} KB",
            f"server {before / 1e6:.0f} MB before, {after / 1e6:.0f} MB after; "
            f"heartbeats take {100 * cpu / sizes.idle_seconds:.0f} % of a core",
        )
    ]


def broadcast(sizes: Sizes) -> Result:
    """Measure sending a model to every device and receiving the replies."""
    count = sizes.broadcast
    seconds: list[float] = []
    cpu: list[float] = []
    floor: list[float] = []
    floor_cpu: list[float] = []
    with _benchmark_server() as bench:
        members = bench.join([f"device-{i}" for i in range(count)])
        with bench.serving() as server, _devices(bench, members, sizes, held_back=count) as devices:
            devices.wait_until("all are welcome", lambda status: status.welcomes >= count, 300.0)

            def cpu_spent() -> float:
                return server.tree.cpu_seconds() + devices.tree.cpu_seconds()

            run = bench.submit(count, sizes.broadcast_bytes // 4, sizes.rounds + 1)
            for number in range(1, sizes.rounds + 2):
                key = (number, 1)
                devices.wait_until(
                    "a round begins", lambda status, key=key: key in status.rounds, 120.0
                )
                cpu_before = cpu_spent()
                progress = devices.wait_until(
                    "all have replied",
                    lambda status, key=key: status.rounds[key].replied == count,
                    300.0,
                    pause=0.1,  # polling costs CPU time that is measured here
                ).rounds[key]
                if progress.accepted:
                    raise RuntimeError("updates were sent before they were released")
                if number > 1:  # the first round warms up the connections
                    seconds.append(progress.replied_at - progress.started_at)
                    cpu.append(cpu_spent() - cpu_before)
                    floor_runs, floor_run_cpu = socket_floor.broadcast(
                        count, sizes.broadcast_bytes, sizes.processes, 2
                    )
                    floor.append(min(floor_runs))
                    floor_cpu.append(floor_run_cpu)
                devices.release(number)
            _finish(bench, run, count, sizes.rounds + 1)
            _check_no_reconnects(devices.status(), count)
    over = statistics.median(seconds) / statistics.median(floor)
    over_cpu = statistics.median(cpu) / statistics.median(floor_cpu)
    return {"broadcast_over_floor": over}, [
        (
            f"{sizes.broadcast_bytes / 1e6:g} MB to {count} devices and their replies",
            f"{figures.times(over)} of the lower bound",
            f"{figures.spread(seconds)}, the lower bound {figures.spread(floor)}; "
            f"{figures.times(over_cpu)} of its CPU time, {statistics.median(cpu):.2f} s",
        )
    ]


def storm(sizes: Sizes) -> Result:
    """Measure how long all devices take to reconnect to a killed and restarted server."""
    count, parameters, rounds = sizes.storm, 1000, 3
    with _benchmark_server() as bench:
        members = bench.join([f"device-{i}" for i in range(count)])
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(bench.serving())
            devices = stack.enter_context(_devices(bench, members, sizes, held_back=HELD))
            devices.release(1)
            devices.wait_until("all are welcome", lambda status: status.welcomes >= count, 300.0)
            (first,) = devices.status().welcomed
            run = bench.submit(count, parameters, rounds)
            progress = devices.wait_until(
                "all but the held updates of round 2 are accepted",
                lambda status: (
                    (2, 1) in status.rounds and status.rounds[2, 1].accepted >= count - HELD
                ),
                300.0,
            ).rounds[2, 1]
            if progress.accepted != count - HELD:
                raise RuntimeError("updates were sent before they were released")
            kill(server)
            killed = time.monotonic()
            devices.release(rounds)
            stack.enter_context(bench.serving())
            listens = time.monotonic()
            status = devices.wait_until(
                "all are welcome again",
                lambda status: sum(status.welcomed.values()) - status.welcomed[first] == count,
                300.0,
            )
            reconnected = status.welcomed_at
            _finish(bench, run, count, rounds)
            status = devices.status()
        (vector,) = load_file(report(run)["final"]["model_path"]).values()
    expected = -rounds * sum(value(i) for i in range(count)) / count
    deviation = max(abs(float(vector.min()) - expected), abs(float(vector.max()) - expected))
    if deviation > 0.5 / count:
        raise RuntimeError(
            f"the model has {float(vector[0])}, expected {expected}: "
            "an update was counted twice, or not at all"
        )
    attempts = max(attempt for round_, attempt in status.rounds if round_ == 2)
    seconds = reconnected - listens
    return {f"storm_seconds/{count}": seconds}, [
        (
            f"{count} devices reconnected after a restart",
            f"{seconds:.2f} s",
            f"{reconnected - killed:.2f} s from the kill; round 2 took {attempts} attempts, the "
            f"model has each update once; {status.welcomes - 2 * count} extra reconnections",
        )
    ]


def wires(sizes: Sizes) -> Result:
    """Measure the bytes transferred over a connection that is cut repeatedly."""
    with _benchmark_server() as bench:
        (member,) = bench.join(["device-0"])
        with bench.serving() as server:
            proxy, size = asyncio.run(
                resume(bench, server, member, sizes.wire_parameters, sizes.wire_every)
            )
    down, up = proxy.down / size, proxy.up / size
    return {"resumed_over_content/down": down, "resumed_over_content/up": up}, [
        (
            f"{size / 1e6:.0f} MB each way over a connection cut {proxy.cuts} times",
            f"{down:.2f}x down, {up:.2f}x up",
            f"of the blob; with restarts from byte 0 about {proxy.cuts / 4:.0f}x",
        )
    ]


def enrolled(sizes: Sizes) -> Result:
    """Simulate the check-ins of a large fleet."""
    days = simulate(sizes.enrolled, sizes.connected, 3600.0)
    if days.connected > sizes.connected:
        raise RuntimeError(f"{days.connected} devices were connected, not {sizes.connected}")
    return {f"enrolled/{sizes.enrolled}": float(days.busiest)}, [
        (
            f"{sizes.enrolled} enrolled, {sizes.connected} connected, busiest second",
            f"{days.busiest} connections",
            f"{days.mean:.1f} a second on average; after an hour without a server all places are "
            f"taken in {days.outage_back_seconds:.0f} s; at most {days.waits:.1f} h between two "
            "check-ins",
        )
    ]


def large(sizes: Sizes) -> Result:
    """Measure the server's peak memory with a large model."""
    clients, rounds = 4, 2
    model = 4 * sizes.large_parameters
    with _benchmark_server(on_disk=True) as bench:
        members = bench.join([f"device-{i}" for i in range(clients)])
        with bench.serving() as server:
            pid = server.popen.pid
            with DeviceProcesses(bench.address, members, 1) as devices:
                devices.wait_until(
                    "all are welcome", lambda status: status.welcomes >= clients, 60.0
                )
                # The first job has the server import PyTorch, which is no part of a model.
                _finish(bench, bench.submit(clients, 1000, 1), clients, 1, 300.0)
                before = stable_memory(pid)
                reset_peak(pid)
                start = time.monotonic()
                run = bench.submit(clients, sizes.large_parameters, rounds)
                _finish(bench, run, clients, rounds, 1200.0)
                seconds = time.monotonic() - start
                peak = memory(pid, "VmHWM")
    over = (peak - before) / model
    return {"large_model_peak_over_model": over}, [
        (
            f"{clients} devices, {rounds} rounds of {model / 1e6:.0f} MB",
            f"{figures.times(over)} of the model",
            f"server {before / 1e6:.0f} MB before, {peak / 1e6:.0f} MB at the peak; "
            f"{seconds:.1f} s in total",
        )
    ]


@contextlib.contextmanager
def _benchmark_server(*, on_disk: bool = False) -> Iterator[BenchmarkServer]:
    """Create a server directory, in memory if possible, because the disk is not measured.

    For a large model it is on disk, as in operation.
    """
    memory_disk = Path("/dev/shm")  # exists on Linux
    folder = memory_disk if memory_disk.is_dir() and not on_disk else None
    with tempfile.TemporaryDirectory(prefix="fleet-", dir=folder) as scratch:
        yield BenchmarkServer(Path(scratch))


def _devices(
    bench: BenchmarkServer, members: list[Path], sizes: Sizes, held_back: int = 0
) -> DeviceProcesses:
    return DeviceProcesses(bench.address, members, sizes.processes, held_back)


def _finish(
    bench: BenchmarkServer, run: Path, count: int, rounds: int, seconds: float = 300.0
) -> None:
    """Wait for the end of the job, and check that every round has all devices' updates."""
    deadline = time.monotonic() + seconds
    while not bench.job_finished():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the job has not finished within {seconds:g} s")
        time.sleep(0.2)  # the job queue can only be polled
    accepted = []
    for entry in report(run)["rounds"]:
        names = {
            receipt["participant"]
            for receipt in entry["receipts"]
            if receipt["status"] == "accepted"
        }
        accepted.append((entry["round"], len(names)))
    if accepted != [(number, count) for number in range(1, rounds + 1)]:
        raise RuntimeError(f"(round, updates) are {accepted}, expected {count} updates each")


def _check_no_reconnects(status: Status, count: int) -> None:
    if status.welcomes != count:
        raise RuntimeError(f"{status.welcomes - count} connections were lost")


if __name__ == "__main__":
    sys.exit(main())
