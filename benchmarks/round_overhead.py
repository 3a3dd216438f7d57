"""What a round costs that computes nothing: ours beside stock Flower, wall and CPU time.

Both sides are started the way a user starts them, one after the other, on loopback:

  * Flower: `flower-superlink`, one `flower-supernode` per client and `flwr run` of the unmodified
    app in `flower_stock/`: FedAvg, devices that return the model they got (numpy, no torch), no
    evaluation by devices. Its settings are its defaults, but for what would go to the network
    (telemetry, update check, dependency installation).
  * Isthmus: `isthmus run` of `null_job.toml`: devices that take 0 local steps and send back a zero
    update of full size; every round is checkpointed and committed. It listens on TCP, as Flower
    does and as servers do, in place of the socket that it takes by itself.

A round is the time from one central evaluation to the next, which on both sides only notes the
time. The first round is dropped, as are start and end; the median of the rest counts. In every
measured round every client's answer must have been aggregated, or the benchmark fails.
CPU time is that of all processes of a side (servers, clients and whatever they start) between the
end of the first and the end of the last round, over the rounds; `processes.py` says how it is
counted. It misses little, and only of processes that Flower starts and ours does not.

"0" is one parameter of one element on both sides: an empty model cannot be trained.

Figures: `speedup/<params>/<clients>` (Flower's wall time over ours) and
`cpu_ratio/<params>/<clients>` (its CPU time over ours).
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from harness import figures, flower_runtime
from harness.processes import Program, Tree, started

HARNESS = Path(__file__).parent / "harness"
SCRIPTS = Path(sys.executable).parent


@dataclass(frozen=True)
class Size:
    """A model and how many rounds of it to run."""

    label: str
    parameters: int
    flower_rounds: int
    our_rounds: int


SIZES = (Size("0", 1, 9, 200), Size("1M", 1_000_000, 9, 60), Size("25M", 25_000_000, 7, 15))
QUICK_SIZES = (Size("0", 1, 3, 200), Size("1M", 1_000_000, 3, 60))


@dataclass(frozen=True)
class Cost:
    """What the measured rounds cost."""

    seconds: list[float]
    """Wall time of each."""
    cpu: float
    """CPU seconds, their average."""


def main() -> None:
    """Measure, print, write."""
    asked = figures.options(__doc__ or "")
    sizes, fleets = (QUICK_SIZES, (2,)) if asked.quick else (SIZES, (2, 4))
    found: dict[str, float] = {}
    rows = []
    with tempfile.TemporaryDirectory(prefix="round-overhead-") as scratch:
        for clients in fleets:
            theirs = measure_flower(Path(scratch), clients, sizes)
            for size in sizes:
                ours, stock = measure_isthmus(Path(scratch), clients, size), theirs[size.label]
                speedup = statistics.median(stock.seconds) / statistics.median(ours.seconds)
                saving = stock.cpu / ours.cpu
                found[f"speedup/{size.label}/{clients}"] = speedup
                found[f"cpu_ratio/{size.label}/{clients}"] = saving
                rows.append(
                    (
                        f"{size.label} parameters, {clients} clients",
                        figures.spread(stock.seconds),
                        figures.spread(ours.seconds),
                        figures.times(speedup),
                        f"{stock.cpu:.3g} s",
                        f"{ours.cpu:.3g} s",
                        figures.times(saving),
                    )
                )
    header = ("a round of", "Flower, wall", "ours", "ratio", "Flower, CPU", "ours", "ratio")
    print(figures.table(header, rows))
    figures.write(asked.json, "round_overhead", figures.machine("flwr"), found)


def measure_flower(scratch: Path, clients: int, sizes: tuple[Size, ...]) -> dict[str, Cost]:
    """All sizes, one run after another, on one stock deployment."""
    home = scratch / f"flower-{clients}"
    home.mkdir()
    costs = {}
    with flower_runtime.deployment(home, clients) as (superlink, tree, environment):
        for size in sizes:
            _say(f"Flower: {size.label} parameters, {clients} clients")
            marks = home / f"marks-{size.label}"
            config = (
                f"parameters={size.parameters} clients={clients} "
                f'rounds={size.flower_rounds} marks="{marks}"'
            )
            command = [
                str(flower_runtime.SCRIPTS / "flwr"),
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
            # Its evaluation before the first round is one more mark.
            costs[size.label] = _follow(marks, size.flower_rounds + 1, superlink, tree, 900.0)
            answers = [json.loads(line)["answered"] for line in marks.read_text().splitlines()]
            if answers[1:] != [clients] * size.flower_rounds:
                raise superlink.failure(f"aggregated {answers[1:]} answers, not {clients} a round")
    return costs


def measure_isthmus(scratch: Path, clients: int, size: Size) -> Cost:
    """One run of the null job, as a user starts it."""
    _say(f"ours: {size.label} parameters, {clients} clients")
    directory = scratch / f"isthmus-{size.label}-{clients}"
    marks = scratch / f"{directory.name}.marks"
    settings = {
        "rounds": size.our_rounds,
        "task.settings.parameters": size.parameters,
        "task.settings.marks": f'"{marks}"',
        "federated.clients": clients,
        "federated.cohort": clients,
        "federated.quorum": clients,
    }
    isthmus = str(SCRIPTS / "isthmus")
    command = [isthmus, "run", str(HARNESS / "null_job.toml"), "--run-dir", str(directory)]
    command += ["--address", "127.0.0.1:0"]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    with started(command, scratch / f"{directory.name}.log") as program:
        cost = _follow(marks, size.our_rounds, program, program.tree, 600.0)
        program.wait(120.0)
    printed = subprocess.run(
        [isthmus, "report", str(directory), "--json"], capture_output=True, check=True
    ).stdout
    rounds = json.loads(printed)["rounds"]
    accepted = [_count(entry["participants"]["accepted"]) for entry in rounds]
    if accepted != [clients] * size.our_rounds:
        raise program.failure(f"aggregated {accepted} answers, not {clients} a round")
    return cost


def _count(participants: int | list[str]) -> int:
    return participants if isinstance(participants, int) else len(participants)


def _follow(marks: Path, last: int, program: Program, tree: Tree, seconds: float) -> Cost:
    """Read the marks as they are made, the first round dropped, and the tree's CPU time with them.

    The first two marks are start and end of the first round, or ends of the first and second.
    """
    begin = cpu_begin = None
    until = time.monotonic() + seconds
    while True:
        times = _times(marks)
        if begin is None and len(times) >= 2:
            begin, cpu_begin = len(times) - 1, tree.cpu_seconds()
        if begin is not None and cpu_begin is not None and len(times) >= last > begin + 1:
            cpu = (tree.cpu_seconds() - cpu_begin) / (len(times) - 1 - begin)
            return Cost([b - a for a, b in itertools.pairwise(times[1:])], cpu)
        if program.popen.poll() is not None and len(_times(marks)) < last:
            raise program.failure(f"ended after {len(times)} of {last} rounds")
        if time.monotonic() > until:
            raise program.failure(f"came to {len(times)} of {last} rounds in {seconds:g} s")
        time.sleep(0.005)  # marks are lines of a file, which tells nobody; each has its own time


def _times(marks: Path) -> list[float]:
    if not marks.exists():
        return []
    lines = marks.read_text().split("\n")[:-1]  # a line that is being written has no end yet
    return [json.loads(line)["time"] for line in lines]


def _say(what: str) -> None:
    print(f"{what} ...", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
