"""The round log of a run: its tables in SQLite, and how they are opened."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from isthmus.errors import UserError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS run (
    run_id TEXT PRIMARY KEY, status TEXT NOT NULL, reason TEXT NOT NULL, final TEXT
);
CREATE TABLE IF NOT EXISTS attempts (
    round INTEGER NOT NULL, attempt INTEGER NOT NULL, state TEXT NOT NULL,
    planned TEXT NOT NULL, record TEXT, run_state TEXT, PRIMARY KEY (round, attempt)
);
CREATE TABLE IF NOT EXISTS comparison_attempts (
    number INTEGER NOT NULL, attempt INTEGER NOT NULL, round INTEGER NOT NULL,
    request TEXT NOT NULL, record TEXT, PRIMARY KEY (number, attempt)
);
CREATE TABLE IF NOT EXISTS running_time (
    one INTEGER PRIMARY KEY CHECK (one = 1), elapsed REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS events (
    event TEXT NOT NULL
);
"""


def open_log(file: Path) -> sqlite3.Connection:
    """A round log, made where there is none; on a read-only medium, as it lies there.

    Raises:
        UserError: it cannot be read there.
        OSError, sqlite3.Error: it cannot be used.
    """
    if not os.statvfs(file.parent).f_flag & os.ST_RDONLY:
        db = sqlite3.connect(file, isolation_level=None)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        db.executescript(_SCHEMA)
        return db
    # The newest entries are in a file of their own, which takes an index to read. Where there is
    # neither, the database is whole, and nobody is at it.
    newest, index = file.with_name(f"{file.name}-wal"), file.with_name(f"{file.name}-shm")
    if not index.exists() and newest.exists() and newest.stat().st_size:
        raise UserError(
            "it was cut off and lies on a read-only medium; copy it to where it can be written"
        )
    how = "mode=ro" if index.exists() else "mode=ro&immutable=1"
    return sqlite3.connect(f"{file.absolute().as_uri()}?{how}", uri=True, isolation_level=None)
