"""Execute the runs of `regimes.py`, in several processes, and keep their outcomes in a file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from regime_simulation.contenders import contenders
from regime_simulation.data_sets import DATA_SETS
from regime_simulation.leave_one_out import VARIANTS
from regime_simulation.scenario import Scenario
from regime_simulation.simulation import Outcome, Point, simulate

from isthmus.errors import IsthmusError, UserError


@dataclasses.dataclass(frozen=True)
class Row:
    """The outcome of one run."""

    scenario: str
    policy: str
    seed: int
    outcome: Outcome
    digest: str = ""
    """Digest of the scenario, the policy's settings and the data."""


def measure(
    scenarios: Iterable[Scenario],
    policies: Sequence[str] | None,
    folder: Path,
    jobs: int,
    results: Path | None,
) -> tuple[list[Row], list[str]]:
    """Run every policy, or only `policies`, in every scenario with every seed.

    Returns the finished runs, and a sentence for each run that failed.

    Raises:
        UserError: a policy is unknown, or the files of a data set are missing in `folder`.
    """
    scenarios = list(scenarios)
    current = {
        (scenario.name, policy): digest
        for scenario in scenarios
        for policy, digest in _digests(scenario, folder).items()
    }
    kept = list(_kept(results))
    rows = [row for row in kept if row.digest == current.get((row.scenario, row.policy))]
    outdated = sum((row.scenario, row.policy) in current for row in kept) - len(rows)
    if outdated:
        print(
            f"{outdated} runs in {results} are of another scenario or other data", file=sys.stderr
        )
    finished = {(row.scenario, row.policy, row.seed) for row in rows}
    work = []
    for scenario in scenarios:
        known = contenders(scenario)
        unknown = set(policies or ()) - set(known) - {"fill"}
        if unknown:
            raise UserError(f"no policy {sorted(unknown)[0]!r}; there are {', '.join(known)}")
        work += [
            (scenario, seed, name, folder)
            for seed in scenario.seeds
            for name in policies or [each for each in known if each not in VARIANTS]
            if name in known and (scenario.name, name, seed) not in finished
        ]
    started = time.monotonic()
    failed: list[str] = []
    for done, row in enumerate(_results(work, jobs), 1):
        if isinstance(row, Row):
            rows.append(row)
            _keep(results, row)
        else:
            failed.append(row)
        seconds = time.monotonic() - started
        print(f"{done}/{len(work)} runs, {seconds:.0f} s", file=sys.stderr, flush=True)
    return sorted(rows, key=lambda row: (row.scenario, row.policy, row.seed)), failed


def _results(work: Sequence[tuple[Any, ...]], jobs: int) -> Iterator[Row | str]:
    """Yield the runs as they end; they use `jobs` processes, or only this one."""
    if jobs <= 1:
        yield from (_run_one(*run) for run in work)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(_run_one, *run) for run in work]):
            yield future.result()


def _run_one(scenario: Scenario, seed: int, name: str, folder: Path) -> Row | str:
    """Execute one run; returns a sentence if it failed."""
    trace = 0 if scenario.name.startswith("random-") else 1
    try:
        outcome = simulate(scenario, seed, folder, contenders(scenario)[name], trace)
    except IsthmusError as error:
        return f"{name} in {scenario.name}, seed {seed}: {error}"
    return Row(scenario.name, name, seed, outcome, _digests(scenario, folder)[name])


def _digests(scenario: Scenario, folder: Path) -> dict[str, str]:
    """Digests of a run's scenario, settings and data, by policy; seed and code are excluded."""
    table = scenario.model_dump(mode="json", exclude={"title", "seeds"})
    data_digest = DATA_SETS[scenario.data].digest(folder)
    return {
        policy: hashlib.sha256(json.dumps([table, changes, data_digest]).encode()).hexdigest()
        for policy, changes in contenders(scenario).items()
    }


def _kept(results: Path | None) -> Iterator[Row]:
    if results is None or not results.exists():
        return
    for line in results.read_text(encoding="utf-8").splitlines():
        table = json.loads(line)
        outcome = table.pop("outcome")
        trace = tuple(Point(**point) for point in outcome.pop("trace"))
        yield Row(**table, outcome=Outcome(**outcome, trace=trace))


def _keep(results: Path | None, row: Row) -> None:
    if results is None:
        return
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(row)) + "\n")
