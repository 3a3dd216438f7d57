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
 5. A large model. Two rounds of 250M float32 parameters with four devices; each receives the whole
    model and sends an update of full size. The server's peak memory (the kernel's VmHWM) minus its
    memory without jobs and devices, over the size of the model.

Figures: `bytes_per_idle_connection`, `broadcast_over_floor`, `storm_seconds/<devices>`,
`resumed_over_content/down` and `/up`, `large_model_peak_over_model`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from device_fleet import socket_floor
from device_fleet.devices import Drivers, News, value
from device_fleet.interruptions import resume
from device_fleet.server import Place, kill, report, settled_memory
from harness import figures
from harness.processes import memory, reset_peak
from safetensors.numpy import load_file

DRIVERS = 2
"""Processes that the devices are in."""
HELD = 4
"""Updates on their way when the server is killed: half of those it takes at a time."""


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    idle: int = 5000
    idle_seconds: float = 20.0
    broadcast: int = 1000
    rounds: int = 5
    storm: int = 1000
    wire_parameters: int = 2_000_000
    wire_every: int = 1
    large_parameters: int = 250_000_000


QUICK = Sizes(
    idle=300,
    idle_seconds=5.0,
    broadcast=100,
    rounds=3,
    storm=100,
    wire_every=8,
    large_parameters=25_000_000,
)
BROADCAST_BYTES = 1_000_000

Row = tuple[str, str, str]
Found = tuple[dict[str, float], list[Row]]


def main() -> None:
    """Measure, print, write."""
    parts = {
        "idle": idle,
        "broadcast": broadcast,
        "storm": storm,
        "wires": wires,
        "large": large,
    }

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", choices=parts, help="one of the five")

    asked = figures.options(__doc__ or "", more=more)
    found: dict[str, float] = {}
    rows: list[Row] = []
    for name, part in parts.items():
        if asked.only in (None, name):
            print(f"{name} ...", file=sys.stderr, flush=True)
            its, lines = part(QUICK if asked.quick else Sizes())
            found |= its
            rows += lines
    print(figures.table(("what", "measured", "beside"), rows))
    figures.write(asked.json, "fleet", figures.machine("grpcio"), found)


def idle(sizes: Sizes) -> Found:
    """Memory of connections on which nothing happens."""
    count = sizes.idle
    with _place() as place:
        members = place.join([f"device-{i}" for i in range(count)])
        with place.serving() as server:
            pid = server.popen.pid
            before = settled_memory(pid)
            with _devices(place, members) as devices:
                devices.until("all are welcome", lambda news: news.welcomes >= count, 600.0)
                cpu = server.tree.cpu_seconds()
                time.sleep(sizes.idle_seconds)  # nothing is to happen: that is what is measured
                cpu = server.tree.cpu_seconds() - cpu
                after = memory(pid, "VmRSS")
                _check_nobody_left(devices.news(), count)
    each = (after - before) / count
    return {"bytes_per_idle_connection": each}, [
        (
            f"{count} idle connections, each",
            f"{each / 1000:.1f} KB",
            f"server {before / 1e6:.0f} MB before, {after / 1e6:.0f} MB after; "
            f"heartbeats take {100 * cpu / sizes.idle_seconds:.0f} % of a core",
        )
    ]


def broadcast(sizes: Sizes) -> Found:
    """1 MB to everybody, and a reply of each."""
    count = sizes.broadcast
    ours: list[float] = []
    ours_cpu: list[float] = []
    floor: list[float] = []
    floor_cpu: list[float] = []
    with _place() as place:
        members = place.join([f"device-{i}" for i in range(count)])
        with place.serving() as server, _devices(place, members, held=count) as devices:
            devices.until("all are welcome", lambda news: news.welcomes >= count, 300.0)

            def spent() -> float:
                return server.tree.cpu_seconds() + devices.tree.cpu_seconds()

            run = place.submit(count, BROADCAST_BYTES // 4, sizes.rounds + 1)
            for number in range(1, sizes.rounds + 2):
                key = (number, 1)
                devices.until("a round begins", lambda news, key=key: key in news.rounds, 120.0)
                begin = spent()
                notes = devices.until(
                    "all have replied",
                    lambda news, key=key: news.rounds[key].replied == count,
                    300.0,
                    pause=0.1,  # asking costs the devices' processes time that is counted here
                ).rounds[key]
                if number > 1:  # connections have found their windows in the first
                    ours.append(notes.replied_at - notes.begun)
                    ours_cpu.append(spent() - begin)
                    seconds, cpu = socket_floor.broadcast(count, BROADCAST_BYTES, DRIVERS, 2)
                    floor.append(min(seconds))
                    floor_cpu.append(cpu)
                devices.release(number)
            _finish(place, run, count, sizes.rounds + 1)
            _check_nobody_left(devices.news(), count)
    over = statistics.median(ours) / statistics.median(floor)
    over_cpu = statistics.median(ours_cpu) / statistics.median(floor_cpu)
    return {"broadcast_over_floor": over}, [
        (
            f"1 MB to {count} devices and a reply of each",
            f"{figures.times(over)} of the floor",
            f"{figures.spread(ours)}, the floor {figures.spread(floor)}; "
            f"{figures.times(over_cpu)} of its CPU time, {statistics.median(ours_cpu):.2f} s",
        )
    ]


def storm(sizes: Sizes) -> Found:
    """Everybody comes back to a server that was killed."""
    count, parameters, rounds = sizes.storm, 1000, 3
    with _place() as place:
        members = place.join([f"device-{i}" for i in range(count)])
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(place.serving())
            devices = stack.enter_context(_devices(place, members, held=HELD))
            devices.release(1)
            devices.until("all are welcome", lambda news: news.welcomes >= count, 300.0)
            (first,) = devices.news().welcomed
            run = place.submit(count, parameters, rounds)
            devices.until(
                "all but those held are taken in round 2",
                lambda news: (2, 1) in news.rounds and news.rounds[2, 1].settled >= count - HELD,
                300.0,
            )
            kill(server)
            killed = time.monotonic()
            devices.release(rounds)
            stack.enter_context(place.serving())
            listens = time.monotonic()
            news = devices.until(
                "all are welcome again",
                lambda news: sum(news.welcomed.values()) - news.welcomed[first] == count,
                300.0,
            )
            back = news.welcomed_at
            _finish(place, run, count, rounds)
            news = devices.news()
        (vector,) = load_file(report(run)["final"]["model_path"]).values()
    wanted = -rounds * sum(value(i) for i in range(count)) / count
    off = max(abs(float(vector.min()) - wanted), abs(float(vector.max()) - wanted))
    if off > 0.5 / count:
        raise RuntimeError(
            f"the model has {float(vector[0])} where every update once gives {wanted}: "
            "an update counted twice, or not at all"
        )
    tries = max(attempt for round_, attempt in news.rounds if round_ == 2)
    seconds = back - listens
    return {f"storm_seconds/{count}": seconds}, [
        (
            f"{count} devices back after a restart",
            f"{seconds:.2f} s",
            f"{back - killed:.2f} s from the kill; round 2 took {tries} attempts, the model has "
            f"each update once; {news.welcomes - 2 * count} welcomes too many",
        )
    ]


def wires(sizes: Sizes) -> Found:
    """Transfers go on where they were cut."""
    with _place() as place:
        (member,) = place.join(["device-0"])
        with place.serving() as server:
            wire, size = asyncio.run(
                resume(place, server, member, sizes.wire_parameters, sizes.wire_every)
            )
    down, up = wire.down / size, wire.up / size
    return {"resumed_over_content/down": down, "resumed_over_content/up": up}, [
        (
            f"{size / 1e6:.0f} MB each way over a wire cut {wire.cuts} times",
            f"{down:.2f}x down, {up:.2f}x up",
            f"of its bytes; begun anew each time it would be about {wire.cuts / 4:.0f}x",
        )
    ]


def large(sizes: Sizes) -> Found:
    """The server's peak with a large model."""
    clients, rounds = 4, 2
    model = 4 * sizes.large_parameters
    with _place(on_disk=True) as place:
        members = place.join([f"device-{i}" for i in range(clients)])
        with place.serving() as server:
            pid = server.popen.pid
            before = settled_memory(pid)
            with Drivers(place.address, members, 1) as devices:
                devices.until("all are welcome", lambda news: news.welcomes >= clients, 60.0)
                reset_peak(pid)
                begun = time.monotonic()
                run = place.submit(clients, sizes.large_parameters, rounds)
                _finish(place, run, clients, rounds, 1200.0)
                seconds = time.monotonic() - begun
                peak = memory(pid, "VmHWM")
    over = (peak - before) / model
    return {"large_model_peak_over_model": over}, [
        (
            f"{clients} devices, {rounds} rounds of {model / 1e6:.0f} MB",
            f"{figures.times(over)} of the model",
            f"server {before / 1e6:.0f} MB before, {peak / 1e6:.0f} MB at most; "
            f"{seconds:.1f} s in all",
        )
    ]


@contextlib.contextmanager
def _place(*, on_disk: bool = False) -> Iterator[Place]:
    """A server's directory: in memory if that can be, because no disk is measured here.

    A large model's is on the disk, as it would be.
    """
    memory_disk = Path("/dev/shm")  # where Linux has it
    folder = memory_disk if memory_disk.is_dir() and not on_disk else None
    with tempfile.TemporaryDirectory(prefix="fleet-", dir=folder) as scratch:
        yield Place(Path(scratch))


def _devices(place: Place, members: list[Path], held: int = 0) -> Drivers:
    return Drivers(place.address, members, DRIVERS, held)


def _finish(place: Place, run: Path, count: int, rounds: int, seconds: float = 300.0) -> None:
    """Wait for the job's end, and hold that every round has everybody's update."""
    until = time.monotonic() + seconds
    while not place.ended():
        if time.monotonic() > until:
            raise RuntimeError(f"the job has not ended in {seconds:g} s")
        time.sleep(0.2)  # the queue is another process's and tells nobody when a job ends
    accepted = []
    for entry in report(run)["rounds"]:
        names = {one["participant"] for one in entry["receipts"] if one["status"] == "accepted"}
        accepted.append((entry["round"], len(names)))
    if accepted != [(number, count) for number in range(1, rounds + 1)]:
        raise RuntimeError(f"rounds have updates of {accepted}, not of {count} devices each")


def _check_nobody_left(news: News, count: int) -> None:
    if news.welcomes != count:
        raise RuntimeError(f"{news.welcomes - count} connections were lost on the way")


if __name__ == "__main__":
    main()
