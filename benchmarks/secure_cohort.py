"""The largest cohort that completes a round with secure aggregation on this machine.

The server is a separate `isthmus server start` process with mutual TLS on loopback sockets, and
the job is submitted by an operator. The devices are real agents in a few other processes; each has
its own certificate, identity, history file and connection (`device_fleet/secure_devices.py`). They
train for no step: everything measured is the protocol. All processes share the cores of this
machine, so that every device's work counts, which in a fleet is done by the devices.

A cohort counts as complete if the round is committed in its first attempt with the updates of all
devices. The quorum is three quarters, so the graph of neighbours allows for a quarter of dropouts;
a policy (`harness/whole_cohort.py`) has the round wait for the whole cohort. The CPU time of
Flower's functions for secure aggregation is compared in `secagg.py`.

With `--aggregators N`, the devices are connected to so many aggregators, which add their masked
vectors. They take their share of the cores too.

Figures: `max_cohort/100k`, the largest complete cohort; `seconds/<cohort>`, from the plan of the
round to its commit; `server_cpu_seconds/<cohort>` and `device_cpu_seconds/<cohort>`, of the server
and of one device.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from device_fleet.secure_devices import SecureDevices
from device_fleet.server import HARNESS, BenchmarkServer, report
from harness import command_line, figures

PARAMETERS = 100_000
COHORTS = (50, 100, 200, 400, 800)
QUICK = (50,)
SMOKE = (3,)
PROCESSES = 8
"""Processes that run the devices, so that the event loop of none serves too many of them."""
LIMIT_SECONDS = 1800.0
"""For one cohort."""


@command_line.script
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--cohorts", help="other cohorts, such as 50,600")
        parser.add_argument(
            "--aggregators", type=int, default=0, metavar="N", help="connect the devices to so many"
        )

    options = command_line.options(__doc__ or "", argv, more)
    cohorts = command_line.of_size(options, full=COHORTS, quick=QUICK, smoke=SMOKE)
    parameters, processes = (1000, 1) if options.smoke else (PARAMETERS, PROCESSES)
    if options.cohorts:
        cohorts = tuple(int(word) for word in options.cohorts.split(","))
    results: dict[str, float] = {}
    rows = []
    for cohort in cohorts:
        print(f"a cohort of {cohort} ...", file=sys.stderr, flush=True)
        try:
            measured = secure_round(cohort, parameters, processes, options.aggregators)
        except RuntimeError as error:
            if not results:
                raise
            print(f"{cohort} devices: {error}", file=sys.stderr)
            break
        results["max_cohort/100k"] = cohort
        results |= {f"{key}/{cohort}": value for key, value in measured.items()}
        rows.append(
            (
                f"{cohort} devices",
                f"{measured['seconds']:.1f} s",
                f"{measured['server_cpu_seconds']:.1f} s",
                f"{1000 * measured['device_cpu_seconds']:.0f} ms",
            )
        )
    print(figures.table(("a secure round of 100k", "time", "server CPU", "CPU per device"), rows))
    figures.write(options.json, "secure_cohort", figures.machine("grpcio", "cryptography"), results)
    return 0


def secure_round(
    cohort: int,
    parameters: int = PARAMETERS,
    processes: int = PROCESSES,
    aggregators: int = 0,
) -> dict[str, float]:
    """Run one secure round with all devices of a cohort; returns the figures.

    Args:
        cohort: how many devices.
        parameters: of the model.
        processes: that run the devices.
        aggregators: that the devices are connected to; 0 for the server.

    Raises:
        RuntimeError: it was not committed in the first attempt with all updates.
    """
    memory_disk = Path("/dev/shm")  # exists on Linux; the disk is not measured
    folder = memory_disk if memory_disk.is_dir() else None
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="cohort-", dir=folder))
        bench = BenchmarkServer(Path(scratch))
        shutil.copy(HARNESS / "whole_cohort.py", bench.state / "tasks")
        members = bench.join([f"device-{i}" for i in range(cohort)])
        server = stack.enter_context(bench.serving())
        addresses = list(stack.enter_context(bench.aggregators(aggregators))) or [bench.address]
        tasks = bench.state / "tasks"
        devices = stack.enter_context(SecureDevices(addresses, members, tasks, processes))
        devices.wait_until_connected(300.0)
        run = bench.submit(
            cohort,
            parameters,
            1,
            **{
                "strategy.policy": "whole_cohort:WholeCohort",
                "federated.secure_aggregation": "true",
                "federated.quorum": max(3, -(-3 * cohort // 4)),
                "time.join_seconds": 900,
                "attempts": 1,
            },
        )
        _wait_for(_PLANNED, run, devices, 900.0)
        server_cpu, device_cpu = server.tree.cpu_seconds(), devices.tree.cpu_seconds()
        _wait_for(_ENDED, run, devices, LIMIT_SECONDS)
        server_cpu = server.tree.cpu_seconds() - server_cpu
        device_cpu = devices.tree.cpu_seconds() - device_cpu
        reported = report(run)
        if not reported["rounds"]:
            raise RuntimeError(f"no round was committed: {reported['reason']}")
        (entry,) = reported["rounds"]
        accepted = entry["participants"]["accepted"]
        if entry["attempt"] != 1 or accepted != cohort:
            reasons = Counter(receipt["reason"] for receipt in entry["receipts"])
            raise RuntimeError(
                f"{accepted} of {cohort} updates in attempt {entry['attempt']}; reasons: "
                + "; ".join(f"{why or 'none'} ({times})" for why, times in reasons.most_common())
            )
        return {
            "seconds": entry["seconds"],
            "server_cpu_seconds": server_cpu,
            "device_cpu_seconds": device_cpu / cohort,
        }


_PLANNED = "SELECT 1 FROM attempts"
_ENDED = "SELECT 1 FROM run WHERE status != 'running'"


def _wait_for(query: str, run: Path, devices: SecureDevices, seconds: float) -> None:
    """Wait until a query of the run's log has a row.

    Raises:
        RuntimeError: it has none within that time, or a device has given up.
    """
    deadline = time.monotonic() + seconds
    while not _has_row(query, run / "run.sqlite"):
        devices.check()
        if time.monotonic() > deadline:
            raise RuntimeError(f"not reached within {seconds:g} s: {query}")
        time.sleep(0.1)  # the run's log can only be polled


def _has_row(query: str, log: Path) -> bool:
    if not log.exists():
        return False
    with contextlib.closing(sqlite3.connect(f"file:{log}?mode=ro", uri=True)) as connection:
        try:
            return connection.execute(query).fetchone() is not None
        except sqlite3.OperationalError:  # it is being created
            return False


if __name__ == "__main__":
    sys.exit(main())
