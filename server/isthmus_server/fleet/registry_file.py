"""The file of the registry of participants: its tables, and checks that change nothing.

`unrecorded` has the entries of the audit log that were committed with their change, and are not in
the log yet: those of a process that ended in between. The random `mark` of each is in the log too,
behind the first `log_bytes`.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from isthmus.errors import DamagedError, UserError
from isthmus_server.fleet import rollouts
from isthmus_server.storage import audit
from isthmus_server.storage.sealed_database import SealedDatabase, check_database

NAME = "fleet.sqlite"

SCHEMA = (
    """
CREATE TABLE IF NOT EXISTS participants (
    name TEXT PRIMARY KEY, kind TEXT NOT NULL, identity BLOB NOT NULL UNIQUE,
    joined REAL NOT NULL, revoked REAL
) STRICT;
CREATE TABLE IF NOT EXISTS certificates (
    serial TEXT PRIMARY KEY, name TEXT NOT NULL, not_after REAL NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS tokens (
    digest BLOB PRIMARY KEY, name TEXT NOT NULL, kind TEXT NOT NULL, expires REAL NOT NULL,
    used REAL, certificate BLOB
) STRICT;
CREATE TABLE IF NOT EXISTS revoked_identities (identity BLOB PRIMARY KEY) STRICT;
CREATE TABLE IF NOT EXISTS unrecorded (
    number INTEGER PRIMARY KEY, mark TEXT NOT NULL, log_bytes INTEGER NOT NULL,
    action TEXT NOT NULL, author TEXT NOT NULL, details TEXT NOT NULL
) STRICT;
"""
    + rollouts.SCHEMA
)

log = logging.getLogger(__name__)


def check(directory: Path, *, may_be_new: bool = False) -> None:
    """Check the registry in a state directory and its audit log; nothing is changed.

    Args:
        directory: of the state.
        may_be_new: another process may be making it, as a command that creates the first token.

    Raises:
        UserError: one is damaged or missing, cannot be read, or the registry is an older copy.
    """
    check_database(directory / NAME, SCHEMA, may_be_new=may_be_new)
    with contextlib.closing(SealedDatabase(directory / NAME, SCHEMA, "read")) as database:
        if may_be_new and database.is_new():
            return
        if database.connection.execute("SELECT count(*) FROM participants").fetchone()[0]:
            audit.refuse_lost_log(directory)
    refuse_lost_revocations(directory)


def refuse_lost_revocations(directory: Path) -> None:
    """Compare a registry with the audit log: an older copy of it is intact in itself.

    Raises:
        DamagedError: it would accept an identity that has been revoked.
    """
    try:
        revoked = audit.revoked(audit.read(directory))
    except UserError as error:
        log.warning("the registry cannot be compared with the audit log: %s", error)
        return
    with contextlib.closing(SealedDatabase(directory / NAME, SCHEMA, "read")) as database:
        db = database.connection
        accepted = (
            db.execute("SELECT lower(hex(identity)) FROM participants WHERE revoked IS NULL"),
            db.execute(
                "SELECT lower(hex(digest)) FROM tokens WHERE used IS NULL UNION ALL "
                "SELECT lower(hex(digest)) FROM rollouts WHERE revoked IS NULL"
            ),
        )
        for rows, names in zip(accepted, revoked, strict=True):
            for name in (names[value] for (value,) in rows if value in names):
                raise DamagedError(
                    f"{directory / NAME} accepts {name!r}, whose revocation {directory} has in "
                    "its audit log: it is an older copy. Restore the newest one, or revoke it again"
                )
