"""Compare the policies that choose each round's regime, by model quality and cost.

    python benchmarks/regimes.py --data letter-recognition.data            # everything
    python benchmarks/regimes.py --data ... --scenario mine.toml --jobs 2  # your own

Each run is the real coordinator, store, policies and merging, over virtual devices and a virtual
datacenter in virtual time (`simulation.py`). A scenario is a TOML file (`scenario.py` has its
schema, `scenarios/` the named ones); each scenario of the random family is generated from a number.
The figures are `regret/<scenario>/<policy>`: accuracy points below the best fixed policy in
hindsight (mean over seeds); `regret/random/<policy>` with `-p90` and `-worst` for the family; and
`savings/B/transfers` and `savings/B/cost`: the factors that `adaptive` saves in B until it reaches
the final accuracy of purely federated rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from harness import figures
from regime_simulation.contenders import contenders, fixed
from regime_simulation.curves import Curve, chart
from regime_simulation.scenario import Scenario, load, random_scenario
from regime_simulation.simulation import Outcome, Point, simulate

from isthmus.errors import IsthmusError, UserError

HERE = Path(__file__).parent
NAMED = ("a", "b", "c")
REPORTED = 1000
"""First number of the reported random scenarios, none of which was used for tuning."""
FAMILY = 30
FAMILY_SEEDS = (11, 12, 13)
QUICK = ("datacenter", "federated", "transfer", "rule", "adaptive")
SAVINGS = "B"
"""Scenario in which the public data complements the devices' data."""


@dataclasses.dataclass(frozen=True)
class Row:
    """The outcome of one run."""

    scenario: str
    policy: str
    seed: int
    outcome: Outcome
    digest: str = ""
    """Digest of the scenario, the policy's settings and the data."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = figures.options(__doc__ or "", argv, _more_options)
    try:
        data = _data(options.data)
        if options.scenario:
            named, family = [load(path) for path in options.scenario], []
        else:
            named = [load(HERE / "scenarios" / f"{name}.toml") for name in NAMED]
            family = [
                random_scenario(number, FAMILY_SEEDS)
                for number in range(options.family, options.family + options.count)
            ]
        policies = options.policies.split(",") if options.policies else None
        max_seeds = options.seeds
        if options.quick:
            policies, max_seeds, family = policies or list(QUICK), 1, family[:2]
        named, family = _fewer_seeds(named, max_seeds), _fewer_seeds(family, max_seeds)
        if options.only_family:
            named = []
        rows, failed = measure([*named, *family], policies, data, options.jobs, options.results)
    except UserError as error:
        print(f"regimes.py: {error}", file=sys.stderr)
        return 1
    results: dict[str, float] = {}
    for scenario in named:
        print(f"\n{scenario.name}: {scenario.title or 'no title'}\n")
        print(_table(scenario, rows))
        for policy, regret in regrets(scenario, rows).items():
            results[f"regret/{scenario.name}/{policy}"] = statistics.mean(regret.values())
    if family:
        print(f"\nrandom: {len(family)} scenarios of {len(family[0].seeds)} seeds\n")
        random_figures, table = _family(family, rows)
        results |= random_figures
        print(table)
    saved = savings(rows)
    if saved:
        results |= saved
        print(
            f"\nin {SAVINGS}, until adaptive reaches the final accuracy of federated rounds: "
            f"{figures.times(saved['savings/B/transfers'])} fewer edge transfers, "
            f"{figures.times(saved['savings/B/cost'])} less cost"
        )
    figures.write(options.json, "regimes", figures.machine(), results)
    if options.plot:
        options.plot.write_text(plot(named, rows), encoding="utf-8")
    for sentence in failed:
        print(f"\nnot in the figures: {sentence}", file=sys.stderr)
    return 1 if failed else 0


def _more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="UCI letter-recognition.data; default: in $ISTHMUS_TEST_DATA, or ../shared/data",
    )
    parser.add_argument(
        "--scenario",
        type=Path,
        action="append",
        metavar="FILE",
        help="run this scenario instead of the named ones and the family; may be repeated",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--policies", metavar="A,B", help="run only these policies")
    parser.add_argument(
        "--family",
        type=int,
        default=REPORTED,
        metavar="N",
        help=f"first number of the random scenarios; those from {REPORTED} on are for the report",
    )
    parser.add_argument("--count", type=int, default=FAMILY, help="number of random scenarios")
    parser.add_argument(
        "--seeds", type=int, metavar="N", help="use only the first N seeds of each scenario"
    )
    parser.add_argument("--only-family", action="store_true", help="skip the named scenarios")
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="append every finished run to FILE; the same command later skips these runs "
        "(delete the runs of a policy whose code has changed)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw quality by cost as SVG")


def _fewer_seeds(scenarios: Sequence[Scenario], count: int | None) -> list[Scenario]:
    return [scenario.model_copy(update={"seeds": scenario.seeds[:count]}) for scenario in scenarios]


def _data(given: Path | None) -> Path:
    name = "letter-recognition.data"
    folder = os.environ.get("ISTHMUS_TEST_DATA")
    path = given or (Path(folder) / name if folder else HERE.parents[1] / "shared" / "data" / name)
    if not path.is_file():
        raise UserError(f"there is no {path}; give UCI letter recognition with --data FILE")
    return path


# -- running ---------------------------------------------------------------------------------------


def measure(
    scenarios: Iterable[Scenario],
    policies: Sequence[str] | None,
    data: Path,
    jobs: int,
    results: Path | None,
) -> tuple[list[Row], list[str]]:
    """Run every policy, or only `policies`, in every scenario with every seed.

    Returns the finished runs, and a sentence for each run that failed.

    Raises:
        UserError: a policy is unknown.
    """
    scenarios = list(scenarios)
    current = {
        (scenario.name, policy): digest
        for scenario in scenarios
        for policy, digest in _digests(scenario, data).items()
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
            (scenario, seed, name, data)
            for seed in scenario.seeds
            for name in policies or known
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


def _run_one(scenario: Scenario, seed: int, name: str, data: Path) -> Row | str:
    """Execute one run; returns a sentence if it failed."""
    trace = 0 if scenario.name.startswith("random-") else 1
    try:
        outcome = simulate(scenario, seed, data, contenders(scenario)[name], trace)
    except IsthmusError as error:
        return f"{name} in {scenario.name}, seed {seed}: {error}"
    return Row(scenario.name, name, seed, outcome, _digests(scenario, data)[name])


def _digests(scenario: Scenario, data: Path) -> dict[str, str]:
    """Digests of a run's scenario, settings and data, by policy; seed and code are excluded."""
    table = scenario.model_dump(mode="json", exclude={"title", "seeds"})
    data_digest = hashlib.sha256(data.read_bytes()).hexdigest()
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


# -- figures ---------------------------------------------------------------------------------------


def accuracies(scenario: Scenario, rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Accuracy of each run, by policy and seed."""
    by_policy: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        if row.scenario == scenario.name and row.seed in scenario.seeds:
            by_policy[row.policy][row.seed] = row.outcome.accuracy
    return {name: by_policy[name] for name in contenders(scenario) if name in by_policy}


def regrets(scenario: Scenario, rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Points below the best fixed policy in hindsight (by its mean over seeds), by seed."""
    reached = accuracies(scenario, rows)
    family = [name for name in fixed(scenario) if name in reached]
    if not family:
        return {}
    best = max(family, key=lambda name: statistics.mean(reached[name].values()))
    return {
        name: {seed: reached[best][seed] - value for seed, value in by_seed.items()}
        for name, by_seed in reached.items()
    }


def savings(rows: Sequence[Row]) -> dict[str, float]:
    """Factors that `adaptive` saves in B until it reaches `federated`'s final accuracy.

    They are medians over seeds. A run without any transfer counts as one with one transfer.
    """
    runs: dict[tuple[str, int], Outcome] = {
        (row.policy, row.seed): row.outcome for row in rows if row.scenario == SAVINGS
    }
    transfers, costs = [], []
    for (policy, seed), outcome in runs.items():
        if policy != "adaptive" or ("federated", seed) not in runs:
            continue
        goal = runs["federated", seed]
        reached = next((p for p in outcome.trace if p.accuracy >= goal.accuracy), None)
        transfers.append(goal.trace[-1].transfers / max(reached.transfers, 1) if reached else 0.0)
        costs.append(goal.cost / reached.cost if reached else 0.0)
    if not costs:
        return {}
    return {
        "savings/B/transfers": statistics.median(transfers),
        "savings/B/cost": statistics.median(costs),
    }


def _table(scenario: Scenario, rows: Sequence[Row]) -> str:
    header = (
        "policy",
        "accuracy",
        "regret",
        "federated",
        "hybrid",
        "datacenter",
        "comparisons",
        "cost",
    )
    lines = []
    regret = regrets(scenario, rows)
    for policy, by_seed in accuracies(scenario, rows).items():
        outcomes = [
            row.outcome for row in rows if row.scenario == scenario.name and row.policy == policy
        ]
        values = list(by_seed.values())
        spread = f" +-{statistics.stdev(values):.1f}" if len(values) > 1 else ""
        counts = [
            f"{statistics.mean(outcome.rounds.get(regime, 0) for outcome in outcomes):.0f}"
            for regime in ("federated", "hybrid", "datacenter")
        ]
        lines.append(
            (
                policy,
                f"{statistics.mean(values):.1f}{spread}",
                f"{statistics.mean(regret[policy].values()):.1f}" if regret else "-",
                *counts,
                f"{statistics.mean(outcome.comparisons for outcome in outcomes):.1f}",
                f"{statistics.mean(outcome.cost for outcome in outcomes):.1f}",
            )
        )
    return figures.table(header, lines)


def _family(family: Sequence[Scenario], rows: Sequence[Row]) -> tuple[dict[str, float], str]:
    """Figures and table of the random family; a scenario's regret is its mean over seeds."""
    by_policy: dict[str, list[float]] = defaultdict(list)
    for scenario in family:
        for policy, by_seed in regrets(scenario, rows).items():
            by_policy[policy].append(statistics.mean(by_seed.values()))
    results: dict[str, float] = {}
    lines = []
    for policy, values in by_policy.items():
        ordered = sorted(values)
        p90 = ordered[min(len(ordered) - 1, round(0.9 * (len(ordered) - 1)))]
        results[f"regret/random/{policy}"] = statistics.mean(values)
        results[f"regret/random/{policy}-p90"] = p90
        results[f"regret/random/{policy}-worst"] = ordered[-1]
        cells = (statistics.mean(values), statistics.median(values), p90, ordered[-1])
        lines.append((policy, str(len(values)), *(f"{cell:.1f}" for cell in cells)))
    return results, figures.table(("policy", "scenarios", "mean", "median", "90 %", "worst"), lines)


def plot(named: Sequence[Scenario], rows: Sequence[Row]) -> str:
    """Accuracy by cost, a panel for each scenario, means over seeds."""
    panels: dict[str, list[Curve]] = {}
    for scenario in named:
        runs: Mapping[str, list[Outcome]] = defaultdict(list)
        for row in rows:
            if row.scenario == scenario.name:
                runs[row.policy].append(row.outcome)
        panels[f"{scenario.name}: {scenario.title}"] = [
            Curve(policy, [[(p.cost, p.accuracy) for p in outcome.trace] for outcome in outcomes])
            for policy, outcomes in runs.items()
            if policy in (*QUICK, "hybrid", "alternate") and policy != "rule"
        ]
    return chart(panels, "cost", "accuracy of the served model, %")


if __name__ == "__main__":
    sys.exit(main())
