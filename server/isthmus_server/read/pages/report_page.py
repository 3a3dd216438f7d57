"""Write a run's report as one HTML page."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from markupsafe import Markup

from isthmus.system.clocks import utc
from isthmus_server.read.pages.charts import (
    RATES,
    Point,
    Span,
    gauge,
    line_chart,
    stacked_bars,
    timeline,
)
from isthmus_server.read.pages.templates import digits, templates
from isthmus_server.read.report.notes import devices_to_look_at, notes
from isthmus_server.read.report.report import (
    Report,
    final_apart,
    format_metrics,
    moved,
    needs_of_owners,
)
from isthmus_server.storage.events import ParticipantDeclined, ParticipantLeft
from isthmus_server.storage.records import EndedAttempt, RoundRecord

MAX_ROWS = 2000
"""Rows of one table; of more, the latest are shown."""

_OUTCOMES = ("accepted", "rejected", "dropped", "late")


def html_page(report: Report, now: float | None = None) -> str:
    """The whole page: one file that loads nothing.

    Args:
        report: of a run that goes on or has ended.
        now: when it is written, in Unix seconds; by default the clock's time.
    """
    attempts: list[EndedAttempt] = sorted(
        [*report.rounds, *report.failed_attempts], key=lambda record: (record.round, record.attempt)
    )
    cost = sum(record.cost.price for record in attempts)
    budget = report.job["budget"]
    goes_on = report.status in ("running", "stopped")
    planned = report.job["rounds"] if goes_on else len(report.rounds)
    return page(
        "report",
        f"{report.run_id}: {report.status}",
        now,
        max_rows=MAX_ROWS,
        facts=_facts(report, attempts),
        cost=cost,
        budget=None if budget is None else gauge(cost, budget, "cost"),
        attempts=attempts,
        regimes=[(each, each) for each in dict.fromkeys(record.regime for record in attempts)],
        timeline=timeline(list(_spans(report.rounds)), max(planned, len(report.rounds))),
        moved=moved(attempts),
        suspected=devices_to_look_at(report.job, report.rounds),
        notes=notes(report.rounds, report.events),
        quality=_quality(report.rounds),
        privacy=_privacy(report, attempts),
        measured=[each.text.partition(": ")[::2] for each in report.measured],
        forecast_errors=[(each.regime, each.text) for each in report.forecast_errors],
        **_participation(report, attempts),
        **_datacenter(report.rounds),
    )


def page(template: str, title: str, now: float | None = None, **values: Any) -> str:
    """A page from the template with that name, which extends `document.html`.

    `now` is when it is written, in Unix seconds; by default the clock's time.
    """
    written = utc(time.time() if now is None else now)
    rendered = templates().get_template(f"{template}.html")
    return rendered.render(title=title, written=written, **values)


def _facts(report: Report, attempts: Sequence[EndedAttempt]) -> list[tuple[str, object]]:
    """Names and values of the summary."""
    job = report.job
    rows = [
        ("job", job["name"]),
        ("policy", job["strategy"]["policy"]),
        ("rounds", f"{len(report.rounds)} of {job['rounds']}"),
        ("failed attempts", len(report.failed_attempts)),
        ("time", f"{attempts[-1].elapsed:.0f} s" if attempts else "0 s"),
        ("bytes from participants", f"{sum(each.cost.bytes_up for each in attempts):,}"),
        ("bytes to participants", f"{sum(each.cost.bytes_down for each in attempts):,}"),
    ]
    model = job.get("model", {})
    if model.get("start") is not None:
        rows.append(("started from", f"{model['start']}, SHA-256 {model['sha256']}"))
    if report.reason:
        rows.append(("it ended because", report.reason))
    if report.final is not None:
        which = f"round {report.final.round}{', the best' if report.final.best else ''}"
        rows += [
            ("final model", which),
            ("its evaluation", format_metrics(report.final.metrics)),
            *final_apart(report),
            ("SHA-256", report.final.model_sha256),
        ]
    elif report.rounds:
        evaluated = [record for record in report.rounds if record.metrics]
        if evaluated:
            rows.append(("latest evaluation", format_metrics(evaluated[-1].metrics)))
    return rows


def _spans(rounds: Sequence[RoundRecord]) -> Iterator[Span]:
    """Consecutive rounds of one regime, with the reason of the first."""
    for regime, group in itertools.groupby(rounds, key=lambda record: record.regime):
        members = list(group)
        first = members[0].round
        last = members[-1].round
        which = f"round {first}" if first == last else f"rounds {first} to {last}"
        yield Span(first, last, regime, f"{which}: {regime}, because {members[0].reason}")


def _quality(rounds: Sequence[RoundRecord]) -> list[Markup]:
    """The first metric that is no loss, and the first loss, against rounds and against cost."""
    names = [*{name: None for record in rounds for name in record.metrics}]
    chosen = [
        next((name for name in names if not name.endswith("loss")), None),
        next((name for name in names if name.endswith("loss")), None),
    ]
    costs = list(itertools.accumulate(record.cost.price for record in rounds))
    charts = []
    for name in chosen:
        if name is None:
            continue
        for x_label in ("rounds", "cost"):
            points = [
                Point(
                    record.round if x_label == "rounds" else cost,
                    record.metrics[name],
                    record.regime,
                    f"round {record.round}, {record.regime}: {name} "
                    f"{digits(record.metrics[name])} at cost {digits(cost)}",
                )
                for record, cost in zip(rounds, costs, strict=True)
                if name in record.metrics
            ]
            charts.append(line_chart(points, title=name, x_label=x_label))
    return [chart for chart in charts if chart]


def _participation(report: Report, attempts: Sequence[EndedAttempt]) -> dict[str, Any]:
    """Outcomes of receipts, and what is told of participants with a reason."""
    bars = []
    rows = []
    total: Counter[str] = Counter()
    for record in attempts:
        counts = Counter(receipt.outcome for receipt in record.receipts)
        total += counts
        bars.append((record.round, {outcome: counts[outcome] for outcome in _OUTCOMES}))
        rows += [
            (record.round, receipt.participant, receipt.outcome, receipt.reason)
            for receipt in record.receipts
            if receipt.reason
        ]
    people = [
        ("", event.participant, event.kind, event.reason)
        for event in report.events
        if isinstance(event, ParticipantDeclined | ParticipantLeft)
    ]
    words = ", ".join(f"{total[outcome]:,} {outcome}" for outcome in _OUTCOMES)
    return {
        "outcomes": words if bars or people else "",
        "outcome_keys": [(outcome, outcome) for outcome in _OUTCOMES],
        "bars": stacked_bars(bars, title="Outcomes of participants by round"),
        "told": [*rows[-MAX_ROWS:], *people[-MAX_ROWS:]],
        "told_of": max(len(rows), len(people)),
    }


def _privacy(report: Report, attempts: Sequence[EndedAttempt]) -> list[str]:
    """Sentences and charts."""
    parts: list[str] = []
    if report.level is not None:
        parts.append(f"level: {report.level.sentence}")
    parts += needs_of_owners(report)
    if report.privacy is not None:
        spent = report.privacy
        points = [
            _point(record, record.epsilon) for record in attempts if record.epsilon is not None
        ]
        parts += [
            spent.sentence,
            gauge(spent.epsilon, spent.budget, f"epsilon of one {spent.unit}"),
            line_chart(points, title="epsilon", x_label="rounds", limit=spent.budget),
        ]
    if report.examples_privacy is not None:
        parts.append(report.examples_privacy.sentence)
    if report.device_examples_privacy is not None:
        parts.append(report.device_examples_privacy.sentence)
    return parts


def _datacenter(rounds: Sequence[RoundRecord]) -> dict[str, Any]:
    """Rates and memory of each datacenter, and the last round with one."""
    profiled = [record for record in rounds if record.profile]
    charts = []
    for name in dict.fromkeys(name for record in profiled for name in record.profile):
        for key, title in RATES.items():
            points = [
                _point(record, record.profile[name][key])
                for record in profiled
                if key in record.profile.get(name, {})
            ]
            charts.append(line_chart(points, title=f"{name}: {title}", x_label="rounds"))
    return {"rates": charts, "profiled": profiled[-1] if profiled else None}


def _point(record: EndedAttempt, value: float) -> Point:
    return Point(record.round, value, record.regime, f"round {record.round}: {digits(value)}")
