"""The layouts that a plan compares, best first, and alike ones as one row."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Protocol

from isthmus.job.planned import PlannedLayout, PlannedRanks

WHERE_TIME = (
    "the smallest layout need not be the fastest: name the GPU by --gpu to compare their steps"
)
"""Which option says how fast layouts are."""
COMPUTING_ALONE = (
    "steps of layouts are those of computing alone, which is as much for an example in each of "
    "them: --gpu counts their messages too"
)
"""What a rate alone says of layouts."""


class Compares(Protocol):
    """What a plan knows of its layouts."""

    def fits(self, layout: PlannedLayout) -> bool | None:
        """Whether a layout fits the memory of a rank; None if that is not known."""
        ...

    def step_seconds(self, ranks: PlannedRanks, layout: PlannedLayout) -> float | None:
        """Seconds of a step; None if they are not known."""
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

    @property
    def step(self) -> str:
        """The time of a step in words; empty if it is not known."""
        if not self.seconds:
            return ""
        rate = float(f"{self.layout.examples / self.seconds:.3g}")
        return f"{self.seconds:.4g} s a step of {self.layout.examples}, {rate:,.10g} examples/s"


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
    return [
        LayoutRow(
            text=_text(layouts), layout=layouts[0], fits=plan.fits(layouts[0]), seconds=seconds[key]
        )
        for key, layouts in groups.items()
    ]


def order_of_layouts(rows: Sequence[LayoutRow]) -> str:
    """By what the rows of `layout_rows` are ordered, a clause."""
    timed = any(each.seconds for each in rows)
    return "most examples a second first" if timed else "by the peak of a rank"


def note_of_layouts(rows: Sequence[LayoutRow], *, has_gpu: bool) -> str:
    """What a comparison of layouts does not say, a sentence; empty if it says all, or has one row.

    Args:
        rows: of `layout_rows`.
        has_gpu: whether the time of a step is that of a named GPU, with messages.
    """
    if len(rows) < 2 or has_gpu:
        return ""
    return COMPUTING_ALONE if any(each.seconds for each in rows) else WHERE_TIME


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
