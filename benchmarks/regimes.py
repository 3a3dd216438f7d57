"""Compare the policies that choose each round's regime, by model quality and cost.

    python benchmarks/regimes.py --data DIR                             # letters, everything
    python benchmarks/regimes.py --data DIR --scenario mine.toml        # your own
    python benchmarks/regimes.py --data DIR --datasets heart,diabetes   # other data: A, B and P

Each run is the real coordinator, store, policies and merging, over virtual devices and a virtual
datacenter in virtual time (`simulation.py`). A scenario is a TOML file (`scenario.py` has its
schema, `scenarios/` the named ones); each scenario of the random family is generated from a number.

Figures: `regret/<scenario>/<policy>`, accuracy points below the best fixed policy in hindsight
(mean over seeds), where the scenario "random" is the family, whose policies are listed also with
the endings -p90 and -worst, and with -left-out, where the best policy of each seed is chosen by the
other seeds; `savings/B/<transfers|cost>`, the factors that adaptive saves in B until it reaches the
final accuracy of purely federated rounds. With `--datasets` they are
`regret/<data set>/<problem>/<policy>` (problems.py); in a regression in per cent of the lowest root
mean square error.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness import command_line, figures
from harness.figures import Target
from regime_simulation import leave_one_out
from regime_simulation.changes import changed
from regime_simulation.contenders import PROBLEM_POLICIES, contenders, fixed
from regime_simulation.curves import Curve, chart
from regime_simulation.data_sets import DATA_SETS, folder_of
from regime_simulation.problems import PROBLEMS, figure_key, load_problems
from regime_simulation.runs import Row, measure
from regime_simulation.scenario import Scenario, load, random_scenario
from regime_simulation.simulation import Outcome

HERE = Path(__file__).parent
NAMED = ("a", "b", "c")
REPORTED = 1000
"""First number of the reported random scenarios, none of which was used for tuning."""
FAMILY = 30
FAMILY_SEEDS = (11, 12, 13)
QUICK = ("datacenter", "federated", "transfer", "rule", "adaptive")
SMOKE = ("federated", "adaptive")
TARGETS = {"regret/*/adaptive": Target(at_most=0.5, full_size=True)}
SAVINGS = "B"
"""Scenario in which the public data complements the devices' data."""


@command_line.script
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = command_line.options(__doc__ or "", argv, _more_options)
    family: list[Scenario] = []
    policies = options.policies.split(",") if options.policies else None
    if options.scenario:
        named = [load(path) for path in options.scenario]
    elif options.datasets:
        problems = options.problems.split(",")
        named = load_problems(options.datasets.split(","), problems, options.eval_data)
        named += [changed(each, change) for change in options.change for each in named]
        policies = policies or list(PROBLEM_POLICIES)
        policies += list(leave_one_out.VARIANTS) if options.leave_one_out else []
    else:
        named = [load(HERE / "scenarios" / f"{name}.toml") for name in NAMED]
        family = [
            random_scenario(number, FAMILY_SEEDS)
            for number in range(options.family, options.family + options.count)
        ]
    folder = folder_of(options, {scenario.data for scenario in [*named, *family]})
    max_seeds = options.seeds
    if options.quick:
        policies, max_seeds, family = policies or list(QUICK), 1, family[:2]
    if options.smoke:
        policies, max_seeds, options.jobs = policies or list(SMOKE), 1, 1
        named, family = [_shortened(each) for each in (named[0], named[1], family[0])], []
    named, family = _fewer_seeds(named, max_seeds), _fewer_seeds(family, max_seeds)
    if options.only_family:
        named = []
    rows, failed = measure([*named, *family], policies, folder, options.jobs, options.results)
    results: dict[str, float] = {}
    for scenario in named:
        print(f"\n{scenario.name}: {scenario.title or 'no title'}\n")
        print(_table(scenario, rows))
        for policy, regret in regrets(scenario, rows).items():
            key = figure_key(scenario) if options.datasets else scenario.name
            results[f"regret/{key}/{policy}"] = statistics.mean(regret.values())
    if options.leave_one_out:
        choices = leave_one_out.chosen(named, lambda scenario: regrets(scenario, rows))
        print(f"\nconstants chosen on the other data sets:\n\n{leave_one_out.table(choices)}")
        keys = {scenario.name: figure_key(scenario) for scenario in named}
        results |= {
            f"regret/{keys[name]}/adaptive-left-out": regret
            for _, by_scenario in choices.values()
            for name, (regret, _) in by_scenario.items()
        }
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
    figures.write(options.json, "regimes", figures.machine(), results, TARGETS)
    if options.plot:
        options.plot.write_text(plot(named, rows), encoding="utf-8")
    for sentence in failed:
        print(f"\nnot in the figures: {sentence}", file=sys.stderr)
    return 1 if failed else 0


def _more_options(parser: argparse.ArgumentParser) -> None:
    command_line.add_data(parser)
    parser.add_argument(
        "--datasets",
        metavar="A,B",
        help=f"run the problems of these data sets instead: {', '.join(DATA_SETS)}",
    )
    parser.add_argument(
        "--problems", metavar="A,P", default=",".join(PROBLEMS), help="only these problems"
    )
    parser.add_argument(
        "--eval-data",
        choices=("public", "target"),
        default="public",
        help="rows of the task's eval_data() in these problems",
    )
    parser.add_argument(
        "--change",
        action="append",
        default=[],
        metavar="CHANGE",
        help="with --datasets: run each problem once more with loss=10 (and the inverse learning "
        "rate), steps=3 (at a third of it), dropout=0.3, renamed (classes) or shuffled (devices); "
        "may be repeated",
    )
    parser.add_argument(
        "--leave-one-out",
        action="store_true",
        help="with several --datasets: choose the constants of `adaptive` for each data set from "
        "the other ones, and print its regret with them",
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


def _shortened(scenario: Scenario) -> Scenario:
    """The scenario with so little training that only its code is tried."""
    federated = scenario.federated.model_copy(update={"cohort": 2, "steps": 1})
    run = scenario.run.model_copy(update={"ticks": 2})
    clients = 8 * scenario.split.zones
    split = scenario.split.model_copy(update={"clients": clients, "public_rows": 200})
    return scenario.model_copy(update={"federated": federated, "run": run, "split": split})


def _fewer_seeds(scenarios: Sequence[Scenario], count: int | None) -> list[Scenario]:
    return [scenario.model_copy(update={"seeds": scenario.seeds[:count]}) for scenario in scenarios]


# -- figures ---------------------------------------------------------------------------------------


def scores(scenario: Scenario, rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Score of each run, by policy and seed."""
    by_policy: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        if row.scenario == scenario.name and row.seed in scenario.seeds:
            by_policy[row.policy][row.seed] = row.outcome.score
    return {name: by_policy[name] for name in contenders(scenario) if name in by_policy}


def regrets(
    scenario: Scenario, rows: Sequence[Row], *, left_out: bool = False
) -> dict[str, dict[int, float]]:
    """Points below the best fixed policy in hindsight (by its mean over seeds), by seed.

    Of a regression: the error above the lowest one, in per cent of it. With `left_out` the best
    policy of a seed is chosen by the other seeds. Otherwise it is best by chance too, so that even
    the best policy has a regret above zero.
    """
    reached = scores(scenario, rows)
    seeds = {seed for by_seed in reached.values() for seed in by_seed}
    # A policy that diverged with one seed has no mean over all.
    family = [name for name in fixed(scenario) if reached.get(name, {}).keys() == seeds]
    if not family:
        return {}
    lower = DATA_SETS[scenario.data].lower_is_better

    def best(without: int | None) -> str:
        def mean(name: str) -> float:
            scored = reached[name].items()
            return statistics.mean(value for seed, value in scored if seed != without)

        return (min if lower else max)(family, key=mean)

    chosen = {seed: best(seed if left_out else None) for seed in seeds}

    def regret(seed: int, value: float) -> float:
        reference = reached[chosen[seed]][seed]
        return 100 * (value / reference - 1) if lower else reference - value

    return {
        name: {seed: regret(seed, value) for seed, value in by_seed.items()}
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
        reached = next((p for p in outcome.trace if p.score >= goal.score), None)
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
        "score",
        "regret",
        "federated",
        "hybrid",
        "datacenter",
        "comparisons",
        "cost",
        "seconds",
        "decisions",
    )
    lines = []
    regret = regrets(scenario, rows)
    digits = 3 if DATA_SETS[scenario.data].lower_is_better else 1
    for policy, by_seed in scores(scenario, rows).items():
        outcomes = [
            row.outcome for row in rows if row.scenario == scenario.name and row.policy == policy
        ]
        values = list(by_seed.values())
        spread = f" +-{statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
        counts = [
            f"{statistics.mean(outcome.rounds.get(regime, 0) for outcome in outcomes):.0f}"
            for regime in ("federated", "hybrid", "datacenter")
        ]
        lines.append(
            (
                policy,
                f"{statistics.mean(values):.{digits}f}{spread}",
                f"{statistics.mean(regret[policy].values()):.1f}" if regret else "-",
                *counts,
                f"{statistics.mean(outcome.comparisons for outcome in outcomes):.1f}",
                f"{statistics.mean(outcome.cost for outcome in outcomes):.1f}",
                f"{statistics.mean(outcome.seconds for outcome in outcomes):.1f}",
                outcomes[0].decisions,
            )
        )
    return figures.table(header, lines)


def _family(family: Sequence[Scenario], rows: Sequence[Row]) -> tuple[dict[str, float], str]:
    """Figures and table of the random family; a scenario's regret is its mean over seeds."""
    results: dict[str, float] = {}
    lines: dict[str, list[str]] = {}
    repeated = all(len(scenario.seeds) > 1 for scenario in family)
    for suffix, left_out in (("", False), ("-left-out", True))[: 1 + repeated]:
        by_policy: dict[str, list[float]] = defaultdict(list)
        for scenario in family:
            for policy, by_seed in regrets(scenario, rows, left_out=left_out).items():
                by_policy[policy].append(statistics.mean(by_seed.values()))
        for policy, values in by_policy.items():
            ordered = sorted(values)
            summary = {
                "": statistics.mean(values),
                "-p90": ordered[round(0.9 * (len(ordered) - 1))],
                "-worst": ordered[-1],
            }
            key = f"regret/random/{policy}{suffix}"
            results |= {f"{key}{part}": figure for part, figure in summary.items()}
            cells = lines.setdefault(policy, [policy, str(len(values))])
            cells += [f"{figure:.1f}" for figure in summary.values()]
    columns = ("mean", "90 %", "worst")
    others = tuple(f"{column}, best by other seeds" for column in columns) if repeated else ()
    return results, figures.table(("policy", "scenarios", *columns, *others), list(lines.values()))


def plot(named: Sequence[Scenario], rows: Sequence[Row]) -> str:
    """Accuracy by cost, a panel for each scenario, means over seeds."""
    panels: dict[str, list[Curve]] = {}
    for scenario in named:
        runs: Mapping[str, list[Outcome]] = defaultdict(list)
        for row in rows:
            if row.scenario == scenario.name:
                runs[row.policy].append(row.outcome)
        panels[f"{scenario.name}: {scenario.title}"] = [
            Curve(policy, [[(p.cost, p.score) for p in outcome.trace] for outcome in outcomes])
            for policy, outcomes in runs.items()
            if policy in (*QUICK, "hybrid", "alternate") and policy != "rule"
        ]
    return chart(panels, "cost", "accuracy of the served model, %")


if __name__ == "__main__":
    sys.exit(main())
