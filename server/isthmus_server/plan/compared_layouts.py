"""The layouts that a plan compares, best first, and alike ones as one row."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Protocol

from isthmus.job.planned import PlannedLayout, PlannedRanks, seconds_text
from isthmus_server.plan.step_time import MODEL_ERROR

WHERE_TIME = (
    "the smallest layout need not be the fastest: name the GPU by --gpu to compare their steps"
)
"""Which option says how fast layouts are."""
COMPUTING_ALONE = (
    "steps of layouts are those of computing alone, which is as much for an example in each of "
    "them: --gpu counts their messages too"
)
"""What a rate alone says of layouts."""


OWN = " (the job's own)"
"""Mark of the row with the job's layout."""
SHORT_STEP = 0.01
"""Seconds of a step on a GPU below which launches of its kernels may take most of it."""
LAUNCHES = (
    "launches of kernels, some microseconds each, are not counted: they take most of a step of a "
    "small model, so that steps of some milliseconds or less say little"
)
"""What the model of named GPUs leaves out of short steps."""


class Compares(Protocol):
    """What a plan knows of its layouts."""

    @property
    def has_gpu(self) -> bool:
        """Whether the time of a step is that of a named GPU, with messages."""
        ...

    def fits(self, layout: PlannedLayout) -> bool | None:
        """Whether a layout fits the memory of a rank; None if that is not known."""
        ...

    def step_seconds(self, ranks: PlannedRanks, layout: PlannedLayout) -> float | None:
        """Seconds of a step; None if they are not known."""
        ...

    def replicas(self, ranks: PlannedRanks, layout: PlannedLayout) -> tuple[int, int, int]:
        """Replicas of the model, examples of a step of all, and parts of a batch in turn."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutRow:
    """Layouts of which all figures are the same."""

    text: str
    """Keys of these layouts, in words."""
    layout: PlannedLayout
    """The first of them."""
    fits: bool | None
    seconds: float | None
    """Time of a step; None if it is not known."""
    examples: int
    """Examples of a step, on all ranks."""

    @property
    def rate(self) -> float:
        """Examples a second; 0 if that is not known."""
        return self.examples / self.seconds if self.seconds else 0.0

    @property
    def step(self) -> str:
        """The time of a step in words; empty if it is not known."""
        if not self.seconds:
            return ""
        rate = float(f"{self.rate:.3g}")
        return f"{seconds_text(self.seconds)} a step of {self.examples}, {rate:,.10g} examples/s"


def ordered(plan: Compares, ranks: PlannedRanks) -> list[PlannedLayout]:
    """All layouts: those that may be used before those that do not fit, then those refused.

    Where the time of a step is known, those with the least for an example are first: layouts
    differ in how many examples a step has. The others are by the peak of a rank.
    """

    def place(layout: PlannedLayout) -> tuple[bool, bool, float, int]:
        seconds = plan.step_seconds(ranks, layout)
        each = math.inf if seconds is None else seconds / layout.examples
        # As many digits as are shown: rounding is no difference.
        shown = each if math.isinf(each) else float(f"{each:.3g}")
        return bool(layout.refused), plan.fits(layout) is False, shown, layout.peak

    return sorted(ranks.others, key=place)


def layout_rows(plan: Compares, ranks: PlannedRanks) -> list[LayoutRow]:
    """A row for each layout that is possible, alike ones together, in the order of `ordered`.

    With one replica, for example, every ZeRO stage is the same.
    """
    groups: dict[tuple[object, ...], list[PlannedLayout]] = {}
    seconds: dict[tuple[object, ...], float | None] = {}
    for each in ordered(plan, ranks):
        if each.refused:
            continue
        took = plan.step_seconds(ranks, each)
        others = tuple((key, value) for key, value in each.keys.items() if key != "zero_stage")
        alike: tuple[object, ...] = (others, tuple(each.memory.items()), took)
        seconds[alike] = took
        groups.setdefault(alike, []).append(each)
    rows = []
    for key, layouts in groups.items():
        first = layouts[0]
        replicas, examples, parts = plan.replicas(ranks, first)
        text = f"{_text(layouts)}, data_parallel={replicas}"
        if parts > 1:  # which costs time: with one global batch, fewer replicas have more of them
            text += f", accumulate={parts}"
        if any(each.keys == ranks.layout.keys for each in layouts):
            text += OWN
        rows.append(
            LayoutRow(
                text=text,
                layout=first,
                fits=plan.fits(first),
                seconds=seconds[key],
                examples=examples,
            )
        )
    return rows


def order_of_layouts(rows: Sequence[LayoutRow]) -> str:
    """By what the rows of `layout_rows` are ordered, a clause."""
    timed = any(each.seconds for each in rows)
    return "most examples a second first" if timed else "by the peak of a rank"


def notes_of_layouts(plan: Compares, ranks: PlannedRanks, rows: Sequence[LayoutRow]) -> list[str]:
    """What a comparison of layouts does not say, sentences; none if it has one row.

    Args:
        plan: that has the layouts.
        ranks: of the plan.
        rows: of `layout_rows`.
    """
    if len(rows) < 2:
        return []
    found = []
    timed = [each for each in rows if each.seconds]
    if not plan.has_gpu:
        found.append(COMPUTING_ALONE if timed else WHERE_TIME)
    examples = [each.examples for each in rows]
    if min(examples) < max(examples):
        found.append(
            f"layouts have {min(examples):,} to {max(examples):,} examples a step, and the job's "
            f"own {ranks.examples:,}: with datacenter.global_batch={ranks.examples} steps of all "
            "train as many"
        )
    if plan.has_gpu and timed:
        best = max(each.rate for each in timed)
        alike = sum(each.rate >= best * (1 - MODEL_ERROR) for each in timed)
        if alike > 1:
            found.append(
                f"the first {alike} rows differ by less than the {MODEL_ERROR:.0%} by which "
                "published steps were off this model: their order says nothing"
            )
        if min(each.seconds or 0.0 for each in timed) < SHORT_STEP:
            found.append(LAUNCHES)
    return found


def grouped_refusals(layouts: Iterable[PlannedLayout]) -> dict[str, str]:
    """Refused layouts in words, by the reason."""
    refused: dict[str, list[str]] = {}
    for each in layouts:
        if each.refused:
            refused.setdefault(each.refused, []).append(each.text)
    return {
        why: texts[0] + (f" and {len(texts) - 1} more" if len(texts) > 1 else "")
        for why, texts in refused.items()
    }


def _text(layouts: Sequence[PlannedLayout]) -> str:
    """The keys of layouts that differ in their ZeRO stage alone."""
    stages = sorted(each.keys["zero_stage"] for each in layouts)
    *others, last = (str(each) for each in stages)
    shown = f"{', '.join(others)} or {last}" if others else last
    keys = {**layouts[0].keys, "zero_stage": shown}
    return PlannedLayout(keys=keys).text
