"""Compare simulated runs of `regimes.py` with the same jobs through the real product.

    python benchmarks/regimes_product.py --data DIR

Each problem is trained twice with the same splits of the data: by `isthmus compare`, with a process
for each device, a datacenter rank and secure aggregation; and as `regimes.py` does it, with virtual
devices in virtual time. Secure aggregation selects cohorts by tickets that nobody can choose, so
the cohorts differ, and with them the models; the rest is meant to be equal.

Figures: `product/<data set>/<problem>/<policy>` and `virtual/...`: mean score of the delivered
model over splits (per cent of the test rows, or the root mean square error).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import figures
from regime_simulation import data_sets
from regime_simulation.problems import figure_key, load_problems
from regime_simulation.scenario import Scenario, job_for
from regime_simulation.simulation import simulate
from safetensors.torch import load_file

from isthmus.job import Job, with_changes
from isthmus.task import load_task
from isthmus.task.scoring import build_model

PROBLEMS = (("heart", "A"), ("diabetes", "B"), ("heart", "P"))
POLICIES = ("federated", "rule", "adaptive")
QUICK = (("diabetes", "P"),)
HERE = Path(__file__).parent


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--data", type=Path, required=True, help="folder with the data sets")
        parser.add_argument("--seeds", type=int, default=3, help="runs of each policy")

    options = figures.options(__doc__ or "", argv, more)
    problems, seeds = (QUICK, 1) if options.quick else (PROBLEMS, options.seeds)
    results: dict[str, float] = {}
    rows = []
    for data, problem in problems:
        (scenario,) = load_problems([data], [problem])
        real = real_scores(scenario, options.data, seeds)
        for policy in POLICIES:
            virtual = [
                simulate(scenario, seed, options.data, {"policy": policy})
                for seed in range(1, seeds + 1)
            ]
            key = f"{figure_key(scenario)}/{policy}"
            scores = [outcome.score for outcome in virtual]
            results[f"product/{key}"] = statistics.mean(real[policy])
            results[f"virtual/{key}"] = statistics.mean(scores)
            paired = [a - b for a, b in zip(real[policy], scores, strict=True)]
            noise = statistics.stdev(paired) / len(paired) ** 0.5 if len(paired) > 1 else 0.0
            rows.append(
                (
                    key,
                    f"{statistics.mean(real[policy]):.3f}",
                    f"{statistics.mean(scores):.3f}",
                    f"{statistics.mean(paired):+.3f} +- {noise:.3f}",
                )
            )
    header = ("score of the delivered model", "product", "virtual", "difference")
    print(figures.table(header, rows))
    figures.write(options.json, "regimes_product", figures.machine(), results)
    return 0


def real_scores(scenario: Scenario, folder: Path, seeds: int) -> Mapping[str, list[float]]:
    """Scores by policy, one for each split, of models that `isthmus compare` trained."""
    scores: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for seed in range(1, seeds + 1):
        with tempfile.TemporaryDirectory(prefix="regimes-product-") as scratch:
            for policy in POLICIES:
                job = product_job(scenario, seed, folder, policy)
                path = Path(scratch) / f"{policy}.toml"
                path.write_text(toml(job.model_dump(exclude_defaults=True)), encoding="utf-8")
                scores[policy].append(score(scenario, job, compare(path, policy)))
    return scores


def product_job(scenario: Scenario, seed: int, folder: Path, policy: str) -> Job:
    """The job of a simulated run with secure aggregation, and a process for each device."""
    job = job_for(scenario, seed, folder, {"policy": policy})
    return with_changes(
        job,
        {
            "federated.clients": scenario.split.clients,
            "federated.secure_aggregation": True,
            "datacenter.ranks": 1,
            "time.join_seconds": 300.0,
        },
    )


def compare(job: Path, policy: str) -> Path:
    """Train a job under its own policy, which keeps its rounds; returns the delivered model."""
    runs = job.with_suffix("")
    command = [str(Path(sys.executable).with_name("isthmus")), "compare", str(job), "--seeds", "1"]
    command += ["--policies", policy, "--run-dir", str(runs)]
    environment = {**os.environ, "PYTHONPATH": str(HERE), "FLWR_TELEMETRY_ENABLED": "0"}
    subprocess.run(command, env=environment, check=True, stdout=sys.stderr)
    return runs / f"{policy}-1" / "model.safetensors"


@torch.no_grad()
def score(scenario: Scenario, job: Job, model: Path) -> float:
    """Score of a delivered model on the test set."""
    assert job.task.data is not None
    task = load_task(job.task.source, job.task.settings, base=HERE, data=Path(job.task.data))
    module = build_model(task, 0)
    module.load_state_dict(load_file(model))
    rows, _ = data_sets.test_rows(scenario.data, Path(job.task.data), evaluated=False)
    return float(data_sets.score(scenario.data, module, rows))


def toml(value: Any) -> str:
    """Write a table as TOML, its inner tables inline.

    >>> print(toml({"name": "a", "seed": 1, "task": {"settings": {"lr": 0.5, "hidden": [4]}}}))
    name = "a"
    seed = 1
    task = {settings = {lr = 0.5, hidden = [4]}}
    """
    return "\n".join(f"{key} = {_inline(inner)}" for key, inner in value.items())


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_inline(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return json.dumps(value)


if __name__ == "__main__":
    sys.exit(main())
