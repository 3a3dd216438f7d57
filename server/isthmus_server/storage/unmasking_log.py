"""The secure sums that devices may have helped to unmask, in the round log.

A device that has revealed its shares for a model, or for a round, takes part in a further sum for
them only with the same survivors. The server knows from this table whom it may ask, also after a
crash: an entry is stored before the message is sent with which devices reveal their shares.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Collection, Sequence

from isthmus.wire import link_pb2
from isthmus_server.storage.group_commit import GroupCommit
from isthmus_server.storage.sealed_database import SealedDatabase

KEPT = 128
"""Newest entries that are kept: two for each sum of updates by group, whose ranges come first.
Those of the last round of each kind of sum are kept too, however long ago that was."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unmasking:
    """A sum that these devices may have helped to unmask."""

    run_id: str
    """Run of the configuration: comparisons have ids of their own."""
    round: int
    """The round, or the number of the comparison."""
    attempt: int
    model_hash: bytes
    draw: int
    """Draw of the lottery in which they were selected; 0 without one."""
    devices: frozenset[str]
    """The survivors; after a refusal, the device that refused."""
    group: str = ""
    """The group that they were summed as; empty for a sum of any devices."""
    request: bytes = b""
    """The request in which a device joined it, encoded; a repetition asks for the same vectors."""
    refused: bool = False
    """A device refused because of a sum that is not in this log; its survivors are unknown."""


class UnmaskingLog:
    """The table `unmaskings` of one round log; without a database it is kept in memory."""

    def __init__(self, log: SealedDatabase | None = None) -> None:
        self._log = log
        self._db = None if log is None else log.connection
        self._known: list[Unmasking] | None = [] if log is None else None
        self.together = GroupCommit[Unmasking](self.add)
        """Adds the entries of several groups in one commit."""
        self._refused_sums: set[tuple[str, int, int]] = set()
        """Sums that were refused in this process: one that begins anew asks for such a sum once
        more."""

    @property
    def entries(self) -> Sequence[Unmasking]:
        """All that are kept, oldest first."""
        # Read on first use: a run that is only read may be damaged.
        if self._known is None:
            assert self._db is not None
            rows = self._db.execute(
                "SELECT run_id, round, attempt, model_hash, draw, devices, sum_group, refused, "
                "request FROM unmaskings ORDER BY rowid"
            )
            self._known = [
                Unmasking(
                    run_id=run_id,
                    round=round_,
                    attempt=attempt,
                    model_hash=bytes.fromhex(model_hash),
                    draw=draw,
                    devices=frozenset(json.loads(devices)),
                    group=group,
                    refused=bool(refused),
                    request=request,
                )
                for run_id, round_, attempt, model_hash, draw, devices, group, refused, request in (
                    rows
                )
            ]
        return self._known

    def add(self, *entries: Unmasking) -> None:
        """Store entries, all or none; they are on disk when this returns.

        Raises:
            OSError, sqlite3.Error: they cannot be stored.
        """
        # A sum that is repeated with the same devices has a new attempt, and so an entry of its
        # own; an equal one is the same sum.
        new = [entry for entry in entries if entry not in self.entries]
        if not new:
            return
        if self._log is not None and self._db is not None:
            with self._log.transaction():
                self._insert(self._db, new)
            # Only then may devices be asked: a log that lost this entry has to be noticed.
            self._log.write_head()
        # After the commit: what could not be stored is not known either.
        self._known = _kept([*self.entries, *new])

    def _insert(self, db: sqlite3.Connection, entries: Sequence[Unmasking]) -> None:
        for entry in entries:
            db.execute(
                "INSERT INTO unmaskings VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    entry.run_id,
                    entry.round,
                    entry.attempt,
                    entry.model_hash.hex(),
                    entry.draw,
                    json.dumps(sorted(entry.devices)),
                    entry.group,
                    entry.refused,
                    entry.request,
                ),
            )
        if len(self.entries) + len(entries) > KEPT:
            db.execute(
                "DELETE FROM unmaskings WHERE rowid <= (SELECT MAX(rowid) FROM unmaskings) - ? "
                "AND (run_id, round) NOT IN "
                "(SELECT run_id, MAX(round) FROM unmaskings GROUP BY run_id)",
                (KEPT,),
            )

    def request_of(self, model_hash: bytes, devices: Collection[str]) -> link_pb2.Request | None:
        """How these devices joined a sum of this model that they may have unmasked.

        Of the last one; None if there is none.
        """
        for entry in reversed(self.entries):
            same = entry.model_hash == model_hash and entry.devices == frozenset(devices)
            if same and entry.request and not entry.refused:
                return link_pb2.Request.FromString(entry.request)
        return None

    def note_refused_sum(self, run_id: str, round_: int, attempt: int) -> None:
        """Note that the server has the sum of an attempt, and cannot use it.

        Its devices give it again just so, unless one of them was at fault.
        """
        self._refused_sums.add((run_id, round_, attempt))

    def is_refused_sum(self, entry: Unmasking) -> bool:
        """Whether the server has the sum of an entry, and cannot use it."""
        return (entry.run_id, entry.round, entry.attempt) in self._refused_sums

    def has_refused_sum(self, run_id: str, round_: int) -> bool:
        """Whether the server has a sum of a round that it cannot use."""
        return any(about[:2] == (run_id, round_) for about in self._refused_sums)

    def of_run(self, run_id: str) -> list[Unmasking]:
        """Entries of all rounds and models of a run; newest first."""
        return [entry for entry in reversed(self.entries) if entry.run_id == run_id]

    def about(self, run_id: str, round_: int, model_hash: bytes | None) -> list[Unmasking]:
        """Entries for the model in any round, or for the round with any model; newest first."""
        return [
            entry
            for entry in reversed(self.entries)
            if entry.model_hash == model_hash or (entry.run_id, entry.round) == (run_id, round_)
        ]


def _kept(entries: Sequence[Unmasking]) -> list[Unmasking]:
    """What the table keeps of entries, oldest first; see `KEPT`."""
    last: dict[str, int] = {}
    for entry in entries:
        last[entry.run_id] = max(entry.round, last.get(entry.run_id, entry.round))
    older = [entry for entry in entries[:-KEPT] if entry.round == last[entry.run_id]]
    return [*older, *entries[-KEPT:]]
