"""The ranges of updates that secure sums have revealed, in the round log.

The sum of a round's updates is encoded by the ranges that were summed before it. They are stored as
soon as they are known: a repeated attempt, also after a crash, uses the same ones. Its devices
would not be in a second sum of ranges, unless with exactly the same others.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from typing import TYPE_CHECKING

from isthmus_server.storage.group_commit import GroupCommit
from isthmus_server.storage.sealed_database import SealedDatabase

if TYPE_CHECKING:  # it loads PyTorch, which reading a run does not need
    from isthmus_privacy.secagg.ranges import Ranges

KEPT = 128
"""Most sums of which the ranges are kept: as many as in the log of unmaskings."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SummedRanges:
    """The ranges of the updates of these devices."""

    round: int
    model_hash: bytes
    """What the configuration of the updates names: the model, or what takes its place."""
    group: str
    """The group that they were summed as; empty for a sum of any devices."""
    devices: frozenset[str]
    ranges: Ranges
    """Unknown ones of a sum that is lost, or has no meaning: there is no second one."""


class RangeLog:
    """The table `ranges` of one round log; without a database it is kept in memory.

    It has the newest `KEPT`.
    """

    def __init__(self, log: SealedDatabase | None = None) -> None:
        self._log = log
        self._db = None if log is None else log.connection
        self._known: list[SummedRanges] | None = [] if log is None else None
        self.together = GroupCommit[SummedRanges](self.add)
        """Adds the entries of several groups in one commit."""

    def _entries(self) -> list[SummedRanges]:
        """Read on first use: a run that is only read may be damaged."""
        if self._known is None:
            from isthmus_privacy.secagg.ranges import Ranges

            assert self._db is not None
            rows = self._db.execute(
                "SELECT round, model_hash, sum_group, devices, counts FROM ranges ORDER BY rowid"
            )
            self._known = [
                SummedRanges(
                    round=round_,
                    model_hash=bytes.fromhex(model_hash),
                    group=group,
                    devices=frozenset(json.loads(devices)),
                    ranges=Ranges.read(json.loads(counts)),
                )
                for round_, model_hash, group, devices, counts in rows
            ]
        return self._known

    def of(self, round_: int, model_hash: bytes, group: str) -> SummedRanges | None:
        """The ranges of a group's earlier updates to a model; None for none.

        Those of the same round first: a round may start from the model of an earlier one.
        """
        known = [
            entry
            for entry in reversed(self._entries())
            if (entry.model_hash, entry.group) == (model_hash, group)
        ]
        if not known:
            return None
        return next((entry for entry in known if entry.round == round_), known[0])

    def last_known(self, *, before: int) -> Ranges | None:
        """The newest ranges of an earlier round; None if there are none that are known."""
        earlier = (entry for entry in reversed(self._entries()) if entry.round < before)
        return next((entry.ranges for entry in earlier if entry.ranges.is_known), None)

    def of_other_groups(self, round_: int, model_hash: bytes, group: str) -> SummedRanges | None:
        """The ranges of all other groups of a round together; None for none.

        For a group with devices of theirs, which may be in no second sum of ranges.
        """
        newest: dict[str, SummedRanges] = {}
        for entry in self._entries():
            if (entry.round, entry.model_hash) == (round_, model_hash):
                newest[entry.group] = entry
        if not newest:
            return None
        ranges = [entry.ranges for entry in newest.values()]
        if lost := [each for each in ranges if not each.is_known]:
            ranges = lost
        together = [sum(of_bin) for of_bin in zip(*(each.counts for each in ranges), strict=True)]
        return SummedRanges(
            round=round_,
            model_hash=model_hash,
            group=group,
            devices=frozenset().union(*(entry.devices for entry in newest.values())),
            ranges=ranges[0].read(together),
        )

    def add(self, *entries: SummedRanges) -> None:
        """Store the ranges of sums, all or none; they are on disk when this returns.

        Raises:
            OSError, sqlite3.Error: they cannot be stored.
        """
        if self._log is not None and self._db is not None:
            with self._log.transaction():
                for entry in entries:
                    self._insert(self._db, entry)
            self._log.write_head()
            self._known = None
        else:
            self._known = [*self._entries(), *entries][-KEPT:]

    @staticmethod
    def _insert(db: sqlite3.Connection, entry: SummedRanges) -> None:
        db.execute(
            "INSERT INTO ranges VALUES (?, ?, ?, ?, ?)",
            (
                entry.round,
                entry.model_hash.hex(),
                entry.group,
                json.dumps(sorted(entry.devices)),
                json.dumps(entry.ranges.counts),
            ),
        )
        db.execute("DELETE FROM ranges WHERE rowid <= (SELECT MAX(rowid) FROM ranges) - ?", (KEPT,))
