"""A plan as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from isthmus.job.planned import FAKE, WHY_NO_SUM, Figure, PlannedLayout, PlannedRanks
from isthmus_server.plan.compared_layouts import (
    grouped_refusals,
    layout_rows,
    notes_of_layouts,
    order_of_layouts,
)
from isthmus_server.plan.devices import PlannedDevices
from isthmus_server.plan.planned_job import PlannedJob
from isthmus_server.plan.timed_rounds import TimedRounds
from isthmus_server.plan.trials import Trials

WHERE_RATE = (
    "not said: name the GPU by --gpu, give the operations a second of a rank by --tflops, or "
    "measure by --measure"
)
"""Which option says the time of a step."""
WHERE_QUALITY = "not said: simulate the first rounds by --trial"
"""Which option says the quality."""

WHOLE_PRICE = (
    "the price of a datacenter's step is of all its ranks together: for another number of ranks, "
    "give prices.datacenter_step anew"
)
"""Why more ranks cost the same."""


def lines_of(plan: PlannedJob) -> list[str]:
    """All parts, one after the other."""
    found = [f"{plan.job.name}: {plan.job.rounds} rounds; {plan.trained}"]
    if plan.sides.datacenter is not None:
        found += _of_ranks(plan, plan.sides.datacenter)
    if plan.sides.devices is not None:
        found += _of_devices(plan.sides.devices, plan.timed)
    found += ["", "privacy"]
    found += _named(plan.sides.privacy) or ["  none is promised: the job has no noise"]
    found += ["", "cost"]
    found += _named(plan.sides.cost)
    found += _named(plan.sides.tokens)
    found += [f"  {WHOLE_PRICE}"] if plan.sides.datacenter is not None else []
    found += [f"  {each}" for each in plan.limits]
    found += ["", "quality"]
    found += [f"  {WHERE_QUALITY}"] if plan.trials is None else _of_trials(plan.trials)
    if plan.calibration is not None:
        found += ["", f"calibration: {plan.calibration.how}"]
        found += _named(plan.measured)
        found += [f"  {each.text}" for each in plan.errors]
        note = plan.calibration.note(plan.job, plan.ranks)
        found += [f"  {each}" for each in (note, plan.which_ranks) if each]
    found += ["", "what would change it"]
    for each in plan.changes:
        found.append(f"  {each.name}")
        if each.refused:
            found.append(f"    refused: {each.refused}")
        found += [f"    {figure.name:<24} {short(figure)}" for figure in each.figures]
        found += [f"    {note}" for note in each.notes]
    return found


def short(figure: Figure) -> str:
    """A figure without how it was obtained, which its own part says."""
    return figure.text.rpartition(f" ({figure.how})")[0]


def _of_ranks(plan: PlannedJob, ranks: PlannedRanks) -> list[str]:
    kind = "GPUs" if ranks.on_gpus else "processors"
    found = ["", f"datacenter, {ranks.ranks} ranks ({kind}), {ranks.examples} examples a step"]
    found += _of_layout(plan, ranks.layout)
    name, size = ranks.largest
    found.append(f"  largest parameter of the model: {name}, {size:,} bytes ({FAKE})")
    step = plan.step(ranks)
    found += _named(step)
    found += [f"    assumed: {each}" for each in plan.assumptions]
    if ranks.operations is None:
        found.append(f"  time of a step is not known: {ranks.unknown}")
    elif ranks.traffic_unknown:
        found.append(f"  time of a step is not known: {ranks.traffic_unknown}")
    elif not any(each.unit == "s" for each in step):
        found.append(f"  time of a step {WHERE_RATE}")
    found += _named(plan.goodput(ranks))
    if ranks.collectives:
        found.append(f"  collectives: {ranks.collectives}")
    return found + _of_layouts(plan, ranks)


def _of_layouts(plan: PlannedJob, ranks: PlannedRanks) -> list[str]:
    """The layouts that are compared, and what their order says."""
    rows = layout_rows(plan, ranks)
    refused = grouped_refusals(ranks.others)
    found = []
    if rows or refused:
        found.append(f"  layouts, {order_of_layouts(rows)}:")
    for each in rows:
        fits = {True: ", fits", False: ", does not fit", None: ""}[each.fits]
        step = f", {each.step}" if each.step else ""
        found.append(f"    {each.text}: {each.layout.peak:,} bytes{fits}{step}")
    found += [f"    {text}: refused: {why}" for why, text in refused.items()]
    return found + [f"  {each}" for each in notes_of_layouts(plan, ranks, rows)]


def _of_layout(plan: PlannedJob, layout: PlannedLayout) -> list[str]:
    if layout.refused:
        return [f"  {layout.text}: {layout.refused}"]
    found = [f"  {layout.text}; of the rank that has most, {FAKE}:"]
    found += [f"    {name:<12} {size:,} bytes" for name, size in layout.memory.items()]
    found.append(f"  {WHY_NO_SUM}")
    fits = plan.fits(layout)
    if fits is not None:
        verb = "fits" if fits else "does not fit"
        found.append(f"  it {verb} {plan.options.memory_of_rank:.4g} GiB")
    return found


def _of_devices(devices: PlannedDevices, timed: TimedRounds | None) -> list[str]:
    found = devices.lines() + ([] if timed is None else timed.lines())
    return ["", "devices", *(f"  {name:<10} {text}" for name, text in found)]


def _of_trials(trials: Trials) -> list[str]:
    found = [f"  {trials.heading}:"]
    for each in trials.policies:
        found.append(f"    {each.policy:<13} {each.text}")
        if each.forecast is not None and each.note:
            found.append(f"      {each.note}")
    return found + [f"  {each}" for each in trials.sentences]


def _named(figures: Iterable[Figure]) -> list[str]:
    return [f"  {each.name}: {each.text}" for each in figures]
