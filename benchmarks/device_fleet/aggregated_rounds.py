"""Rounds of many devices that are connected to aggregators, or to the server itself.

Each device receives the model and sends an update of full size, which aggregators add. The model
that comes of it is compared with what the updates of all devices give, and its SHA-256 is to be the
same with aggregators and without.
"""

from __future__ import annotations

import contextlib
import statistics
from dataclasses import dataclass

from device_fleet.devices import DeviceOptions, DeviceProcesses, value
from device_fleet.server import BenchmarkServer, check_model, report

VALUES = 16
"""Different updates: one of each device would take gigabytes in the processes of the devices."""
LIMIT_SECONDS = 900.0
"""For a job."""


@dataclass(frozen=True)
class AggregatedRounds:
    """What rounds have taken."""

    seconds: float
    """Time of the median round, from its plan to its commit."""
    coordinator_cpu: float
    """CPU seconds of the server's processes for a round."""
    aggregator_cpu: float
    """CPU seconds of all aggregators together for a round."""
    device_cpu: float
    """CPU seconds of the processes that simulate devices for a round."""
    model: str
    """SHA-256 of the last one."""


def measure(
    bench: BenchmarkServer,
    *,
    devices: int,
    parameters: int,
    rounds: int,
    count: int,
    processes: int,
) -> AggregatedRounds:
    """Measure rounds with `count` aggregators; 0: devices are connected to the server.

    Args:
        bench: a server that does not run, with no devices yet.
        devices: of each round.
        parameters: of the model.
        rounds: that are measured.
        count: of the aggregators.
        processes: that simulate devices.

    Raises:
        RuntimeError: a round lacks a device, or the model is not that of all updates.
    """
    members = bench.join([f"device-{i}" for i in range(devices)])
    options = DeviceOptions(values=VALUES)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(bench.serving())
        aggregators = stack.enter_context(bench.aggregators(count))
        addresses = list(aggregators) or [bench.address]
        fleet = stack.enter_context(DeviceProcesses(addresses, members, processes, options))
        fleet.wait_until("all are welcome", lambda status: status.welcomes >= devices, 300.0)
        # All connections have carried something then, and the server has imported PyTorch.
        bench.finish(bench.submit(devices, 1000, 1), devices, 1, LIMIT_SECONDS)

        def cpu() -> list[float]:
            by_aggregators = sum(each.tree.cpu_seconds() for each in aggregators.values())
            return [server.tree.cpu_seconds(), by_aggregators, fleet.tree.cpu_seconds()]

        run = bench.submit(devices, parameters, rounds)
        fleet.wait_until(
            "all have opened the run", lambda status: status.opened >= 2 * devices, LIMIT_SECONDS
        )
        before = cpu()
        bench.finish(run, devices, rounds, LIMIT_SECONDS)
        spent = [(after - begun) / rounds for begun, after in zip(before, cpu(), strict=True)]
    mean = sum(value(i, VALUES) for i in range(devices)) / devices
    check_model(run, -rounds * mean, 0.5 / devices)
    entries = report(run)["rounds"]
    seconds = statistics.median(entry["seconds"] for entry in entries)
    return AggregatedRounds(seconds, *spent, entries[-1]["model_sha256"])
