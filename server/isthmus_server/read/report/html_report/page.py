"""Write a run's report as one HTML page."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from isthmus import __version__
from isthmus.system.clocks import utc
from isthmus_server.read.report.html_report.charts import (
    Point,
    Span,
    figure,
    gauge,
    line_chart,
    stacked_bars,
    text,
    timeline,
)
from isthmus_server.read.report.html_report.style import STYLE
from isthmus_server.read.report.report import Report, format_metrics
from isthmus_server.storage.events import ParticipantDeclined, ParticipantLeft
from isthmus_server.storage.records import EndedAttempt, FailedAttempt, RoundRecord

MAX_ROWS = 2000
"""Rows of one table; of more, the latest are shown."""

_OUTCOMES = ("accepted", "rejected", "dropped", "late")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""What the browser may load for the page: nothing but its own style."""

_RATES = {
    "units_per_second": "scored units per second",
    "peak_memory_gib": "peak memory in GiB",
    "mfu": "model FLOPS utilisation",
    "restarts": "restarts of the ranks",
}


def html_page(report: Report, now: float | None = None) -> str:
    """The whole page.

    Args:
        report: of a run that goes on or has ended.
        now: when it is written, in Unix seconds; by default the clock's time.
    """
    attempts: list[EndedAttempt] = sorted(
        [*report.rounds, *report.failed_attempts], key=lambda record: (record.round, record.attempt)
    )
    sections = [
        ("Summary", _summary(report, attempts)),
        ("Rounds", _rounds(report, attempts)),
        ("Quality", _quality(report.rounds)),
        ("Participation", _participation(report, attempts)),
        ("Privacy", _privacy(report, attempts)),
        ("Datacenter", _datacenter(report.rounds)),
    ]
    return document(f"{text(report.run_id)}: {text(report.status)}", sections, now)


def document(title: str, sections: Sequence[tuple[str, str]], now: float | None = None) -> str:
    """A page with a title and sections, pairs of a headline and its HTML; empty ones are left out.

    `now` is when it is written, in Unix seconds; by default the clock's time.
    """
    body = "".join(f"<section><h2>{name}</h2>{part}</section>" for name, part in sections if part)
    written = utc(time.time() if now is None else now)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>"
        f"<body><header><h1>{title}</h1></header><main>{body}</main>"
        f"<footer>Written {text(written)} by Isthmus {text(__version__)}.</footer></body></html>\n"
    )


def _summary(report: Report, attempts: Sequence[EndedAttempt]) -> str:
    job = report.job
    cost = sum(record.cost.price for record in attempts)
    rows = [
        ("job", job["name"]),
        ("policy", job["strategy"]["policy"]),
        ("rounds", f"{len(report.rounds)} of {job['rounds']}"),
        ("failed attempts", len(report.failed_attempts)),
        ("time", f"{attempts[-1].elapsed:.0f} s" if attempts else "0 s"),
        ("bytes from participants", f"{sum(each.cost.bytes_up for each in attempts):,}"),
        ("bytes to participants", f"{sum(each.cost.bytes_down for each in attempts):,}"),
    ]
    if report.reason:
        rows.append(("it ended because", report.reason))
    if report.final is not None:
        which = f"round {report.final.round}{', the best' if report.final.best else ''}"
        rows += [
            ("final model", which),
            ("its evaluation", format_metrics(report.final.metrics)),
            ("SHA-256", report.final.model_sha256),
        ]
    elif report.rounds:
        evaluated = [record for record in report.rounds if record.metrics]
        if evaluated:
            rows.append(("latest evaluation", format_metrics(evaluated[-1].metrics)))
    table = "".join(f"<tr><th>{text(name)}</th><td>{text(value)}</td></tr>" for name, value in rows)
    spent = f"<p>cost {figure(cost)}, without a budget</p>"
    if job["budget"] is not None:
        spent = gauge(cost, job["budget"], "cost")
    return f'<table class="facts">{table}</table>{spent}'


def _rounds(report: Report, attempts: Sequence[EndedAttempt]) -> str:
    if not attempts:
        return "<p>No round has ended so far.</p>"
    planned = report.job["rounds"] if report.status == "running" else len(report.rounds)
    strip = timeline(list(_spans(report.rounds)), max(planned, len(report.rounds)))
    rows = "".join(_row(record) for record in attempts[-MAX_ROWS:])
    head = "".join(
        f"<th>{name}</th>"
        for name in ("round", "regime", "because", "took part", "held-out", "cost", "seconds")
    )
    return (
        f"{_legend(dict.fromkeys(record.regime for record in attempts))}{strip}"
        f'{_earlier(len(attempts), "attempts")}<div class="scroll"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _spans(rounds: Sequence[RoundRecord]) -> Iterator[Span]:
    """Consecutive rounds of one regime, with the reason of the first."""
    for regime, group in itertools.groupby(rounds, key=lambda record: record.regime):
        members = list(group)
        first = members[0].round
        last = members[-1].round
        which = f"round {first}" if first == last else f"rounds {first} to {last}"
        yield Span(first, last, regime, f"{which}: {regime}, because {members[0].reason}")


def _row(record: EndedAttempt) -> str:
    failed = isinstance(record, FailedAttempt)
    reason = record.error if isinstance(record, FailedAttempt) else record.reason
    attempt = f", try {record.attempt}" if record.attempt > 1 else ""
    shown = f'<span class="key {text(record.regime)}"></span>{text(record.regime)}'
    cells = (
        f"{record.round}{attempt}",
        shown,
        f'<span class="{"failure" if failed else ""}">{text(reason)}</span>',
        f"{record.participants.accepted} of {record.participants.invited}",
        text(format_metrics(record.metrics)),
        figure(record.cost.price),
        f"{record.seconds:.2f}",
    )
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _quality(rounds: Sequence[RoundRecord]) -> str:
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
                    f"{figure(record.metrics[name])} at cost {figure(cost)}",
                )
                for record, cost in zip(rounds, costs, strict=True)
                if name in record.metrics
            ]
            charts.append(line_chart(points, title=name, x_label=x_label))
    drawn = "".join(charts)
    return f'<div class="charts">{drawn}</div>' if drawn else ""


def _participation(report: Report, attempts: Sequence[EndedAttempt]) -> str:
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
    if not bars and not people:
        return ""
    words = ", ".join(f"{total[outcome]:,} {outcome}" for outcome in _OUTCOMES)
    drawn = stacked_bars(bars, title="Outcomes of participants by round")
    told = ""
    if rows or people:
        cells = "".join(
            f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>"
            for row in (*rows[-MAX_ROWS:], *people[-MAX_ROWS:])
        )
        head = "".join(f"<th>{name}</th>" for name in ("round", "who", "outcome", "reason"))
        told = (
            f"{_earlier(max(len(rows), len(people)), 'of each')}"
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{cells}</tbody></table></div>"
        )
    return f"<p>{words}</p>{_legend(dict.fromkeys(_OUTCOMES))}{drawn}{told}"


def _privacy(report: Report, attempts: Sequence[EndedAttempt]) -> str:
    parts = []
    if report.privacy is not None:
        spent = report.privacy
        parts.append(f"<p>{text(spent.sentence)}</p>")
        parts.append(gauge(spent.epsilon, spent.budget, f"epsilon of one {spent.unit}"))
        points = [
            _point(record, record.epsilon) for record in attempts if record.epsilon is not None
        ]
        parts.append(line_chart(points, title="epsilon", x_label="rounds", limit=spent.budget))
    if report.examples_privacy is not None:
        parts.append(f"<p>{text(report.examples_privacy.sentence)}</p>")
    if report.device_examples_privacy is not None:
        parts.append(f"<p>{text(report.device_examples_privacy.sentence)}</p>")
    return "".join(parts)


def _datacenter(rounds: Sequence[RoundRecord]) -> str:
    """Rates and memory of each datacenter, and all figures of the last round with one."""
    profiled = [record for record in rounds if record.profile]
    if not profiled:
        return ""
    charts = []
    for name in dict.fromkeys(name for record in profiled for name in record.profile):
        for key, title in _RATES.items():
            points = [
                _point(record, record.profile[name][key])
                for record in profiled
                if key in record.profile.get(name, {})
            ]
            charts.append(line_chart(points, title=f"{name}: {title}", x_label="rounds"))
    last = profiled[-1]
    rows = "".join(
        f"<tr><td>{text(name)}</td><td>{text(key)}</td><td>{figure(value)}</td></tr>"
        for name, figures in last.profile.items()
        for key, value in figures.items()
    )
    return (
        f'<div class="charts">{"".join(charts)}</div><details><summary>Figures of round '
        f"{last.round}</summary><table>{rows}</table></details>"
    )


def _point(record: EndedAttempt, value: float) -> Point:
    return Point(record.round, value, record.regime, f"round {record.round}: {figure(value)}")


def _legend(kinds: Sequence[str] | dict[str, None]) -> str:
    keys = "".join(f'<li><span class="key {text(kind)}"></span>{text(kind)}</li>' for kind in kinds)
    return f'<ul class="legend">{keys}</ul>'


def _earlier(count: int, what: str) -> str:
    if count <= MAX_ROWS:
        return ""
    return f"<p>The latest {MAX_ROWS:,} {what}; isthmus report --json has all {count:,}.</p>"
