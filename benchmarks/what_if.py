"""What `isthmus what-if` says of other policies, and what these reach in runs of their own.

    python benchmarks/what_if.py --data DIR --quick

Random scenarios of letter recognition (`regime_simulation/scenario.py`), in which the held-out rows
resemble the target. A policy trains one run; its log forecasts the held-out accuracy at the end of
runs of the other policies, with the same devices and data, and these runs are trained too.

Figures: `coverage/<policy>`, the share of these runs that end within the 90 % interval, by the
policy whose log was read; `error/<policy>`, the mean distance from the median, in points of
accuracy; `width/<policy>`, the mean length of the intervals, in points; `best_in_two/<policy>`, the
share of scenarios in which the best of all policies with a forecast is among the first two by their
medians; `known/<policy>`, the share of the other policies that have a forecast; `cpu_seconds`, of
one call.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import command_line, figures
from harness.figures import Target
from regime_simulation.data_sets import folder_of
from regime_simulation.scenario import Scenario, random_scenario
from regime_simulation.simulation import simulate

from isthmus.errors import IsthmusError
from isthmus_server.plan.what_if import WhatIf
from isthmus_server.storage.records import RoundRecord
from isthmus_server.storage.store import Store

READ = ("phases", "bandit")
"""Policies whose logs are read: they train several regimes, and some rounds in a row."""
COMPARED = ("datacenter", "federated", "alternate", "plateau", "bandit", "rule", "phases")
"""Policies whose runs are trained; `phases` is a third of datacenter rounds, then federated."""
METRIC = "accuracy"
FIRST = 20_000
"""First number of the reported scenarios, none of which was used to choose a constant."""
TARGETS = {
    "coverage/*": Target(at_least=0.85, at_most=0.95, full_size=True),
    "error/*": Target(at_most=1.5, full_size=True),
    "best_in_two/*": Target(at_least=0.8, full_size=True),
}


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What was said of one policy, and what it reached."""

    low: float
    median: float
    high: float
    reached: float

    @property
    def is_met(self) -> bool:
        """Whether the interval holds it."""
        return self.low <= self.reached <= self.high


@dataclasses.dataclass(frozen=True)
class Read:
    """All that the log of one run says, and what came of it."""

    policy: str
    """Policy whose log was read."""
    forecasts: Mapping[str, Forecast]
    """By policy, of those that have one."""
    asked: int
    """Other policies."""
    own: float
    """What the run itself reached."""
    seconds: float
    """CPU time of the forecasts."""

    @property
    def best_in_two(self) -> bool:
        """Whether the best policy, the run's own among them, is one of the first two."""
        reached = {name: each.reached for name, each in self.forecasts.items()}
        said = {name: each.median for name, each in self.forecasts.items()}
        reached[self.policy] = self.own
        said[self.policy] = self.own
        best = max(reached, key=lambda name: reached[name])
        return best in sorted(said, key=lambda name: -said[name])[:2]


@command_line.script
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = command_line.options(__doc__ or "", argv, _more_options)
    default = command_line.of_size(options, full=60, quick=3, smoke=1)
    count = default if options.count is None else options.count
    scenarios = [_scenario(number) for number in range(options.first, options.first + count)]
    compared = COMPARED
    if options.quick:
        scenarios = [_with_ticks(each, 24) for each in scenarios]
    if options.smoke:
        scenarios = [_with_ticks(each, 8) for each in scenarios]
        compared = ("federated", "datacenter", "bandit", "phases")
    folder = folder_of(options, {each.data for each in scenarios})
    reads: list[Read] = []
    for number, scenario in enumerate(scenarios, 1):
        reads += measured(scenario, folder, compared)
        print(f"{number} of {len(scenarios)} scenarios", file=sys.stderr, flush=True)
    results = summary(reads)
    rows = [
        (policy, *(f"{results[f'{what}/{policy}']:.3g}" for what in _COLUMNS)) for policy in READ
    ]
    print(figures.table(("log of", *(name.replace("_", " ") for name in _COLUMNS)), rows))
    figures.write(options.json, "what_if", figures.machine(), results, TARGETS)
    return 0


_COLUMNS = ("coverage", "error", "width", "best_in_two", "known")


def _more_options(parser: argparse.ArgumentParser) -> None:
    command_line.add_data(parser)
    parser.add_argument("--first", type=int, default=FIRST, help="number of the first scenario")
    parser.add_argument("--count", type=int, help="number of scenarios")


def _scenario(number: int) -> Scenario:
    return random_scenario(number, (11,)).model_copy(update={"eval_data": "target"})


def _with_ticks(scenario: Scenario, ticks: int) -> Scenario:
    """The scenario with fewer rounds, always open, and so much less budget."""
    share = ticks / scenario.run.ticks
    run = scenario.run.model_copy(
        update={"ticks": ticks, "budget": round(scenario.run.budget * share, 2)}
    )
    split = scenario.split.model_copy(update={"zones": 1})
    return scenario.model_copy(update={"run": run, "split": split, "windows": ()})


def measured(scenario: Scenario, folder: Path, compared: Sequence[str]) -> list[Read]:
    """Train all policies in a scenario, and read the logs of some."""
    reached: dict[str, float] = {}
    said: dict[str, tuple[WhatIf, float]] = {}
    for policy in compared:

        def read(store: Store, policy: str = policy) -> None:
            records = [each for each in store.attempts() if isinstance(each, RoundRecord)]
            known = [each.metrics[METRIC] for each in records if METRIC in each.metrics]
            reached[policy] = known[-1] if known else math.nan
            if policy in READ:
                began = time.process_time()
                said[policy] = (WhatIf.of(store), time.process_time() - began)

        with contextlib.suppress(IsthmusError):  # a policy that this scenario cannot have
            simulate(scenario, scenario.seeds[0], folder, _changes(scenario, policy), 0, read)
    found = []
    for policy, (what_if, seconds) in said.items():
        forecasts = {}
        others = [each for each in what_if.alternatives if each.policy in reached]
        for each in others:
            if each.reached is not None and math.isfinite(reached[each.policy]):
                of = each.reached
                forecasts[each.policy] = Forecast(of.low, of.median, of.high, reached[each.policy])
        found.append(Read(policy, forecasts, len(others), reached[policy], seconds))
    return found


def _changes(scenario: Scenario, policy: str) -> dict[str, Any]:
    """Keys of the job's `strategy` for a policy."""
    if policy != "phases":
        return {"policy": policy}
    first = {"regime": "datacenter", "rounds": max(1, scenario.run.ticks // 3)}
    return {"policy": "schedule", "schedule": [first, {"regime": "federated"}]}


def summary(reads: Sequence[Read]) -> dict[str, float]:
    """The figures."""
    results: dict[str, float] = {}
    for policy in READ:
        of_policy = [each for each in reads if each.policy == policy]
        every = [forecast for each in of_policy for forecast in each.forecasts.values()]
        results[f"coverage/{policy}"] = _mean(float(each.is_met) for each in every)
        results[f"error/{policy}"] = 100 * _mean(abs(e.median - e.reached) for e in every)
        results[f"width/{policy}"] = 100 * _mean(each.high - each.low for each in every)
        results[f"best_in_two/{policy}"] = _mean(float(e.best_in_two) for e in of_policy)
        asked = sum(each.asked for each in of_policy)
        results[f"known/{policy}"] = len(every) / asked if asked else 0.0
    results["cpu_seconds"] = _mean(each.seconds for each in reads)
    return results


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return statistics.fmean(listed) if listed else 0.0


if __name__ == "__main__":
    sys.exit(main())
