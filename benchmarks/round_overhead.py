"""Overhead of a round that computes nothing, compared with stock Flower: wall and CPU time.

Both systems are started as a user starts them, one after the other, on loopback:

  * Flower: `flower-superlink`, one `flower-supernode` per client and `flwr run` of the unmodified
    app in `harness/flower_stock/`: FedAvg, devices that return the model they received (numpy, no
    torch), no evaluation by devices. Settings are the defaults, except that features using the
    network are off (telemetry, update check, dependency installation).
  * Isthmus: `isthmus run` of `harness/null_job.toml`: devices that take 0 local steps and send a
    zero update of full size; every round is checkpointed and committed. It listens on TCP like
    Flower, and not on its default Unix socket. The processes of `isthmus run` open each other's
    models and updates in memory; the largest model is measured also with messages that carry them
    (`harness/by_messages.py`), as between machines.

A round lasts from one central evaluation to the next; the evaluation only records the time. The
first round, start-up and shutdown are dropped, and the median of the other rounds counts. In every
measured round the reply of every client must have been aggregated, or the benchmark fails.
CPU time is that of all processes of a system (servers, clients and their descendants) between the
end of the first and the end of the last round, per round; `harness/processes.py` defines how it is
measured. The little that it misses belongs to processes that Flower starts and Isthmus does not.

"0" means one parameter with one element in both systems: an empty model cannot be trained.

The floor of a round is printed, too: the least time in which this machine copies, hashes and writes
the bytes that a round has (`harness/floor.py`). These rounds are not encrypted, and no part of the
floor is for that.

With `--observed`, rounds of Isthmus are compared with other rounds of the same run: blocks of
rounds with a JSON log and metrics, scraped once a second, alternate with blocks that are shown on
the console (`harness/alternating.py`). The ratio is that of the medians; the first round of a block
is dropped.

With `--signed`, secure rounds that keep what devices have signed, of which `isthmus prove` makes a
transcript, are compared in the same way with secure rounds of the same run that keep nothing
(`harness/alternating_signatures.py`).

Figures: `speedup/<params>/<clients>` (wall time of Flower over Isthmus),
`cpu_ratio/<params>/<clients>` (CPU time of Flower over Isthmus), and for the largest model
`speedup_by_messages/<params>/<clients>`, `cpu_ratio_by_messages/<params>/<clients>`,
`over_floor/files/<params>/<clients>` and `over_floor/messages/<params>/<clients>` (wall time over
the floor); with `--observed`, `observed/<params>/<clients>` (wall time with over without); with
`--signed`, `signed/<params>/<clients>` (the same).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness import command_line, figures, flower_runtime
from harness.alternating import BLOCK, is_observed
from harness.figures import Target
from harness.floor import Floor, Rates
from harness.processes import ISTHMUS, ProcessTree, Program, free_port, isthmus, started

HARNESS = Path(__file__).parent / "harness"


@dataclass(frozen=True)
class Size:
    """A model and how many rounds of it to run."""

    label: str
    parameters: int
    flower_rounds: int
    isthmus_rounds: int


SIZES = (Size("0", 1, 9, 200), Size("1M", 1_000_000, 9, 60), Size("25M", 25_000_000, 7, 15))
OBSERVED_SIZES = (Size("0", 1, 0, 2000), Size("1M", 1_000_000, 0, 400))
"""For `--observed`."""
SIGNED_SIZES = (Size("0", 1, 0, 1000), Size("1M", 1_000_000, 0, 400))
"""For `--signed`."""
LEAST_SECURE = 3
"""Fewest devices of a secure sum."""
SMOKE_SIZES = (Size("0", 1, 2, 4),)
QUICK_SIZES = (Size("0", 1, 3, 200), Size("1M", 1_000_000, 3, 60))

TARGETS = {
    "speedup/0/*": Target(at_least=100),
    "speedup/1M/*": Target(at_least=20),
    "speedup/25M/*": Target(at_least=8),
    "over_floor/files/25M/4": Target(at_most=2),
    "over_floor/messages/25M/4": Target(at_most=2.5),
    "observed/*": Target(at_most=1.05),
    "signed/*": Target(at_most=1.1),
}


@dataclass(frozen=True)
class Cost:
    """Cost of the measured rounds."""

    seconds: list[float]
    """Wall time of each round."""
    cpu: float
    """Mean CPU seconds per round."""


@command_line.script
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = command_line.options(__doc__ or "", argv, _add_blocks)
    if options.observed or options.signed:
        measure_blocks(options, "observed" if options.observed else "signed")
        return 0
    command_line.needs("flwr", "flwr")
    sizes, client_counts = command_line.of_size(
        options, full=(SIZES, (2, 4)), quick=(QUICK_SIZES, (2,)), smoke=(SMOKE_SIZES, (2,))
    )
    results: dict[str, float] = {}
    rows = []
    with tempfile.TemporaryDirectory(prefix="round-overhead-") as scratch:
        block = 4 * sizes[-1].parameters if options.smoke else 256 << 20
        rates = Rates.measured(Path(scratch), block)
        floor = Floor(rates, len(os.sched_getaffinity(0)))
        for clients in client_counts:
            if options.smoke:
                # Flower takes a dozen seconds of CPU time to start; a test of its own does that.
                flower_costs = {
                    "0": measure_isthmus(Path(scratch), clients, sizes[0], how="_twice")
                }
            else:
                flower_costs = measure_flower(Path(scratch), clients, sizes)
            for size, how in [(size, "") for size in sizes] + [(sizes[-1], "_by_messages")]:
                ours = measure_isthmus(Path(scratch), clients, size, how=how)
                flower = flower_costs[size.label]
                speedup = statistics.median(flower.seconds) / statistics.median(ours.seconds)
                cpu_ratio = flower.cpu / ours.cpu
                results[f"speedup{how}/{size.label}/{clients}"] = speedup
                results[f"cpu_ratio{how}/{size.label}/{clients}"] = cpu_ratio
                least = floor.seconds(4.0 * size.parameters, devices=clients, messages=bool(how))
                over = statistics.median(ours.seconds) / least
                if size is sizes[-1]:
                    by = "messages" if how else "files"
                    results[f"over_floor/{by}/{size.label}/{clients}"] = over
                rows.append(
                    (
                        f"{size.label} parameters, {clients} clients{how.replace('_', ' ')}",
                        figures.spread(flower.seconds),
                        figures.spread(ours.seconds),
                        figures.times(speedup),
                        f"{flower.cpu:.3g} s",
                        f"{ours.cpu:.3g} s",
                        figures.times(cpu_ratio),
                        f"{least:.3g} s",
                        figures.times(over),
                    )
                )
    header = ("a round of", "Flower, wall", "Isthmus", "ratio", "Flower, CPU", "Isthmus", "ratio")
    print(figures.table((*header, "floor", "over it"), rows))
    print(
        f"a processor copies {rates.copied / 1e9:.3g} GB/s and hashes {rates.hashed / 1e9:.3g}, "
        f"the disk takes {rates.written / 1e9:.3g}"
    )
    figures.write(options.json, "round_overhead", figures.machine("flwr"), results, TARGETS)
    return 0


def _add_blocks(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--observed", action="store_true", help="compare rounds that are observed with others"
    )
    which.add_argument(
        "--signed", action="store_true", help="compare rounds that can be proved with others"
    )


def measure_blocks(options: argparse.Namespace, what: str) -> None:
    """Compare rounds that are `observed` or `signed` with others, for each size."""
    results: dict[str, float] = {}
    rows = []
    clients, part = command_line.of_size(options, full=(4, 1), quick=(2, 5), smoke=(2, 20))
    sizes = OBSERVED_SIZES
    if what == "signed":
        clients = max(clients, LEAST_SECURE)
        sizes = SIGNED_SIZES
    with tempfile.TemporaryDirectory(prefix="round-overhead-") as scratch:
        for size in sizes:
            rounds = size.isthmus_rounds // part
            run = replace(size, isthmus_rounds=rounds)
            cost = measure_isthmus(Path(scratch), clients, run, alternating=what)
            # Durations begin with that of the second round or of the third.
            first = rounds - len(cost.seconds) + 1
            numbered = [
                (number, seconds)
                for number, seconds in enumerate(cost.seconds, first)
                if number % BLOCK != 1
            ]
            off = [seconds for number, seconds in numbered if not is_observed(number)]
            on = [seconds for number, seconds in numbered if is_observed(number)]
            ratio = statistics.median(on) / statistics.median(off)
            results[f"{what}/{size.label}/{clients}"] = ratio
            shown = figures.spread(off), figures.spread(on), f"{ratio:.3f}"
            rows.append((f"{size.label} parameters, {clients} clients", *shown))
    print(figures.table(("a round of", f"not {what}", what, "ratio"), rows))
    figures.write(options.json, "round_overhead", figures.machine(), results, TARGETS)


def measure_flower(scratch: Path, clients: int, sizes: tuple[Size, ...]) -> dict[str, Cost]:
    """Run all sizes, one after another, on one stock deployment."""
    home = scratch / f"flower-{clients}"
    home.mkdir()
    costs = {}
    with flower_runtime.deployment(home, clients) as (superlink, tree, environment):
        for size in sizes:
            _log(f"Flower: {size.label} parameters, {clients} clients")
            timestamps = home / f"timestamps-{size.label}"
            config = (
                f"parameters={size.parameters} clients={clients} "
                f'rounds={size.flower_rounds} timestamps="{timestamps}"'
            )
            command = [
                str(flower_runtime.programs() / "flwr"),
                "run",
                str(HARNESS / "flower_stock"),
            ]
            submit = subprocess.run(
                [*command, "--run-config", config],
                env={**os.environ, **environment},
                capture_output=True,
                text=True,
                check=False,
            )
            if submit.returncode != 0:
                raise RuntimeError(f"`flwr run` failed:\n{submit.stdout}{submit.stderr}")
            # Flower's evaluation before the first round adds one timestamp.
            costs[size.label] = _follow(timestamps, size.flower_rounds + 1, superlink, tree, 900.0)
            answers = [json.loads(line)["answered"] for line in timestamps.read_text().splitlines()]
            if answers[1:] != [clients] * size.flower_rounds:
                raise superlink.failure(f"aggregated {answers[1:]} answers, not {clients} a round")
    return costs


def measure_isthmus(
    scratch: Path, clients: int, size: Size, *, alternating: str = "", how: str = ""
) -> Cost:
    """Run the null job as a user does, by messages, or with blocks of rounds.

    `alternating`: blocks of rounds that are `observed`, or `signed`, with others in between.
    """
    _log(f"Isthmus: {size.label} parameters, {clients} clients{how.replace('_', ' ')}")
    directory = scratch / f"isthmus-{size.label}-{clients}{how}"
    timestamps = scratch / f"{directory.name}.timestamps"
    settings = {
        "rounds": size.isthmus_rounds,
        "task.settings.parameters": size.parameters,
        "task.settings.timestamps": f'"{timestamps}"',
        "federated.clients": clients,
        "federated.cohort": clients,
        "federated.quorum": clients,
    }
    command = [ISTHMUS, "run", str(HARNESS / "null_job.toml"), "--run-dir", str(directory)]
    command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    port = 0
    if how:
        command[:1] = [sys.executable, str(HARNESS / "by_messages.py")]
    if alternating == "signed":
        command[:1] = [sys.executable, str(HARNESS / "alternating_signatures.py")]
        command += ["--set", "federated.secure_aggregation=true"]
    elif alternating:
        port = free_port()
        command[:1] = [sys.executable, str(HARNESS / "alternating.py")]
        command += ["--metrics", f"127.0.0.1:{port}"]
    with started(command, scratch / f"{directory.name}.log") as program, _scraped(port):
        cost = _follow(timestamps, size.isthmus_rounds, program, program.tree, 600.0)
        program.wait(120.0)
    rounds = json.loads(isthmus("report", str(directory), "--json"))["rounds"]
    accepted = [_count(entry["participants"]["accepted"]) for entry in rounds]
    if accepted != [clients] * size.isthmus_rounds:
        raise program.failure(f"aggregated {accepted} answers, not {clients} a round")
    return cost


@contextlib.contextmanager
def _scraped(port: int) -> Iterator[None]:
    """Read the metrics once a second during the block; 0: there are none."""
    ended = threading.Event()

    def scrape() -> None:
        while not ended.wait(1.0):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5.0).read()

    thread = threading.Thread(target=scrape)
    if port:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if port:
            thread.join()


def _count(participants: int | list[str]) -> int:
    return participants if isinstance(participants, int) else len(participants)


def _follow(
    timestamps: Path, last: int, program: Program, tree: ProcessTree, seconds: float
) -> Cost:
    """Follow the timestamps and the tree's CPU time; the first round is dropped.

    The first two timestamps are start and end of the first round, or the ends of the first two.
    """
    begin = cpu_begin = None
    deadline = time.monotonic() + seconds
    while True:
        times = _times(timestamps)
        if begin is None and len(times) >= 2:
            begin, cpu_begin = len(times) - 1, tree.cpu_seconds()
        if begin is not None and cpu_begin is not None and len(times) >= last > begin + 1:
            cpu = (tree.cpu_seconds() - cpu_begin) / (len(times) - 1 - begin)
            return Cost([b - a for a, b in itertools.pairwise(times[1:])], cpu)
        if program.popen.poll() is not None and len(_times(timestamps)) < last:
            raise program.failure(f"ended after {len(times)} of {last} rounds")
        if time.monotonic() > deadline:
            raise program.failure(f"has {len(times)} of {last} rounds after {seconds:g} s")
        time.sleep(0.005)  # the file can only be polled; its lines hold exact times


def _times(timestamps: Path) -> list[float]:
    if not timestamps.exists():
        return []
    lines = timestamps.read_text().split("\n")[:-1]  # the last line may be incomplete
    return [json.loads(line)["time"] for line in lines]


def _log(what: str) -> None:
    print(f"{what} ...", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
