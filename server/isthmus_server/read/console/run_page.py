"""What the pages about one run, and about one of its rounds, show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from isthmus.job.promises import needs_of
from isthmus_server.budgets.budget import ADJACENCY, UNIT
from isthmus_server.read.console.attempt_index import OUTCOMES
from isthmus_server.read.console.pages import Paging
from isthmus_server.read.console.shown_run import REGIMES, ShownRun
from isthmus_server.read.pages.charts import RATES
from isthmus_server.read.report.explain import RECENT, explained_attempts
from isthmus_server.read.report.explanation_page import sections, title_of
from isthmus_server.read.report.late_devices import LateDevices
from isthmus_server.read.report.notes import COURSE, course, failed_evaluations
from isthmus_server.read.report.report import level_of_run
from isthmus_server.read.report.unused_updates import WINDOW, unused_updates
from isthmus_server.storage.events import CohortAwaited, ParticipantLate, RunServed
from isthmus_server.storage.records import (
    FailedAttempt,
    LoggedAttempt,
    PlannedAttempt,
    RoundRecord,
    parsed,
)

MAX_PAGE = 10**9
"""Numbers of pages and rounds in addresses are at most this."""

_EVENTS = (ParticipantLate.kind, CohortAwaited.kind, RunServed.kind, *COURSE)
"""Kinds of the events that the page of a run tells of."""

_FILTERS = ("", *OUTCOMES, "reason")


def number(query: Mapping[str, str], key: str) -> int:
    """A page's number; 1 for whatever is none."""
    text = query.get(key, "1")
    return min(max(int(text), 1), MAX_PAGE) if text.isascii() and text.isdigit() else 1


def outcome_of(query: Mapping[str, str]) -> str:
    """The outcome by which receipts are filtered; empty for all."""
    wanted = query.get("outcome", "")
    return wanted if wanted in _FILTERS else ""


def run_page(run: ShownRun, query: Mapping[str, str]) -> dict[str, Any]:
    """The values of the template `run`."""
    job = run.store.job
    index = run.index
    status, reason, final = run.store.status()
    attempts = index.attempts
    rounds = Paging(number(query, "page"), len(attempts), "page")
    shown = attempts[::-1][rounds.first : rounds.last]
    outcome = outcome_of(query)
    paging = Paging(number(query, "receipts"), 0, "receipts")
    total = index.receipts(outcome, 0, 0).total
    paging = Paging(paging.page, total, "receipts")
    receipts = index.receipts(outcome, paging.first, paging.size)
    spans = run.spans()
    last = attempts[-1] if attempts else None
    committed = len(index.rounds)
    planned = job.rounds if status == "running" else committed
    evaluated = [each for each in index.rounds if each.metrics]
    epsilon = run.epsilon()
    events = run.store.events(*_EVENTS)  # once: each time reads all of the log's
    last_rounds = map(RoundRecord.from_json, index.records(index.rounds[-WINDOW:]))
    return {
        "run": run,
        "job": job,
        "status": status,
        "reason": reason,
        "final": final,
        "committed": committed,
        "failed": len(attempts) - committed,
        "elapsed": last.elapsed if last else 0.0,
        "spent": run.spent(),
        "latest": evaluated[-1] if evaluated else None,
        "under_way": run.under_way() if status == "running" else None,
        "spans": placed(spans, max(planned, spans[-1]["last"] if spans else 0, 1)),
        "regimes": [each for each in REGIMES if each in {span["regime"] for span in spans}],
        "span_rounds": max(planned, 1),
        "rounds": rounds,
        "records": list(index.records(shown)),
        "committed_rows": {each.rowid for each in shown if each.committed},
        "shown": shown,
        "outcome": outcome,
        "counts": index.outcomes(),
        "outcomes": OUTCOMES,
        "paging": paging,
        "receipts": receipts.rows,
        "privacy": None
        if epsilon is None or job.privacy is None
        else {
            "epsilon": epsilon,
            "budget": job.privacy.epsilon,
            "delta": job.privacy.delta,
            "unit": UNIT,
            "adjacency": ADJACENCY,
            "share": min(100.0, 100.0 * epsilon / job.privacy.epsilon),
        },
        "level": level_of_run(job, events),
        "needs": needs_of(job),
        "warnings": [
            *unused_updates(list(last_rounds)),
            *LateDevices(events).sentences(
                sum(each.regime != "datacenter" for each in index.rounds)
            ),
            *failed_evaluations((each.round, each.evaluation_error) for each in index.rounds),
        ],
        "course": course(events),
        "profile": next((each.profile for each in reversed(index.rounds) if each.profile), {}),
        "rates": RATES,
        "query": query,
    }


def placed(spans: Sequence[Mapping[str, Any]], rounds: int) -> list[dict[str, Any]]:
    """Spans with their place (`x` and `width`) in a timeline of 1000 units."""
    return [
        {
            **span,
            "x": round(1000 * (span["first"] - 1) / rounds, 2),
            "width": round(1000 * (span["last"] - span["first"] + 1) / rounds, 2),
        }
        for span in spans
    ]


def round_page(run: ShownRun, round_: int, query: Mapping[str, str]) -> dict[str, Any] | None:
    """The values of the template `round`; None for a round that was not decided on.

    Raises:
        DamagedError: a row cannot be read.
    """
    rows = run.store.log.connection.execute(
        "SELECT state, planned, record FROM attempts WHERE round=? ORDER BY attempt", (round_,)
    ).fetchall()
    if not rows:
        return None
    logged = [_logged(*row) for row in rows]
    before = [each for each in run.index.rounds if each.round < round_]
    recent = [
        record
        for data in run.index.records(before[-RECENT:])
        for record in (RoundRecord.from_json(data),)
    ]
    explained = explained_attempts(round_, logged, recent, Counter(each.regime for each in before))
    outcome = outcome_of(query)
    attempts = [each.record for each in logged if each.record is not None]
    receipts = [
        {
            **receipt.to_json(),
            "outcome": receipt.outcome,
            "round": record.round,
            "attempt": record.attempt,
        }
        for record in attempts
        for receipt in record.receipts
        if outcome in ("", receipt.outcome) or (outcome == "reason" and receipt.reason)
    ]
    counts = Counter(receipt.outcome for each in attempts for receipt in each.receipts)
    counts["reason"] = sum(bool(one.reason) for each in attempts for one in each.receipts)
    paging = Paging(number(query, "receipts"), len(receipts), "receipts")
    decided = [row[0] for row in _neighbours(run, round_)]
    return {
        "run": run,
        "round": round_,
        "title": title_of(explained),
        "sections": sections(explained, run.store.job.strategy.policy),
        "outcome": outcome,
        "outcomes": OUTCOMES,
        "counts": counts,
        "paging": paging,
        "receipts": receipts[paging.first : paging.last],
        "before": max((each for each in decided if each < round_), default=None),
        "after": min((each for each in decided if each > round_), default=None),
        "query": query,
    }


def _neighbours(run: ShownRun, round_: int) -> list[tuple[int]]:
    rows = run.store.log.connection.execute(
        "SELECT max(round) FROM attempts WHERE round<? UNION ALL "
        "SELECT min(round) FROM attempts WHERE round>?",
        (round_, round_),
    )
    return [row for row in rows if row[0] is not None]


def _logged(state: str, planned: str, record: str | None) -> LoggedAttempt:
    kind = RoundRecord if state == "committed" else FailedAttempt
    return LoggedAttempt(
        planned=PlannedAttempt.from_json(parsed(planned)),
        record=kind.from_json(parsed(record)) if record else None,
    )
