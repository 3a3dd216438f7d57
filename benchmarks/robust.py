"""What lying devices cost a run whose secure sums are robust, in points of accuracy.

Letters and images of MNIST are divided among 240 simulated devices, and the patients of the heart
data among 120. Each round sums random groups of 12 devices, at least 10, and takes the trimmed mean
of the groups' means (`federated.robust`). Up to a tenth of the devices lies in every round: updates
times -1 (`sign`), times -50 (`scale`), with flipped labels (`label`), or the mean of the last
round's honest updates minus 1.5 standard deviations of each element ("a little is enough", Baruch
et al. 2019: `little`). The coordinator, what devices encode and its ranges, and the sums are those
of the product, in a simulation. With `--flower`, Flower's rules get the same updates one by one.

Figures: `loss/<data>/<attack>/<share>`, accuracy without liars and without a rule, minus that with
them, in points and the mean over seeds; `none/<data>`, what the rule costs without liars;
`mean/<data>/<attack>/<share>`, the loss of a secure mean; `flower/<rule>/<data>/<attack>/<share>`,
that of Flower's rules; `smallest_sum`, the fewest devices of a sum that was opened; `time_ratio`,
the wall time of a robust run over that of a run with one sum, median of pairs.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from harness import command_line, figures
from harness.figures import Target
from harness.liars import ATTACKS, Learned, run_with_liars
from harness.liars_task import SETS
from regime_simulation.readers import MNIST_FILES

FILES = {
    "letters": ("letter-recognition.data",),
    "mnist": MNIST_FILES,
    "heart": ("heart-disease/cleveland.csv",),
}
EACH = 12
"""Devices of a group."""
MINIMUM = 10
STRATEGIES = {
    "FedMedian": "{{}}",
    "FedTrimmedAvg": "{{beta=0.2}}",
    "MultiKrum": "{{num_malicious_nodes={faulty}, num_nodes_to_select={selected}}}",
}
"""Flower's rules, with their options. A tenth is the most that lies; Krum selects five sixths."""
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
    pairs: int = 3


QUICK = Sizes(sets=("heart",), seeds=(0,), rounds=8, pairs=1)
SMOKE = Sizes(
    sets=("letters",), attacks=("scale",), shares=(10,), seeds=(0,), devices=36, rounds=1, pairs=1
)


@dataclasses.dataclass(frozen=True)
class Runs:
    """Runs of one size, on the data of a folder."""

    folder: Path
    sizes: Sizes

    def devices_of(self, name: str) -> int:
        """The number of devices: half as many for the patients, of whom there are few."""
        return (
            self.sizes.devices // 2
            if name == "heart" and self.sizes.devices > 100
            else (self.sizes.devices)
        )

    def run(
        self, name: str, attack: str = "", share: int = 0, rule: Sequence[str] = (), seed: int = 0
    ) -> Learned:
        """One run."""
        shown = " ".join([name, attack or "honest", f"{share} %", *rule[:1]])
        print(f"{shown} ...", file=sys.stderr, flush=True)
        return run_with_liars(
            self.folder,
            name,
            devices=self.devices_of(name),
            rounds=self.sizes.rounds or SETS[name].rounds,
            attack=attack,
            share=share / 100,
            overrides=rule,
            seed=seed,
        )

    def robust(self, name: str) -> list[str]:
        """The settings of a robust run."""
        return [
            "federated.robust=trimmed-mean",
            "federated.robust_settings={share=0.34}"
            if self.sizes.devices < 100
            else "federated.robust_settings={share=0.2}",
            f"federated.robust_groups={self.devices_of(name) // EACH}",
            f"federated.robust_minimum={MINIMUM}",
        ]

    def loss(
        self, name: str, base: dict[int, float], attack: str, share: int, rule: Sequence[str]
    ) -> tuple[float, list[Learned]]:
        """Points of accuracy below runs without liars, and the runs."""
        learned = [self.run(name, attack, share, rule, seed=seed) for seed in self.sizes.seeds]
        lost = [base[seed] - each.accuracy for seed, each in zip(base, learned, strict=True)]
        return statistics.mean(lost), learned


def flower_rule(strategy: str, devices: int) -> list[str]:
    """The settings of a plain run with a rule of Flower."""
    options = STRATEGIES[strategy].format(faulty=devices // 10, selected=devices * 5 // 6)
    return [
        f'federated.flower.strategy={{name="{strategy}", options={options}}}',
        "federated.secure_aggregation=false",
    ]


def _more_options(parser: argparse.ArgumentParser) -> None:
    command_line.add_data(parser)
    parser.add_argument("--flower", action="store_true", help="measure Flower's rules, too")
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
    folder = command_line.data_folder(options, *(f for name in sizes.sets for f in FILES[name]))
    runs = Runs(folder, sizes)
    results: dict[str, float] = {}
    rows = []
    opened: list[int] = []
    for name in sizes.sets:
        base = {seed: runs.run(name, seed=seed).accuracy for seed in sizes.seeds}
        robust = runs.robust(name)
        results[f"none/{name}"], honest = runs.loss(name, base, "", 0, robust)
        opened += [each.smallest_sum for each in honest]
        for attack in sizes.attacks:
            for share in sizes.shares:
                key = f"{name}/{attack}/{share}"
                results[f"loss/{key}"], learned = runs.loss(name, base, attack, share, robust)
                opened += [each.smallest_sum for each in learned]
                results[f"mean/{key}"], _ = runs.loss(name, base, attack, share, ())
                if options.flower:
                    for strategy in STRATEGIES:
                        rule = flower_rule(strategy, runs.devices_of(name))
                        lost, _ = runs.loss(name, base, attack, share, rule)
                        results[f"flower/{strategy}/{key}"] = lost
                rows.append((key, *(f"{value:.1f}" for value in _of(results, key))))
    results["smallest_sum"] = min(opened)
    results["time_ratio"] = statistics.median(
        runs.run(sizes.sets[0], rule=runs.robust(sizes.sets[0])).seconds
        / runs.run(sizes.sets[0]).seconds
        for _ in range(sizes.pairs)
    )
    rules = list(STRATEGIES) if options.flower else []
    print(figures.table(("points lost", "robust", "mean", *rules), rows))
    figures.write(options.json, "robust", figures.machine(), results, TARGETS)
    return 0


def _of(results: dict[str, float], key: str) -> list[float]:
    """Figures of a row of the table."""
    kinds = ("loss", "mean", *(f"flower/{strategy}" for strategy in STRATEGIES))
    return [results[f"{kind}/{key}"] for kind in kinds if f"{kind}/{key}" in results]


if __name__ == "__main__":
    sys.exit(main())
