"""How far one lying device of twenty moves the mean of a round that is committed.

The liar knows what all other devices have sent, and adds to the secure sum what it likes: the
largest update, the whole ring, weights that cancel those of the others, random values, magnitudes,
figures, and ranges that are not those of its update; in a round without secure sums it sends any
update and claims any number of examples. The server, the policies and the encoding are those of the
product, in a simulated run whose devices are enrolled as if they were on machines of their own
(`harness/lying_device.py`). Each lie is told in every round of a run of its own. What counts is the
largest movement of a mean that was committed, against the mean of the same round without the lie.

Kinds of jobs: `secure`, without any bound of the job; `compressed`, with
`[federated.compression]`; `private`, with noise of the devices and of the server (`[privacy]`),
where lengths count in place of elements; `plain`, without secure sums and with `norm-bound`.

Figures: `movement_over_clip/<kind>`, over the bound of one update: what the ranges of the honest
devices give, for compressed updates the bound of the round; `movement_over_share/plain`, over the
bound times the liar's share of the weights; `refused/<kind>`, the part of the attempts with a lie
that were refused; and `movement_knowing_ranges/secure`, of a liar that also knows the ranges of
all others and can move them together, which only a clip of the job bounds.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from harness import command_line, figures
from harness.figures import Target
from harness.lying_device import ChangeSum, ChangeUpdate, Lie, Moved, Recorder, run_with_liar
from harness.small_task import EXAMPLES

from isthmus_privacy.secagg.config import RoundConfig
from isthmus_privacy.secagg.ranges import LADDER, SIZE
from isthmus_privacy.secagg.server import RingSum

DEVICES = 20
NORM = 1.0
MOST_BITS = 8
"""Most bits of an element of a compressed update, after the first round."""
TARGETS = {
    "movement_over_clip/*": Target(at_most=2),
    "movement_over_share/*": Target(at_most=2),
}
JOB = f"""
name = "liar"
rounds = 3
attempts = 1

[task]
source = "small_task.py:Small"

[strategy]
policy = "federated"

[simulation]
clients = {DEVICES}
processes = 1
training = "one-by-one"

[federated]
cohort = {DEVICES}
quorum = {DEVICES}
local_steps = 2
batch_size = 4
"""
KINDS = {
    "secure": ((),),
    "compressed": (("federated.compression={}",),),
    "private": (
        ('privacy={mechanism="distributed", epsilon=20, delta=1e-3}', "federated.batch_size=8"),
        ('privacy={mechanism="gaussian", epsilon=20, delta=1e-3}', "federated.batch_size=8"),
    ),
    "plain": (
        (
            "federated.secure_aggregation=false",
            'federated.aggregation="norm-bound"',
            f"federated.aggregation_settings={{norm={NORM}}}",
        ),
    ),
}
"""The jobs of each kind, as changes of `JOB`."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of all measurements."""

    kinds: Sequence[str] = tuple(KINDS)
    factors: Sequence[float] = tuple(2.0**power for power in range(4, -18, -1))
    """Means that the liar aims at, over the range of the round."""
    rounds: int = 3
    seeds: int = 20
    """Seeds of random values."""
    figures: Sequence[int] = (1, 1 << 20, 1 << 31)
    """What the liar adds to a figure."""
    lengths: Sequence[float] = (NORM, 1e3, 4095.0)
    """Lengths of single updates."""


QUICK = Sizes(factors=(16.0, 1.0, 2.0**-14), rounds=2, seeds=2, figures=(1, 1 << 31))
SMOKE = Sizes(factors=(1.0,), rounds=1, seeds=1, figures=(1 << 31,), lengths=(1e3,))


@command_line.script
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = command_line.options(__doc__ or "", argv)
    sizes = command_line.of_size(options, full=Sizes(), quick=QUICK, smoke=SMOKE)
    results: dict[str, float] = {}
    rows = []
    for kind in sizes.kinds:
        print(f"{kind} ...", file=sys.stderr, flush=True)
        lies = dict(lies_of(kind, sizes))
        runs = [
            (name, run(changes, lie, sizes))
            for changes in KINDS[kind]
            for name, lie in lies.items()
        ]
        results |= summary(kind, runs)
        largest = max(runs, key=lambda each: largest_of(kind, each[1]))
        rows.append(
            (
                kind,
                figures.short(results[f"movement_over_clip/{kind}"]),
                largest[0],
                f"{results[f'refused/{kind}']:.0%}",
            )
        )
    knowing = run((), Lie(ranges=move_all_ranges, update=aim_at(1.0)), sizes)
    results["movement_knowing_ranges/secure"] = largest_of("secure", knowing)
    header = ("one liar of 20", "movement / bound", "by", "refused")
    print(figures.table(header, rows))
    figures.write(options.json, "liar", figures.machine(), results, TARGETS)
    return 0


def summary(kind: str, runs: Sequence[tuple[str, Recorder]]) -> dict[str, float]:
    """The figures of a kind of jobs."""
    refused = sum(len(each.refused) for _, each in runs)
    committed = sum(len(each.committed) for _, each in runs)
    found = {
        f"movement_over_clip/{kind}": max(largest_of(kind, each) for _, each in runs),
        f"refused/{kind}": refused / (refused + committed),
    }
    if kind == "plain":
        shares = {name: share_of(name) for name, _ in runs}
        found["movement_over_share/plain"] = max(
            largest_of(kind, each) / shares[name] for name, each in runs
        )
    return found


def share_of(lie: str) -> float:
    """The liar's share of the weights that were declared."""
    declared = float(lie.partition("declares ")[2] or EXAMPLES)
    return declared / (declared + (DEVICES - 1) * EXAMPLES)


def largest_of(kind: str, recorder: Recorder) -> float:
    """The largest movement of a committed mean over the bound of one update; 0 for none."""
    return max((movement(kind, each) for each in recorder.committed), default=0.0)


def movement(kind: str, moved: Moved) -> float:
    """By how many bounds of an update a mean was moved."""
    difference = (moved.mean - moved.honest).double()
    by_length = kind in ("private", "plain")
    return float(difference.norm() if by_length else difference.abs().max()) / moved.bound


def run(changes: Sequence[str], lie: Lie, sizes: Sizes) -> Recorder:
    """One run with a liar."""
    with tempfile.TemporaryDirectory(prefix="liar-") as folder:
        overrides = (*changes, f"rounds={sizes.rounds}")
        return run_with_liar(JOB, overrides, lie, Path(folder) / "run")


# -- what the liar does ---------------------------------------------------------------------------


def lies_of(kind: str, sizes: Sizes) -> Iterator[tuple[str, Lie]]:
    """Lies by name."""
    yield "honest", Lie()
    if kind == "plain":
        yield from plain_lies(sizes)
        return
    aims = {f"a mean of {factor:g} ranges": aim_at(factor) for factor in sizes.factors}
    weights: dict[str, float | None] = {
        "its weight": None,
        "the least weight": 0.86,
        "half of the weights": 0.5,
        "a weight of 1": 0.0,
        "twice the weights": 2.0,
    }
    if kind == "private":
        weights = {"its weight": None}
    for (aim, change), (weight, factor) in itertools.product(aims.items(), weights.items()):
        yield f"{aim}, {weight}", Lie(update=in_turn(weigh(factor), change))
    yield "half of the ring", Lie(update=half_of_the_ring)
    for seed in range(sizes.seeds):
        yield f"random values {seed}", Lie(update=random_values(seed))
    if kind != "private":
        for value, slot in itertools.product(sizes.figures, range(6)):
            yield f"figure {slot} of {value}", Lie(update=figure(slot, value))
        for name, ranges in (("large", large_ranges), ("many examples", many_examples)):
            for aim, change in aims.items():
                yield f"ranges of {name}, {aim}", Lie(ranges=ranges, update=change)
        for aim, change in aims.items():
            yield f"no ranges, {aim}", Lie(ranges=no_ranges, update=change)
    if kind == "compressed":
        for magnitude, (aim, change) in itertools.product((-60.0, 60.0, 3.0), aims.items()):
            lie = after_first(report_magnitude(magnitude), change)
            yield f"a magnitude of {magnitude:g}, then {aim}", Lie(update=lie)


def plain_lies(sizes: Sizes) -> Iterator[tuple[str, Lie]]:
    """Lies of a device whose update the server sees."""
    for claimed in (0, 1, EXAMPLES, EXAMPLES + 1, 1 << 30):
        for length in sizes.lengths:
            yield f"{length:g} long, claims {claimed}", Lie(single=single(length, claimed))
    for declared in (2 * EXAMPLES, 1 << 30):
        lie = Lie(single=single(1e3, declared), declares=declared)
        yield f"1e3 long, declares {declared}", lie


def single(length: float, claimed: int) -> ChangeUpdate:
    """An update of that length against the honest direction."""

    def change(update: torch.Tensor) -> int:
        update.mul_(-length / update.norm())
        return claimed

    return change


def in_turn(*changes: ChangeSum) -> ChangeSum:
    """Several changes of a sum, one after the other."""

    def change(config: RoundConfig, total: RingSum) -> None:
        for each in changes:
            each(config, total)

    return change


def after_first(first: ChangeSum, later: ChangeSum) -> ChangeSum:
    """Change the first compressed sum, whose elements have more bits, and all later ones."""

    def change(config: RoundConfig, total: RingSum) -> None:
        assert config.codec is not None
        first(config, total)
        if config.codec.bits <= MOST_BITS:
            later(config, total)

    return change


def figures_of(config: RoundConfig, total: RingSum) -> torch.Tensor:
    """The weight and the figures of a sum, as a view."""
    return total.ring.figures if config.codec is not None else total.vector[config.size :]


def weigh(factor: float | None) -> ChangeSum:
    """Give the sum another weight, at least 1; None leaves it."""

    def change(config: RoundConfig, total: RingSum) -> None:
        if factor is not None:
            weight = figures_of(config, total)
            weight[0] = max(1, int(factor * int(weight[0])))

    return change


def aim_at(factor: float) -> ChangeSum:
    """Have the first element of the mean be so many ranges."""

    def change(config: RoundConfig, total: RingSum) -> None:
        devices = len(total.clients)
        if config.noise is not None:
            # The noise's rotation keeps lengths: any element of the ring is a direction.
            total.vector[0] += int(factor * devices * config.noise.clip * config.noise.scale)
            return
        if config.codec is not None:
            middle = devices * config.codec.highest / 2
            value = middle * (1 - factor)
        else:
            weight = int(figures_of(config, total)[0]) / config.weight_max
            value = (devices - factor * weight) * (config.levels - 1) / 2
        ring = 1 << config.bits
        number = round(value) % ring
        words = 8 * total.vector.element_size()
        total.vector[0] = number - (1 << words) if number >= 1 << (words - 1) else number

    return change


def half_of_the_ring(config: RoundConfig, total: RingSum) -> None:
    """Add what is as far as possible from nothing."""
    words = 8 * total.vector.element_size()
    half = 1 << (config.bits - 1)
    total.vector[0] += half - (1 << words) if half >= 1 << (words - 1) else half


def random_values(seed: int) -> ChangeSum:
    """Add a random vector of the ring, as a device with other masks would."""

    def change(config: RoundConfig, total: RingSum) -> None:
        draws = torch.Generator().manual_seed(seed)
        ends = torch.iinfo(total.vector.dtype)
        drawn = torch.randint(ends.min, ends.max, total.vector.shape, generator=draws)
        total.vector.add_(drawn.to(total.vector.dtype))

    return change


def figure(slot: int, value: int) -> ChangeSum:
    """Add to one of the figures: the weight, the clipped share, the loss, counts."""

    def change(config: RoundConfig, total: RingSum) -> None:
        own = figures_of(config, total)
        words = 8 * own.element_size()
        own[slot] += value - (1 << words) if value >= 1 << (words - 1) else value

    return change


def report_magnitude(magnitude: float) -> ChangeSum:
    """Have the mean magnitude be that."""

    def change(config: RoundConfig, total: RingSum) -> None:
        own = total.ring.figures
        place = 2 + [slot.name for slot in config.slots].index("magnitude")
        slot = config.slots[place - 2]
        devices = len(total.clients)
        levels = config.figures.levels
        weight = (int(own[0]) & 0xFFFFFFFF) / config.weight_max
        number = round((devices + magnitude / slot.maximum * weight) * (levels - 1) / 2)
        own[place] = number - (1 << 32) if number >= 1 << 31 else number

    return change


def large_ranges(config: RoundConfig, total: RingSum) -> None:
    """Say that the own update is 2^30 times as large."""
    counts = total.vector[:SIZE]
    middle = len(total.clients) * (config.levels // 2)
    for start in (0, 256, 512):
        own = counts[start : start + 256]
        (taken,) = (own != middle).nonzero()[:1, 0].tolist()
        own[taken] -= 1
        own[min(255, taken + 30)] += 1


def many_examples(config: RoundConfig, total: RingSum) -> None:
    """Say that the own update is of 2^30 examples."""
    counts = total.vector[768:SIZE]
    middle = len(total.clients) * (config.levels // 2)
    counts[int((counts != middle).nonzero()[0, 0])] -= 1
    counts[next(step for step, limit in enumerate(LADDER) if limit >= 1 << 30)] += 1


def no_ranges(config: RoundConfig, total: RingSum) -> None:
    """Add what no sum of ranges can have."""
    total.vector[:2] += 1


def move_all_ranges(config: RoundConfig, total: RingSum) -> None:
    """Say that the updates of all devices are 2^30 times as large, as if all said so."""
    for start in (0, 256, 512):
        own = total.vector[start : start + 256]
        own.copy_(own.roll(30))


if __name__ == "__main__":
    sys.exit(main())
