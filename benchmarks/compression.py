"""Compare bytes and accuracy of rounds with and without compression, up and down.

    python benchmarks/compression.py --data DIR

Each job is run twice for each seed by `isthmus run`, with a process for each device and real secure
aggregation; the data, the cohort, the local training and the rounds are the same. One has neither
`[federated.compression]` nor `federated.download_bits`, the other one has both. Tasks: the digits
of scikit-learn (the job of examples/digits with nine tenths of the images on its devices, without
its datacenter and momentum), MNIST (10,000 images divided among ten devices by Dirichlet shares of
each digit; a perceptron), and the next character of Shakespeare by speaker (the job of
examples/shakespeare with eight speakers, half the steps and half the batches, without a
datacenter). Learning rates fall by a cosine. Two datacenters train the transformer of Shakespeare
with and without `[datacenter.compression]` (`compression_datacenters.py`).

Figures: `bytes_ratio/up/<task>`, bytes of a device's masked vector without compression over those
with it, mean over all rounds; `bytes_ratio/down/<task>`, the same of models or their changes;
`accuracy_gap/<task>`, percentage points of held-out accuracy that compression loses, mean over the
last rounds and seeds; `datacenter_bytes_ratio`, bytes of a datacenter's update without compression
over those with it, and `perplexity_ratio`, the perplexity with compression over that without.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import compression_datacenters
from harness import command_line, figures
from harness.figures import Target
from harness.processes import isthmus
from regime_simulation.readers import MNIST_FILES

from isthmus.errors import UserError

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
LAST = 5
"""Rounds whose accuracies are averaged: that of a single round is noisy."""

FILES = (*MNIST_FILES, "tinyshakespeare.txt")
TARGETS = {
    "bytes_ratio/up/*": Target(at_least=20),
    "bytes_ratio/down/*": Target(at_least=8),
    "accuracy_gap/*": Target(at_most=0.5, full_size=True),
    "datacenter_bytes_ratio": Target(at_least=100),
    "perplexity_ratio": Target(at_most=1.01),
}

COMMON = ("strategy.policy=federated", "datacenter.ranks=0")
COSINE = "learning_rate.schedule=cosine"
"""Without it the noise of rounding is as large in the last round as in the first."""
SMOKE = ("budget=1e6", "federated.clients=3", "federated.cohort=3", "federated.quorum=3")
SMOKE_DATACENTERS = (
    "datacenter.steps=1",
    "learning_rate.warmup_steps=0",
    "task.settings.context=8",
)
"""Changes of the jobs for `--smoke`."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A task, its rounds, and how its updates are compressed."""

    name: str
    job: Path | str
    """A job file, or the text of one."""
    rounds: int
    compression: str
    changes: tuple[str, ...] = ()
    download_bits: int = 3
    data: str | None = None
    """File of its data in the folder with the data sets, `.` if it is that folder; None without."""


MNIST = """
name = "mnist"

[task]
source = "compression_mnist:Mnist"

[federated]
clients = 10
cohort = 10
local_epochs = 1
batch_size = 16
"""

SUBJECTS = (
    Subject(
        "digits",
        EXAMPLES / "digits" / "job.toml",
        100,
        "{bits=3, one_in=5, step_ahead=false}",
        (
            "budget=1e6",
            'strategy.server_optimizer={name="SGD",options={lr=1.0}}',
            f"task.settings.fleet_share={[0.9] * 10}",
            "learning_rate.federated_round_steps=30",
            COSINE,
        ),
    ),
    Subject(
        "mnist",
        MNIST,
        100,
        "{bits=2, one_in=4, step_ahead=false}",
        ("learning_rate.federated_round_steps=50", COSINE),
        data=".",
    ),
    Subject(
        "shakespeare",
        EXAMPLES / "shakespeare" / "job.toml",
        200,
        "{bits=3, one_in=6, step_ahead=0.85, "
        'one_in_of={"positions.*"=1, "*norm*"=1, "*.bias"=1, "characters.*"=1}}',
        (
            "federated.clients=8",
            "federated.cohort=8",
            "federated.local_steps=10",
            "federated.batch_size=8",
            "task.settings.speakers=8",
            "task.settings.public_held_out=[]",
            COSINE,
        ),
        data="tinyshakespeare.txt",
    ),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Bytes of a device in a round, mean over all, and the accuracy at the end."""

    up: float
    down: float
    accuracy: float


@command_line.script
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""

    def more(parser: argparse.ArgumentParser) -> None:
        command_line.add_data(parser)
        parser.add_argument("--seeds", type=int, default=3, help="runs of each job")
        parser.add_argument("--task", help="measure this task only, or datacenters")

    options = command_line.options(__doc__ or "", argv, more)
    if options.task not in (None, "datacenters", *(subject.name for subject in SUBJECTS)):
        raise UserError(f"--task={options.task}: there is no such task")
    # The digits come with scikit-learn, and --quick measures no other task.
    known = [SUBJECTS[0]] if options.quick or options.smoke else list(SUBJECTS)
    subjects = [each for each in known if options.task in (None, each.name)]
    datacenters = not options.quick and options.task in (None, "datacenters")
    needs_data = datacenters or any(each.data is not None for each in subjects)
    data = command_line.data_folder(options, *FILES) if needs_data else Path()
    if options.smoke:
        subjects = [dataclasses.replace(each, rounds=2, changes=SMOKE) for each in subjects]
    results: dict[str, float] = {}
    rows = []
    seeds = range(1, 2 if options.quick or options.smoke else 1 + options.seeds)
    for subject in subjects:
        plain = [measure(subject, seed, data, compressed=False) for seed in seeds]
        small = [measure(subject, seed, data, compressed=True) for seed in seeds]
        up = sum(each.up for each in plain) / sum(each.up for each in small)
        down = sum(each.down for each in plain) / sum(each.down for each in small)
        before, after = (statistics.mean(each.accuracy for each in one) for one in (plain, small))
        results |= {
            f"bytes_ratio/up/{subject.name}": up,
            f"bytes_ratio/down/{subject.name}": down,
            f"accuracy_gap/{subject.name}": 100 * (before - after),
        }
        scores = (f"{before:.2%}", f"{after:.2%}", f"{100 * (before - after):+.2f}")
        rows.append((subject.name, figures.times(up), figures.times(down), *scores))
    if datacenters:
        rounds = 4 if options.smoke else compression_datacenters.ROUNDS
        whole, sent = compression_datacenters.compare(
            data, len(seeds), rounds, SMOKE_DATACENTERS if options.smoke else ()
        )
        results["datacenter_bytes_ratio"] = whole.up / sent.up
        results["perplexity_ratio"] = sent.perplexity / whole.perplexity
        change = f"{100 * (results['perplexity_ratio'] - 1):+.2f} %"
        scores = (f"{whole.perplexity:.3f}", f"{sent.perplexity:.3f}", change)
        rows.append(("datacenters, perplexity", figures.times(whole.up / sent.up), "", *scores))
    header = ("task", "fewer bytes up", "down", "accuracy", "compressed", "points lost")
    print(figures.table(header, rows))
    figures.write(options.json, "compression", figures.machine(), results, TARGETS)
    return 0


def measure(subject: Subject, seed: int, data: Path, *, compressed: bool) -> Outcome:
    """Run a job, and read bytes and accuracy from its round log."""
    changes = [*COMMON, *subject.changes, f"seed={seed}", f"rounds={subject.rounds}"]
    if subject.data is not None:
        changes.append(f"task.data={data / subject.data}")
    if compressed:
        changes.append(f"federated.compression={subject.compression}")
        changes.append(f"federated.download_bits={subject.download_bits}")
    with tempfile.TemporaryDirectory(prefix="compression-") as scratch:
        job, run = subject.job, Path(scratch) / "run"
        if isinstance(job, str):
            job, text = Path(scratch) / "job.toml", job
            job.write_text(text, encoding="utf-8")
        settings = [part for change in changes for part in ("--set", change)]
        environment = {"PYTHONPATH": str(HERE)}
        options = ("--quiet", "--run-dir", str(run), *settings)
        isthmus("run", str(job), *options, environment=environment)
        return outcome_of(json.loads(isthmus("report", str(run), "--json")))


def outcome_of(report: dict[str, Any]) -> Outcome:
    """Bytes and accuracy of a report."""
    rows = [receipt for row in report["rounds"] for receipt in row["receipts"]]
    receipts = [receipt for receipt in rows if receipt["status"] == "accepted"]
    accuracies = [row["metrics"]["accuracy"] for row in report["rounds"][-LAST:]]
    return Outcome(
        statistics.mean(receipt["bytes_in"] for receipt in receipts),
        statistics.mean(receipt["bytes_out"] for receipt in receipts),
        statistics.mean(accuracies),
    )


if __name__ == "__main__":
    sys.exit(main())
