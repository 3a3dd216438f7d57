"""An index of a run's round log: what pages need of every attempt, read once per attempt.

A page about 5,000 rounds must not validate 5,000 records. The index keeps a few figures of each
ended attempt, and whole rows are read only for the page that is shown.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from isthmus_server.storage.records import parsed

OUTCOMES = ("accepted", "rejected", "dropped", "late")
"""Outcomes of receipts, in the order of pages."""


@dataclasses.dataclass(frozen=True, slots=True)
class IndexedAttempt:
    """What is kept of an ended attempt."""

    rowid: int
    round: int
    attempt: int
    committed: bool
    regime: str
    reason: str
    price: float
    elapsed: float
    epsilon: float | None
    metrics: Mapping[str, float]
    profile: Mapping[str, Mapping[str, float]]
    evaluation_error: str
    """Why an evaluation on devices failed; empty if none did."""
    outcomes: Mapping[str, int]
    """Receipts by outcome."""


@dataclasses.dataclass(frozen=True)
class ReceiptPage:
    """Receipts of one page, newest first."""

    rows: Sequence[Mapping[str, Any]]
    """Keys of `storage.records.Receipt`, and `round`, `attempt` and `outcome`."""
    total: int
    """Receipts with the outcome."""


class AttemptIndex:
    """The ended attempts of one run, in the order of their rows."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self.attempts: list[IndexedAttempt] = []
        self.rows_read = 0
        """Rows that were parsed so far."""

    def refresh(self) -> None:
        """Read the attempts that ended since the last call.

        Raises:
            DamagedError: a row cannot be read.
            sqlite3.Error: the log cannot be read.
        """
        self._read_after(self.attempts[-1].rowid if self.attempts else 0)
        (ended,) = self._database.execute(
            "SELECT count(*) FROM attempts WHERE record NOT NULL"
        ).fetchone()
        if ended != len(self.attempts):  # the run was rolled back
            self.attempts.clear()
            self._read_after(0)

    def _read_after(self, rowid: int) -> None:
        rows = self._database.execute(
            "SELECT rowid, state, record FROM attempts WHERE rowid>? AND record NOT NULL "
            "ORDER BY rowid",
            (rowid,),
        )
        for number, state, text in rows:
            self.attempts.append(_indexed(number, state, self._parsed(text)))

    def _parsed(self, text: str) -> dict[str, Any]:
        self.rows_read += 1
        record: dict[str, Any] = parsed(text)
        return record

    @property
    def rounds(self) -> list[IndexedAttempt]:
        """The committed rounds."""
        return [attempt for attempt in self.attempts if attempt.committed]

    def outcomes(self) -> Counter[str]:
        """All receipts by outcome."""
        total: Counter[str] = Counter()
        for attempt in self.attempts:
            total.update(attempt.outcomes)
        return total

    def records(self, attempts: Sequence[IndexedAttempt]) -> Iterator[dict[str, Any]]:
        """The whole records of some attempts."""
        for attempt in attempts:
            row = self._database.execute(
                "SELECT record FROM attempts WHERE rowid=?", (attempt.rowid,)
            ).fetchone()
            if row is not None and row[0] is not None:
                yield self._parsed(row[0])

    def receipts(self, outcome: str, first: int, count: int) -> ReceiptPage:
        """One page of receipts, newest attempt first; only its own attempts are read.

        Args:
            outcome: one of `OUTCOMES`, `reason` for those with a reason, or empty for all.
            first: number of the first receipt, from 0.
            count: receipts of a page.
        """
        newest = self.attempts[::-1]
        ends = list(itertools.accumulate(_matching(each, outcome) for each in newest))
        total = ends[-1] if ends else 0
        start = bisect.bisect_right(ends, first)
        stop = bisect.bisect_left(ends, first + count) + 1
        skipped = first - (ends[start - 1] if start else 0)
        rows = [
            {**receipt, "round": record["round"], "attempt": record["attempt"], "outcome": found}
            for record in self.records(newest[start:stop])
            for receipt in record["receipts"]
            for found in (_outcome(receipt),)
            if outcome in ("", found) or (outcome == "reason" and receipt.get("reason"))
        ]
        return ReceiptPage(rows[skipped : skipped + count], total)


def _indexed(rowid: int, state: str, record: Mapping[str, Any]) -> IndexedAttempt:
    outcomes = Counter(_outcome(receipt) for receipt in record["receipts"])
    outcomes["reason"] = sum(bool(receipt.get("reason")) for receipt in record["receipts"])
    return IndexedAttempt(
        rowid=rowid,
        round=record["round"],
        attempt=record["attempt"],
        committed=state == "committed",
        regime=record["regime"],
        reason=record["reason"],
        price=record["cost"]["price"],
        elapsed=record["elapsed"],
        epsilon=record.get("epsilon"),
        metrics=record.get("metrics", {}),
        profile=record.get("profile", {}),
        evaluation_error=(record.get("evaluation") or {}).get("error") or "",
        outcomes=outcomes,
    )


def _outcome(receipt: Mapping[str, Any]) -> str:
    return "late" if receipt.get("late") else str(receipt["status"])


def _matching(attempt: IndexedAttempt, outcome: str) -> int:
    if outcome:
        return attempt.outcomes.get(outcome, 0)
    return sum(attempt.outcomes.get(each, 0) for each in OUTCOMES)
