"""A plan as a page for a meeting: quality against cost by policy, a table, and the assumptions."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from typing import Literal

from markupsafe import Markup

from isthmus.job.planned import WHY_NO_SUM, PlannedLayout, PlannedRanks
from isthmus_server.plan.changes import ChangedPlan
from isthmus_server.plan.compared_layouts import (
    LayoutRow,
    grouped_refusals,
    layout_rows,
    notes_of_layouts,
    order_of_layouts,
)
from isthmus_server.plan.cost import UNIT_OF_PRICE
from isthmus_server.plan.lines import (
    WHERE_QUALITY,
    WHERE_RATE,
    WHOLE_PRICE,
    short,
)
from isthmus_server.plan.planned_job import PlannedJob
from isthmus_server.plan.policy_trial import PolicyTrial, TrialPoint
from isthmus_server.plan.round_log import kept_mode
from isthmus_server.plan.trials import Trials
from isthmus_server.read.pages.charts import Line, Point, lines_chart
from isthmus_server.read.pages.report_page import page
from isthmus_server.read.pages.templates import digits

_COLOURS = 8
"""Styles of lines that the pages have."""


def plan_page(plan: PlannedJob, now: float | None = None) -> str:
    """The whole page: one file that loads nothing.

    Args:
        plan: of a job.
        now: when it is written, in Unix seconds; by default the clock's time.
    """
    trials = plan.trials
    metric = "" if trials is None else trials.metric
    ranks = plan.sides.datacenter
    rows = [] if ranks is None else layout_rows(plan, ranks)
    notes = [] if ranks is None else notes_of_layouts(plan, ranks, rows)
    return page(
        "plan",
        f"{plan.job.name}: plan",
        now,
        trained=plan.trained,
        metric=metric,
        chart=Markup() if trials is None else quality_chart(trials),
        about_chart="" if trials is None else _about_chart(trials),
        where_quality=f"quality is {WHERE_QUALITY}",
        legend=[] if trials is None else list(_legend(trials)),
        notes=[] if trials is None else _sentences(*trials.sentences),
        policies=[] if trials is None else [_row(plan, each) for each in trials.policies],
        facts=[(name, _with_mb(value)) for name, value in _facts(plan)],
        layouts=[] if ranks is None else _layouts(ranks, rows),
        order_of_layouts=order_of_layouts(rows),
        notes_of_layouts=_sentences(*notes),
        changes=[(each.name, _with_mb(_figures(each))) for each in plan.changes],
        assumptions=list(_assumptions(plan)),
        command=plan.command,
    )


def quality_chart(trials: Trials) -> Markup:
    """Each policy's trials, and the forecast of its end with its interval, against the price."""
    lines = []
    for number, each in enumerate(trials.policies):
        kind = _kind(number)
        for points in each.seeds:
            marks = [
                Point(
                    point.price,
                    point.value,
                    kind,
                    f"{each.policy}, round {point.round}: {trials.metric} {digits(point.value)} "
                    f"at cost {digits(point.price)}, simulated",
                )
                for point in points
            ]
            lines.append(Line(marks, kind))
        lines += _forecast_lines(each, kind, trials.metric)
    return lines_chart(lines, title=trials.metric, x_label=f"cost ({UNIT_OF_PRICE})")


def _about_chart(trials: Trials) -> str:
    """How the chart's lines are to be read, sentences."""
    if all(not _is_drawn(each) for each in trials.policies):
        return "All lines were simulated; each is a trial with its own seed."
    return (
        "Solid lines were simulated; a dashed one leads to the forecast of the end of the job, "
        "whose range is the upright line."
    )


def _is_drawn(trial: PolicyTrial) -> bool:
    """Whether the chart has a forecast of the policy, besides its trials."""
    return trial.is_forecast and any(trial.seeds)


def _forecast_lines(trial: PolicyTrial, kind: str, metric: str) -> Iterator[Line]:
    """A dashed line from the trials to the forecast, and an upright one for its interval."""
    forecast = trial.known
    reached = trial.interval
    if forecast is None or reached is None or not _is_drawn(trial):
        return
    cost = statistics.fmean(forecast.price)
    last = [points[-1] for points in trial.seeds if points]
    begun = Point(
        statistics.fmean(each.price for each in last),
        statistics.fmean(each.value for each in last),
        kind,
        f"{trial.policy}: mean of the trials",
    )
    words = (
        f"{trial.policy}, forecast of the end: {metric} {digits(reached.median)} "
        f"({digits(reached.low)} to {digits(reached.high)}) at cost {digits(cost)}"
    )
    yield Line([begun, Point(cost, reached.median, kind, words)], f"{kind} again")
    ends = [Point(cost, value, kind, words) for value in (reached.low, reached.high)]
    yield Line(ends, kind)


def _kind(number: int) -> str:
    return f"series{number % _COLOURS}"


def _legend(trials: Trials) -> Iterator[tuple[str, str]]:
    for number, each in enumerate(trials.policies):
        yield _kind(number), each.policy


def _row(plan: PlannedJob, trial: PolicyTrial) -> Sequence[str]:
    """Policy, rounds, cost, duration, quality in the trial, and at the end."""
    forecast = trial.known
    trials = plan.trials
    mode = None if trials is None else kept_mode(plan.job, trials.metric)
    tried = _tried([points for points in trial.seeds if points], mode)
    if forecast is None:
        return (trial.policy, "", "", "", tried, trial.note)
    rounds = _range(forecast.rounds)
    return (
        trial.policy,
        f"{rounds} rounds",
        f"{_range(forecast.price)} units",
        forecast.time if forecast.seconds else "not known",
        tried,
        f"{trial.reached}, after round {rounds}"
        if mode is None
        else _best_of(trial.reached, rounds),
    )


def _tried(seeds: Sequence[Sequence[TrialPoint]], mode: Literal["max", "min"] | None) -> str:
    """The values of the models that the trials would deliver, and of which rounds they are.

    Args:
        seeds: evaluated rounds of each trial, none without any.
        mode: how a run chooses the best model by the metric; None if it delivers the last one.
    """
    found: dict[str, list[str]] = {}
    for points in seeds:
        values = [each.value for each in points]
        value = values[-1] if mode is None else max(values) if mode == "max" else min(values)
        found.setdefault(digits(points[-1].round), []).append(digits(value))
    each_round = [(" and ".join(values), rounds) for rounds, values in found.items()]
    if mode is None:
        return " and ".join(f"{values} after round {rounds}" for values, rounds in each_round)
    return " and ".join(_best_of(values, rounds) for values, rounds in each_round)


def _best_of(value: str, rounds: str) -> str:
    return f"{value}, best of {rounds} rounds"


def _range(ends: tuple[float, float]) -> str:
    return " to ".join(dict.fromkeys(digits(each) for each in ends))


def _facts(plan: PlannedJob) -> Iterator[tuple[str, str]]:
    """Names and values of what the plan says besides quality."""
    ranks = plan.sides.datacenter
    if ranks is not None:
        yield f"datacenter of {ranks.ranks} ranks", f"{ranks.examples} examples a step"
        layout = ranks.layout
        fits = {True: ", which fits", False: ", which does not fit", None: ""}[plan.fits(layout)]
        peak = layout.refused or f"{layout.peak:,} bytes{fits}"
        yield "peak of a rank", f"{peak} ({layout.text})"
        yield from ((each.name, each.text) for each in plan.step(ranks))
        if not any(each.unit == "s" for each in plan.step(ranks)):
            yield "time of a step", ranks.unknown or ranks.traffic_unknown or WHERE_RATE
        yield from ((each.name, each.text) for each in plan.goodput(ranks))
        if ranks.collectives:
            yield "collectives", ranks.collectives
    devices = plan.sides.devices
    if devices is not None:
        yield from ((f"devices: {each.name}", each.text) for each in devices.cohort)
        yield from ((f"a device receives, {each.name}", each.text) for each in devices.received)
        yield from ((f"a device sends, {each.name}", each.text) for each in devices.sent)
        yield from ((f"{each.name} in the run", each.text) for each in devices.run)
    if plan.timed is not None:
        yield from ((f"duration, {each.name}", each.text) for each in plan.timed.figures)
        if plan.timed.unknown:
            yield "duration of a round", plan.timed.unknown
    for each in plan.sides.privacy:
        yield f"privacy of {each.name}", each.text
    if not plan.sides.privacy:
        yield "privacy", "none is promised: the job has no noise"
    for each in plan.sides.cost:
        yield f"cost, {each.name}", each.text
    yield from ((f"cost of {each.name}", each.text) for each in plan.sides.tokens)
    if plan.calibration is not None:
        yield from ((each.name, each.text) for each in plan.measured)
        yield from (("the plan's error", each.text) for each in plan.errors)


def _layouts(ranks: PlannedRanks, rows: Sequence[LayoutRow]) -> list[Sequence[str]]:
    """A row for each layout that is possible, and one for each reason why others are not."""
    words = {True: "fits", False: "does not fit", None: ""}
    found: list[Sequence[str]] = [
        (
            each.text,
            _with_mb(f"{each.layout.peak:,} bytes"),
            _parts(each.layout),
            words[each.fits],
            each.step,
        )
        for each in rows
    ]
    refused = grouped_refusals(ranks.others)
    return found + [(text, "", "", f"refused: {why}", "") for why, text in refused.items()]


def _parts(layout: PlannedLayout) -> str:
    """What the memory of a layout is made of."""
    parts = {name: size for name, size in layout.memory.items() if name != "peak"}
    return ", ".join(f"{name} {_size(size)}" for name, size in parts.items())


def _size(size: int) -> str:
    """Bytes, from one MB on in MB, and from 10,000 MB on in GB."""
    return f"{size:,} bytes" if size < 1e6 else _large([size])


def _large(sizes: Sequence[int]) -> str:
    """A size or the ends of a range in one unit, MB or GB.

    >>> _large([9_999_000_000]), _large([6_362_000_000, 12_723_000_000])
    ('9999 MB', '6.362 to 12.72 GB')
    """
    # The largest with four digits is 9999 MB: more would have an exponent.
    unit, factor = ("MB", 1e6) if max(sizes) < 9999.5e6 else ("GB", 1e9)
    if max(sizes) >= 9999.5e9:
        return f"{' to '.join(f'{each / factor:,.0f}' for each in sizes)} {unit}"
    return f"{' to '.join(f'{each / factor:.4g}' for each in sizes)} {unit}"


def _with_mb(text: str) -> str:
    """A text with the bytes in it in MB or GB too, from one MB on.

    >>> _with_mb("950,400 to 1,899,152 bytes (exact)")
    '950,400 to 1,899,152 bytes, 0.9504 to 1.899 MB (exact)'
    >>> _with_mb("6,361,938,000 to 12,723,052,000 bytes")
    '6,361,938,000 to 12,723,052,000 bytes, 6.362 to 12.72 GB'
    >>> _with_mb("128 bytes")
    '128 bytes'
    """

    def in_mb(found: re.Match[str]) -> str:
        sizes = [int(each.replace(",", "")) for each in found[0].split() if each[0].isdigit()]
        if max(sizes) < 1e6:
            return found[0]
        return f"{found[0]}, {_large(sizes)}"

    return re.sub(r"[\d,]+( to [\d,]+)? bytes", in_mb, text)


def _figures(changed: ChangedPlan) -> str:
    """The figures of a changed plan, or why there are none, in words."""
    parts = [f"{each.name} {short(each)}" for each in changed.figures]
    parts += [f"refused: {changed.refused}"] if changed.refused else []
    parts += changed.notes
    return "; ".join(parts)


def _assumptions(plan: PlannedJob) -> Iterator[str]:
    """What the figures rest on, sentences."""
    ranks = plan.sides.datacenter
    devices = plan.sides.devices
    if plan.trials is not None:
        yield plan.trials.origin
        yield (
            "Simulated devices have the data that the task gives them on this machine, and the "
            "speed, bandwidth and dropout of [simulation]; a simulated datacenter is one rank."
        )
        for each in plan.trials.policies:
            if each.forecast is not None and each.note:
                yield f"{each.policy}: {each.note}."
    if ranks is not None:
        yield from _about_ranks(plan, ranks)
    if plan.calibration is not None:
        note = plan.calibration.note(plan.job, plan.ranks)
        yield from _sentences(note, plan.which_ranks)
    if devices is not None:
        yield from _sentences(*devices.notes)
    if plan.timed is not None:
        yield from _sentences(plan.timed.note)
    yield from _sentences(*plan.limits)
    if ranks is not None:
        yield from _sentences(WHOLE_PRICE)
    yield f"Cost has the prices of the job, if all invited devices take part; {plan.of_failed}."


def _about_ranks(plan: PlannedJob, ranks: PlannedRanks) -> Iterator[str]:
    kind = "GPUs" if ranks.on_gpus else "processors"
    yield f"Memory is counted of fake tensors, for ranks that are {kind}; nothing was booked."
    yield from _sentences(WHY_NO_SUM)
    for each in plan.assumptions:
        yield f"Time of a step: {each}."
    if any(each.unit == "FLOP/s" for each in plan.step(ranks)):
        yield (
            "Times of the datacenter are those of computing alone: messages between ranks, reading "
            "and checkpoints come on top."
        )


def _sentences(*texts: str) -> list[str]:
    """Some texts as sentences, without those that are empty.

    >>> _sentences("name the GPU by --gpu", "")
    ['Name the GPU by --gpu.']
    """
    return [f"{each[0].upper()}{each[1:]}." for each in texts if each]
