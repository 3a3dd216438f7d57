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
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import compression_datacenters
from harness import figures

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
LAST = 5
"""Rounds whose accuracies are averaged: that of a single round is noisy."""

COMMON = ("strategy.policy=federated", "datacenter.ranks=0")
COSINE = "learning_rate.schedule=cosine"
"""Without it the noise of rounding is as large in the last round as in the first."""


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
    ),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Bytes of a device in a round, mean over all, and the accuracy at the end."""

    up: float
    down: float
    accuracy: float


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--data", type=Path, required=True, help="folder with the data sets")
        parser.add_argument("--seeds", type=int, default=3, help="runs of each job")
        parser.add_argument("--task", help="measure this task only, or datacenters")

    options = figures.options(__doc__ or "", argv, more)
    results: dict[str, float] = {}
    rows = []
    for subject in SUBJECTS[:1] if options.quick else SUBJECTS:
        if options.task not in (None, subject.name):
            continue
        seeds = range(1, 2 if options.quick else 1 + options.seeds)
        plain = [measure(subject, seed, options.data, compressed=False) for seed in seeds]
        small = [measure(subject, seed, options.data, compressed=True) for seed in seeds]
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
    if not options.quick and options.task in (None, "datacenters"):
        whole, sent = compression_datacenters.compare(
            options.data, options.seeds, compression_datacenters.ROUNDS
        )
        results["datacenter_bytes_ratio"] = whole.up / sent.up
        results["perplexity_ratio"] = sent.perplexity / whole.perplexity
        change = f"{100 * (results['perplexity_ratio'] - 1):+.2f} %"
        scores = (f"{whole.perplexity:.3f}", f"{sent.perplexity:.3f}", change)
        rows.append(("datacenters, perplexity", figures.times(whole.up / sent.up), "", *scores))
    header = ("task", "fewer bytes up", "down", "accuracy", "compressed", "points lost")
    print(figures.table(header, rows))
    figures.write(options.json, "compression", figures.machine(), results)
    return 0


def measure(subject: Subject, seed: int, data: Path, *, compressed: bool) -> Outcome:
    """Run a job, and read bytes and accuracy from its round log."""
    changes = [*COMMON, *subject.changes, f"seed={seed}", f"rounds={subject.rounds}"]
    if subject.name == "mnist":
        changes.append(f"task.data={data}")
    if subject.name == "shakespeare":
        changes.append(f"task.data={data / 'tinyshakespeare.txt'}")
    if compressed:
        changes.append(f"federated.compression={subject.compression}")
        changes.append(f"federated.download_bits={subject.download_bits}")
    with tempfile.TemporaryDirectory(prefix="compression-") as scratch:
        job, run = subject.job, Path(scratch) / "run"
        if isinstance(job, str):
            job, text = Path(scratch) / "job.toml", job
            job.write_text(text, encoding="utf-8")
        settings = [part for change in changes for part in ("--set", change)]
        _isthmus("run", str(job), "--quiet", "--run-dir", str(run), *settings)
        return outcome_of(json.loads(_isthmus("report", str(run), "--json")))


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


def _isthmus(*arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("isthmus")), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(HERE), "FLWR_TELEMETRY_ENABLED": "0"}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
