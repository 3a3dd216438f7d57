"""Compare simulated runs of `regimes.py` with the same jobs through the real product.

    python benchmarks/regimes_product.py --data DIR

Each problem is trained twice with the same splits of the data: by `isthmus compare`, with a process
for each device, a datacenter rank and secure aggregation; and as `regimes.py` does it, with virtual
devices in virtual time. Secure aggregation selects cohorts by tickets that nobody can choose, so
the cohorts differ, and with them the models; the rest is meant to be equal.

Figures: `<product|virtual>/<data set>/<problem>/<policy>`: mean score of the delivered
model over splits (per cent of the test rows, or the root mean square error).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import command_line, figures
from harness.processes import isthmus
from regime_simulation import data_sets
from regime_simulation.data_sets import folder_of
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


@command_line.script
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""

    def more(parser: argparse.ArgumentParser) -> None:
        command_line.add_data(parser)
        parser.add_argument("--seeds", type=int, default=3, help="runs of each policy")

    options = command_line.options(__doc__ or "", argv, more)
    problems, seeds, policies = command_line.of_size(
        options,
        full=(PROBLEMS, options.seeds, POLICIES),
        quick=(QUICK, 1, POLICIES),
        smoke=(QUICK, 1, POLICIES[:1]),
    )
    folder = folder_of(options, {data for data, _ in problems})
    results: dict[str, float] = {}
    rows = []
    for data, problem in problems:
        (scenario,) = load_problems([data], [problem])
        if options.smoke:
            scenario = shortened(scenario)
        real = real_scores(scenario, folder, seeds, policies)
        for policy in policies:
            virtual = [
                simulate(scenario, seed, folder, {"policy": policy}) for seed in range(1, seeds + 1)
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


def shortened(scenario: Scenario) -> Scenario:
    """The scenario with so few devices and rounds that only the code is tried."""
    return scenario.model_copy(
        update={
            "split": scenario.split.model_copy(update={"clients": 3}),
            "run": scenario.run.model_copy(update={"ticks": 1}),
            "federated": scenario.federated.model_copy(update={"cohort": 3, "steps": 1}),
        }
    )


def real_scores(
    scenario: Scenario, folder: Path, seeds: int, policies: Sequence[str]
) -> Mapping[str, list[float]]:
    """Scores by policy, one for each split, of models that `isthmus compare` trained."""
    scores: dict[str, list[float]] = {policy: [] for policy in policies}
    for seed in range(1, seeds + 1):
        with tempfile.TemporaryDirectory(prefix="regimes-product-") as scratch:
            for policy in policies:
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
    options = ("--seeds", "1", "--policies", policy, "--run-dir", str(runs))
    isthmus("compare", str(job), *options, environment={"PYTHONPATH": str(HERE)})
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
