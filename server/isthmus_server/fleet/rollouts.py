"""Tokens with which many devices join: a bounded number, for a limited time, revoked together."""

from __future__ import annotations

import sqlite3

from isthmus.errors import AdmissionRefused, UserError
from isthmus.names import checked_name, is_name
from isthmus.system.clocks import BY_SERVERS_CLOCK, utc

SCHEMA = """
CREATE TABLE IF NOT EXISTS rollouts (
    name TEXT PRIMARY KEY, digest BLOB NOT NULL UNIQUE, kind TEXT NOT NULL, expires REAL NOT NULL,
    uses INTEGER NOT NULL, revoked REAL
) STRICT;
CREATE TABLE IF NOT EXISTS rollout_members (
    rollout TEXT NOT NULL, number INTEGER NOT NULL, participant TEXT NOT NULL,
    identity BLOB NOT NULL, used REAL NOT NULL, certificate BLOB NOT NULL,
    PRIMARY KEY (rollout, number)
) STRICT;
"""

MAX_USES = 100_000


class Rollouts:
    """The rollouts of a registry; the caller holds the transaction.

    Guarantees:
      * a token admits no more participants than it was made for, also if some were revoked since;
      * members are named NAME-1, NAME-2 and so on, and no name is given twice;
      * after `revoke` the token admits nobody.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def add(self, digest: bytes, *, name: str, kind: str, expires: float, uses: int) -> None:
        """Allow `uses` joins under names that begin with `name`, until `expires` (Unix seconds).

        Raises:
            UserError: there was a rollout of that name, or the names would be too long.
        """
        checked_name(name)
        if not is_name(f"{name}-{uses}"):
            raise UserError(f"names such as '{name}-{uses}' are too long; choose a shorter name")
        if self._db.execute("SELECT 1 FROM rollouts WHERE name=?", (name,)).fetchone():
            raise UserError(f"there was a rollout {name!r} already; choose another name")
        self._db.execute(
            "INSERT INTO rollouts VALUES (?, ?, ?, ?, ?, NULL)", (name, digest, kind, expires, uses)
        )

    def place(
        self, digest: bytes, kind: str, identity: bytes, now: float, repeat_seconds: float
    ) -> tuple[str, bytes | None] | None:
        """The name for the next participant, and its certificate if it has joined just before.

        Returns None if the token is of no rollout.

        Raises:
            AdmissionRefused: the rollout is over, revoked, complete, or for another kind.
        """
        row = self._db.execute(
            "SELECT name, kind, expires, uses, revoked FROM rollouts WHERE digest=?", (digest,)
        ).fetchone()
        if row is None:
            return None
        name, for_kind, expires, uses, revoked = row
        if revoked is not None:
            raise AdmissionRefused("this token has been revoked; ask the operator for another")
        joined = self._db.execute(
            "SELECT participant, certificate, used FROM rollout_members "
            "WHERE rollout=? AND identity=?",
            (name, identity),
        ).fetchone()
        if joined is not None and now < joined[2] + repeat_seconds:
            return joined[0], joined[1]  # the first answer may have been lost
        if now >= expires:
            raise AdmissionRefused(
                f"this token ended at {utc(expires)} {BY_SERVERS_CLOCK} {utc(now)}; ask the "
                "operator for another"
            )
        if kind != for_kind:
            raise AdmissionRefused(
                f"this token is for participants of kind {for_kind!r}, not {kind!r}"
            )
        if (used := self._used(name)) >= uses:
            raise AdmissionRefused(
                f"this token was for {uses} participants, and {used} have joined with it; ask the "
                "operator for another"
            )
        number = used + 1
        while self._is_taken(f"{name}-{number}"):  # by one that joined with a token of its own
            number += 1
        return f"{name}-{number}", None

    def _is_taken(self, participant: str) -> bool:
        query = "SELECT 1 FROM participants WHERE name=?"
        return self._db.execute(query, (participant,)).fetchone() is not None

    def joined(
        self, digest: bytes, name: str, identity: bytes, certificate: bytes, now: float
    ) -> None:
        """Note that a participant has joined under the name that `place` returned."""
        (rollout,) = self._db.execute(
            "SELECT name FROM rollouts WHERE digest=?", (digest,)
        ).fetchone()
        row = (rollout, self._used(rollout) + 1, name, identity, now, certificate)
        self._db.execute("INSERT INTO rollout_members VALUES (?, ?, ?, ?, ?, ?)", row)

    def revoke(self, name: str, now: float) -> list[tuple[str, bytes]]:
        """End a rollout; returns names and identities of its participants, which stay as they are.

        Raises:
            UserError: there is no such rollout, or it was revoked before.
        """
        row = self._db.execute("SELECT revoked FROM rollouts WHERE name=?", (name,)).fetchone()
        if row is None:
            raise UserError(f"there is no rollout named {name!r}")
        if row[0] is not None:
            raise UserError(f"the rollout {name!r} is revoked already")
        self._db.execute("UPDATE rollouts SET revoked=? WHERE name=?", (now, name))
        members = "SELECT participant, identity FROM rollout_members WHERE rollout=?"
        return [(participant, key) for participant, key in self._db.execute(members, (name,))]

    def _used(self, name: str) -> int:
        count = "SELECT count(*) FROM rollout_members WHERE rollout=?"
        return int(self._db.execute(count, (name,)).fetchone()[0])
