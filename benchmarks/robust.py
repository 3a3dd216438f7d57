"""What lying devices cost a run whose secure sums are robust, in points of accuracy.

Letters and images of MNIST are divided among 240 devices, and the patients of the heart data among
120. Each round sums random groups of 10 devices, and combines the groups' means by a rule
(`federated.robust`). Up to a tenth of the devices lies in every round: updates times -1 (`sign`),
times -50 (`scale`), with flipped labels (`label`), or the mean of the last round's honest updates
minus 1.5 standard deviations of each element ("a little is enough", Baruch et al. 2019: `little`).
The rule is the product's; devices train stacked, and sums are not encoded
(`harness/stacked_liars.py`). The norm of `norm-bound` is the median of the groups' norms in a run
without liars. Flower's rules get the same updates one by one, with `--flower`.

Some of it is measured in `isthmus simulate` too, with the coordinator, the encoding and its ranges,
and so are the sizes of sums and the time.

With `--knowing`, liars know the rule and each other, and who is in their group, instead. Shares of
them and sizes of groups vary.

Figures: `loss/<data>/<attack>/<share>`, accuracy without liars and without a rule, minus that with
them and the trimmed mean of the groups' means, in points and the mean over seeds;
`rule/<rule>/<data>/<attack>/<share>`, the same of the other rules; `none/<rule>/<data>`, what a
rule costs without liars; `mean/<data>/<attack>/<share>`, the loss of a secure mean;
`flower/<rule>/<data>/<attack>/<share>`, that of Flower's rules;
`simulated/<data>/<attack>/<share>`, the loss with the trimmed mean in simulated runs;
`smallest_sum`, the fewest devices of a sum that was opened there; `time_ratio`, the wall time of a
robust run there over that of a run with one sum, median of pairs; with `--knowing`,
`knowing/<rule>/<data>/<devices>/<share>`, the loss with groups of so many devices, and, by
counting, the parts of all divisions in which liars are in more groups than a rule withstands of any
lies (`any/<rule>/<devices>/<share>`) or of long ones (`long/<rule>/<devices>/<share>`).
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from harness import command_line, figures, stacked_liars
from harness.figures import Target
from harness.liars import ATTACKS, Learned, run_with_liars
from harness.liars_task import SETS
from harness.stacked_liars import JOB, KNOWING, Combine
from regime_simulation.readers import MNIST_FILES

from isthmus.job import parse_job
from isthmus_server.regimes.secure_sums.robust_rule import RobustRule, chance_of_more, shortest

FILES = {
    "letters": ("letter-recognition.data",),
    "mnist": MNIST_FILES,
    "heart": ("heart-disease/cleveland.csv",),
}
MINIMUM = 10
"""Devices of a group."""
RULE = "trimmed-mean"
"""The rule of `loss`."""
RULES = (RULE, "median", "norm-bound")
TRIMMED = 0.12
"""Part of the groups that the trimmed mean leaves out at each end; more, and fewer groups of liars
may be long."""
STRATEGIES = ("FedMedian", "FedTrimmedAvg", "Krum", "MultiKrum")
TARGETS = {
    "loss/*/5": Target(at_most=1, full_size=True),
    "loss/*/10": Target(at_most=3, full_size=True),
    "smallest_sum": Target(at_least=MINIMUM),
    "time_ratio": Target(at_most=1.3, full_size=True),
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of all measurements."""

    sets: Sequence[str] = tuple(SETS)
    attacks: Sequence[str] = ATTACKS
    shares: Sequence[int] = (5, 10)
    """Percent of the devices."""
    seeds: Sequence[int] = (0, 1)
    devices: int = 240
    rounds: int | None = None
    """None for those of the data set."""
    simulated: Sequence[tuple[str, str, int]] = (("heart", "scale", 10), ("heart", "sign", 10))
    """Data set, attack and share in `isthmus simulate`."""
    simulated_rounds: int = 8
    pairs: int = 3
    groups: Sequence[int] = (10, 12, 20)
    """With `--knowing`: devices of a group."""
    knowing: Sequence[float] = (1, 2, 3, 5, 10)
    """With `--knowing`: percent of the devices that lie."""


QUICK = Sizes(
    sets=("heart", "mnist"),
    seeds=(0,),
    rounds=8,
    simulated=(("heart", "scale", 10),),
    pairs=1,
    groups=(10,),
    knowing=(2, 5, 10),
)
SMOKE = Sizes(
    sets=("letters",),
    attacks=("scale",),
    shares=(10,),
    seeds=(0,),
    devices=36,
    rounds=1,
    simulated=(("letters", "scale", 10),),
    simulated_rounds=1,
    pairs=1,
    groups=(12,),
    knowing=(10,),
)


@dataclasses.dataclass(frozen=True)
class Runs:
    """Runs of one size, on the data of a folder."""

    folder: Path
    sizes: Sizes

    def devices_of(self, name: str) -> int:
        """The number of devices: half as many for the patients, of whom there are few."""
        devices = self.sizes.devices
        return devices // 2 if name == "heart" and devices > 100 else devices

    def settings(self, name: str, rule: str, norm: float = 1.0, each: int = MINIMUM) -> list[str]:
        """The settings of a robust run with groups of so many devices."""
        groups = self.devices_of(name) // each
        # Of the quorum of few groups it would be less than one.
        share = TRIMMED if groups >= 12 else 0.34
        options = {"trimmed-mean": f"{{share={share}}}", "norm-bound": f"{{norm={norm}}}"}
        return [
            f"federated.robust={rule}",
            f"federated.robust_settings={options.get(rule, '{}')}",
            f"federated.robust_groups={groups}",
            f"federated.robust_minimum={MINIMUM}",
            f"federated.cohort={self.devices_of(name)}",
        ]

    def robust(self, name: str, rule: str, norm: float = 1.0, each: int = MINIMUM) -> Combine:
        """The product's rule over groups of so many devices."""
        return stacked_liars.robust(self.settings(name, rule, norm, each))

    def odds(self, name: str, rule: str, each: int, share: float) -> tuple[float, float]:
        """The parts of all divisions in which liars are in more groups than a rule withstands.

        Of any lies, and of long ones.
        """
        settings = self.settings(name, rule, each=each)
        withstood = RobustRule(parse_job(JOB, settings).federated)
        groups = self.devices_of(name) // each
        bad = withstood.withstands(groups)
        liars = round(self.devices_of(name) * share / 100)
        return (
            chance_of_more(bad, groups, each, liars),
            chance_of_more(groups - shortest(groups, bad), groups, each, liars),
        )

    def flower(self, name: str, strategy: str) -> Combine:
        """A rule of Flower; a tenth is the most that lies, and MultiKrum selects five sixths."""
        devices = self.devices_of(name)
        faulty = {"num_malicious_nodes": devices // 10}
        options: dict[str, dict[str, float]] = {
            "FedTrimmedAvg": {"beta": 0.2},
            "Krum": {**faulty},
            "MultiKrum": {**faulty, "num_nodes_to_select": devices * 5 // 6},
        }
        return stacked_liars.flower(strategy, options.get(strategy, {}))

    def accuracies(
        self, name: str, combine: Combine, attack: str = "", share: float = 0, each: int = MINIMUM
    ) -> tuple[list[float], float]:
        """Accuracy by seed, and the median norm of a group's mean."""
        found = [
            stacked_liars.trained_with_liars(
                self.folder,
                name,
                devices=self.devices_of(name),
                each=each,
                rounds=self.sizes.rounds or SETS[name].rounds,
                attack=attack,
                share=share / 100,
                combine=combine,
                seed=seed,
            )
            for seed in self.sizes.seeds
        ]
        return [accuracy for accuracy, _ in found], found[0][1]

    def simulated(
        self, name: str, attack: str, share: int, settings: Sequence[str] = ()
    ) -> Learned:
        """A run of `isthmus simulate`."""
        _log(f"{name} {attack or 'honest'} {share} %, simulated")
        return run_with_liars(
            self.folder,
            name,
            devices=self.devices_of(name),
            rounds=self.sizes.simulated_rounds,
            attack=attack,
            share=share / 100,
            overrides=settings,
        )


def _more_options(parser: argparse.ArgumentParser) -> None:
    command_line.add_data(parser)
    parser.add_argument("--flower", action="store_true", help="measure Flower's rules, too")
    parser.add_argument(
        "--knowing", action="store_true", help="measure liars that know the rule, instead"
    )
    parser.add_argument("--sets", help="data sets, separated by commas; default: those of the size")


@command_line.script
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = command_line.options(__doc__ or "", argv, _more_options)
    sizes = command_line.of_size(options, full=Sizes(), quick=QUICK, smoke=SMOKE)
    if options.sets:
        sizes = dataclasses.replace(sizes, sets=options.sets.split(","))
    if options.flower:
        command_line.needs("flwr", "flwr")
    names = {*sizes.sets, *(name for name, _, _ in sizes.simulated)}
    folder = command_line.data_folder(options, *(f for name in sorted(names) for f in FILES[name]))
    runs = Runs(folder, sizes)
    if options.knowing:
        results = measure_knowing(runs)
    else:
        results = measure_attacks(runs, STRATEGIES if options.flower else ())
        results |= measure_simulated(runs)
    figures.write(options.json, "robust", figures.machine(), results, TARGETS)
    return 0


def measure_attacks(runs: Runs, strategies: Sequence[str]) -> dict[str, float]:
    """Each attack, against each rule, a mean, and rules of Flower; prints a table."""
    sizes = runs.sizes
    results: dict[str, float] = {}
    rows = []
    for name in sizes.sets:
        _log(name)
        base, _ = runs.accuracies(name, stacked_liars.mean)
        combines = {RULE: runs.robust(name, RULE), "median": runs.robust(name, "median")}
        _, norm = runs.accuracies(name, combines[RULE])
        combines["norm-bound"] = runs.robust(name, "norm-bound", norm)
        combines |= {strategy: runs.flower(name, strategy) for strategy in strategies}
        combines["mean"] = stacked_liars.mean
        cells = [f"{name}, accuracy {statistics.mean(base):.1f} %, without liars"]
        for rule, combine in combines.items():
            accuracies, _ = runs.accuracies(name, combine)
            lost = _lost(base, accuracies)
            cells.append(f"{lost:.1f}")
            if rule in RULES:
                results[f"none/{rule}/{name}"] = lost
        rows.append(cells)
        for attack in sizes.attacks:
            for share in sizes.shares:
                about = f"{name}/{attack}/{share}"
                cells = [about]
                for rule, combine in combines.items():
                    accuracies, _ = runs.accuracies(name, combine, attack, share)
                    lost = _lost(base, accuracies)
                    results[f"{_kind(rule)}/{about}"] = lost
                    cells.append(f"{lost:.1f}")
                rows.append(cells)
    print(figures.table(("points lost", *RULES, *strategies, "mean"), rows))
    return results


def _kind(rule: str) -> str:
    """The first parts of the keys of a rule's figures."""
    if rule in STRATEGIES:
        return f"flower/{rule}"
    return {RULE: "loss", "mean": "mean"}.get(rule, f"rule/{rule}")


def measure_simulated(runs: Runs) -> dict[str, float]:
    """Some of the attacks in `isthmus simulate`, the sizes of its sums, and its time."""
    results: dict[str, float] = {}
    opened = []
    for name, attack, share in runs.sizes.simulated:
        base = runs.simulated(name, "", 0)
        learned = runs.simulated(name, attack, share, runs.settings(name, RULE))
        opened.append(learned.smallest_sum)
        results[f"simulated/{name}/{attack}/{share}"] = base.accuracy - learned.accuracy
        print(
            f"{name}, {attack}, {share} % liars, simulated: {base.accuracy - learned.accuracy:.1f}"
        )
    results["smallest_sum"] = min(opened)
    name, _, _ = runs.sizes.simulated[0]
    results["time_ratio"] = statistics.median(
        runs.simulated(name, "", 0, runs.settings(name, RULE)).seconds
        / runs.simulated(name, "", 0).seconds
        for _ in range(runs.sizes.pairs)
    )
    print(f"smallest sum {results['smallest_sum']}, time {figures.times(results['time_ratio'])}")
    return results


def measure_knowing(runs: Runs) -> dict[str, float]:
    """Liars that know the rule: their share against the size of groups; prints a table."""
    sizes = runs.sizes
    results: dict[str, float] = {}
    rows = []
    for name in sizes.sets:
        _log(f"{name}, liars that know the rule")
        base, _ = runs.accuracies(name, stacked_liars.mean)
        devices = runs.devices_of(name)
        for each in sizes.groups:
            for share in sizes.knowing:
                about = f"{each}/{share:g}"
                cells = [f"{name}, groups of {each}, {share:g} % liars"]
                for rule in ("median", RULE):
                    combine = runs.robust(name, rule, each=each)
                    accuracies, _ = runs.accuracies(name, combine, KNOWING, share, each)
                    lost = _lost(base, accuracies)
                    results[f"knowing/{rule}/{name}/{about}"] = lost
                    odds = runs.odds(name, rule, each, share)
                    if devices == sizes.devices:
                        results[f"any/{rule}/{about}"], results[f"long/{rule}/{about}"] = odds
                    cells += [f"{lost:.1f}", *(f"{100 * part:.2g} %" for part in odds)]
                rows.append(cells)
    header = [f"{rule}{what}" for rule in ("median", RULE) for what in ("", ", any", ", long")]
    print(figures.table(("points lost", *header), rows))
    return results


def _lost(base: Sequence[float], accuracies: Sequence[float]) -> float:
    return statistics.mean(base) - statistics.mean(accuracies)


def _log(what: str) -> None:
    print(f"{what} ...", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
