"""Limits of one server: connections, broadcast, restart, cuts, large models; and aggregators.

The server is a separate `isthmus server start` process with mutual TLS on loopback sockets, a
registry, and jobs submitted by an operator (`device_fleet/server.py`). The devices are real
protocol clients in two other processes; each has its own certificate and connection and computes
nothing (`device_fleet/devices.py`). All processes share the cores of this machine.

 1. Idle connections. The server's resident bytes per connection: measured after every device was
    welcomed and has been idle for two leases, minus the bytes before the first connection.
    Heartbeats go both ways meanwhile, and no device may be disconnected.
 2. Broadcast. A round of the null job: every device receives 1 MB and replies. Measured from the
    first request to the last reply. The reply only names the update, which is also 1 MB and is
    transferred afterwards; the round must then finish, or the benchmark fails. The model takes two
    roads in turn: `link`, the streams of the devices; and `mirror`, where the server puts it on a
    web server once (`device_fleet/static_web.py`: nginx with its defaults), from which each device
    gets it over an HTTPS connection of its own, decrypts it, and verifies its digest. In
    the second, no byte of it may be on the link. The lower bound (`device_fleet/socket_floor.py`)
    sends the same bytes to as many plain sockets, in as many processes, with one copy at each end
    and a reply. Rounds and lower bound are measured in turn and their medians compared. The CPU
    time of all processes is printed too, because other load on the machine changes it less.
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
    memory after a small job, over the size of the model. Then one round of 0.8 GB with six devices,
    for the time from the submission to the end of the job, and the same peak. All of it are
    messages over mutual TLS.
 7. Aggregators. Rounds of 1,000 devices and 1M parameters, in which each device receives the model
    and sends an update, with 1, 2 and 4 aggregators and without any
    (`device_fleet/aggregated_rounds.py`). The models must be the same. On one machine aggregators
    take the cores that the server leaves; what they are for is the CPU time of the server.

Figures: `bytes_per_idle_connection`, `broadcast_over_floor/<link|mirror>`,
`storm_seconds/<devices>`, `resumed_over_content/<down|up>`, `enrolled/<devices>` (connections in
the busiest second), `large_model_peak_over_model`, `seconds/<size>/<devices>`,
`peak_over_model/<size>/<devices>`, `speedup/aggregators/<n>` (time of a round without aggregators
over that with n), `coordinator_cpu_ratio/<n>` (CPU time of the server's processes for a round with
n aggregators over that without).
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

from device_fleet import aggregated_rounds, socket_floor
from device_fleet.aggregated_rounds import AggregatedRounds
from device_fleet.check_ins import simulate
from device_fleet.devices import DeviceOptions, DeviceProcesses, Status, value
from device_fleet.interruptions import resume
from device_fleet.server import (
    BenchmarkServer,
    bytes_to_devices,
    check_model,
    kill,
    stable_memory,
)
from device_fleet.static_web import StaticWeb, static_web
from harness import command_line, figures
from harness.figures import Target
from harness.processes import memory, reset_peak

HELD = 4
"""Updates in transfer when the server is killed: half of its limit of parallel transfers."""
TARGETS = {
    "bytes_per_idle_connection": Target(at_most=80_000),
    "broadcast_over_floor/*": Target(at_most=3),
    # What a server accepts in a second, see `isthmus_server.transport.check_ins`.
    "enrolled/1000000": Target(at_most=100),
    # The memory for loading PyTorch is a larger part of that for a smaller model.
    "large_model_peak_over_model": Target(at_most=2.5, full_size=True),
    "peak_over_model/*": Target(at_most=2.5, full_size=True),
    # Of two cores, on which all of it runs, aggregators can give the server no third one.
    "speedup/aggregators/*": Target(at_least=1),
    "coordinator_cpu_ratio/4": Target(at_most=0.25),
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
    job_parameters: int = 200_000_000
    """Parameters of the job of six devices."""
    aggregated: int = 1000
    aggregated_parameters: int = 1_000_000
    aggregated_rounds: int = 2
    aggregators: tuple[int, ...] = (1, 2, 4)
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
    job_parameters=20_000_000,
    aggregated=100,
)
SMOKE = Sizes(
    idle=3,
    idle_seconds=0.1,
    broadcast=3,
    broadcast_bytes=100_000,
    rounds=1,
    storm=6,
    wire_parameters=80_000,
    enrolled=500,
    connected=20,
    large_parameters=1000,
    job_parameters=1000,
    aggregated=3,
    aggregated_parameters=1000,
    aggregated_rounds=1,
    aggregators=(2,),
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
        "aggregators": aggregators,
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
    """Measure sending a model to every device and receiving the replies, on both roads."""
    results: dict[str, float] = {}
    rows: list[Row] = []
    with _benchmark_server() as bench:
        members = bench.join([f"device-{i}" for i in range(sizes.broadcast)])
        with static_web(bench.folder) as web:
            for road, mirror in (("link", None), ("mirror", web)):
                over, row = _broadcast(bench, members, sizes, mirror)
                results[f"broadcast_over_floor/{road}"] = over
                rows.append(row)
    return results, rows


def _broadcast(
    bench: BenchmarkServer, members: list[Path], sizes: Sizes, web: StaticWeb | None
) -> tuple[float, Row]:
    """Measure it on the link, or through a mirror on a web server."""
    count = sizes.broadcast
    seconds: list[float] = []
    cpu: list[float] = []
    server_cpu: list[float] = []
    floor: list[float] = []
    floor_cpu: list[float] = []
    serving: tuple[str, ...] = ()
    options = DeviceOptions(held_back=count)
    if web is not None:
        serving = ("--mirror", f"file:{web.folder}", "--mirror-url", web.address)
        options = DeviceOptions(
            held_back=count, mirror=f"{web.address}*", authority=web.certificate
        )
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(bench.serving(*serving))
        devices = stack.enter_context(
            DeviceProcesses([bench.address], members, sizes.processes, options)
        )
        devices.wait_until("all are welcome", lambda status: status.welcomes >= count, 300.0)

        def cpu_spent() -> float:
            spent = server.tree.cpu_seconds() + devices.tree.cpu_seconds()
            return spent if web is None else spent + web.cpu_seconds()

        run = bench.submit(count, sizes.broadcast_bytes // 4, sizes.rounds + 1)
        for number in range(1, sizes.rounds + 2):
            key = (number, 1)
            devices.wait_until(
                "a round begins", lambda status, key=key: key in status.rounds, 120.0
            )
            cpu_before, server_before = cpu_spent(), server.tree.cpu_seconds()
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
                server_cpu.append(server.tree.cpu_seconds() - server_before)
                floor_runs, floor_run_cpu = socket_floor.broadcast(
                    count, sizes.broadcast_bytes, sizes.processes, 2
                )
                floor.append(min(floor_runs))
                floor_cpu.append(floor_run_cpu)
            devices.release(number)
        bench.finish(run, count, sizes.rounds + 1)
        _check_no_reconnects(devices.status(), count)
    if web is not None and (sent := bytes_to_devices(run)):
        raise RuntimeError(f"{sent} bytes of models were sent on the link and not by the mirror")
    over = statistics.median(seconds) / statistics.median(floor)
    over_cpu = statistics.median(cpu) / statistics.median(floor_cpu)
    road = "the link" if web is None else f"a mirror ({web.named})"
    return over, (
        f"{sizes.broadcast_bytes / 1e6:g} MB to {count} devices by {road} and their replies",
        f"{figures.times(over)} of the lower bound",
        f"{figures.spread(seconds)}, the lower bound {figures.spread(floor)}; "
        f"{figures.times(over_cpu)} of its CPU time, {statistics.median(cpu):.2f} s, of which the "
        f"server {statistics.median(server_cpu):.2f} s",
    )


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
            bench.finish(run, count, rounds)
            status = devices.status()
        check_model(run, -rounds * sum(value(i) for i in range(count)) / count, 0.5 / count)
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
    """Measure the server's peak memory with a large model, and the time of a large job."""
    over, _, row = _large_job(4, 2, sizes.large_parameters)
    results = {"large_model_peak_over_model": over}
    clients = 6
    key = f"{4 * sizes.job_parameters / 1e9:g}GB/{clients}"
    over, seconds, job_row = _large_job(clients, 1, sizes.job_parameters)
    results |= {f"seconds/{key}": seconds, f"peak_over_model/{key}": over}
    return results, [row, job_row]


def _large_job(clients: int, rounds: int, parameters: int) -> tuple[float, float, Row]:
    """Run a job with a large model; returns its peak over the model, its seconds, and a row."""
    model = 4 * parameters
    with _benchmark_server(on_disk=True) as bench:
        members = bench.join([f"device-{i}" for i in range(clients)])
        with bench.serving() as server:
            pid = server.popen.pid
            options = DeviceOptions(values=2)
            with DeviceProcesses([bench.address], members, 1, options) as devices:
                devices.wait_until(
                    "all are welcome", lambda status: status.welcomes >= clients, 60.0
                )
                # The first job has the server import PyTorch, which is no part of a model.
                bench.finish(bench.submit(clients, 1000, 1), clients, 1)
                before = stable_memory(pid)
                reset_peak(pid)
                start = time.monotonic()
                run = bench.submit(clients, parameters, rounds)
                bench.finish(run, clients, rounds, 1200.0)
                seconds = time.monotonic() - start
                peak = memory(pid, "VmHWM")
    over = (peak - before) / model
    times = "a round" if rounds == 1 else f"{rounds} rounds"
    return (
        over,
        seconds,
        (
            f"{clients} devices, {times} of {model / 1e6:.0f} MB",
            f"{figures.times(over)} of the model",
            f"server {before / 1e6:.0f} MB before, {peak / 1e6:.0f} MB at the peak; "
            f"{seconds:.1f} s in total",
        ),
    )


def aggregators(sizes: Sizes) -> Result:
    """Measure rounds with aggregators and without."""
    measured: dict[int, AggregatedRounds] = {}
    for count in (0, *sizes.aggregators):
        with _benchmark_server() as bench:
            measured[count] = aggregated_rounds.measure(
                bench,
                devices=sizes.aggregated,
                parameters=sizes.aggregated_parameters,
                rounds=sizes.aggregated_rounds,
                count=count,
                processes=sizes.processes,
            )
    if len({each.model for each in measured.values()}) != 1:
        raise RuntimeError("the models with aggregators and without differ")
    alone = measured[0]
    results: dict[str, float] = {}
    rows: list[Row] = []
    for count, each in measured.items():
        cpu = (
            f"CPU time of the server {each.coordinator_cpu:.2f} s, of aggregators "
            f"{each.aggregator_cpu:.1f} s, of devices {each.device_cpu:.1f} s"
        )
        what = f"a round of {sizes.aggregated} devices, {count or 'no'} aggregators"
        if count:
            speedup = alone.seconds / each.seconds
            # The CPU time of a short round may be less than a tick of the kernel.
            ratio = each.coordinator_cpu / max(alone.coordinator_cpu, 0.01)
            results[f"speedup/aggregators/{count}"] = speedup
            results[f"coordinator_cpu_ratio/{count}"] = ratio
            cpu = f"{figures.times(speedup)} as fast; {figures.times(ratio)} of the CPU time; {cpu}"
        rows.append((what, f"{each.seconds:.2f} s", cpu))
    return results, rows


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
    options = DeviceOptions(held_back=held_back)
    return DeviceProcesses([bench.address], members, sizes.processes, options)


def _check_no_reconnects(status: Status, count: int) -> None:
    if status.welcomes != count:
        raise RuntimeError(f"{status.welcomes - count} connections were lost")


if __name__ == "__main__":
    sys.exit(main())
