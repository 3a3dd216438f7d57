"""The SQLite tables of a run's round log, and how the database is opened."""

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
    """Open a round log, or create it; on a read-only medium only open it, without any writes.

    Raises:
        UserError: its newest entries cannot be read on this medium.
        OSError, sqlite3.Error: it cannot be used.
    """
    if not os.statvfs(file.parent).f_flag & os.ST_RDONLY:
        db = sqlite3.connect(file, isolation_level=None)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        db.executescript(_SCHEMA)
        return db
    # The newest entries are in the write-ahead log, which SQLite reads by its shared-memory index.
    # Without both files the database is complete, and no process uses it.
    wal, index = file.with_name(f"{file.name}-wal"), file.with_name(f"{file.name}-shm")
    if not index.exists() and wal.exists() and wal.stat().st_size:
        raise UserError(
            "it was interrupted and is on a read-only medium; copy it to a writable directory"
        )
    mode = "mode=ro" if index.exists() else "mode=ro&immutable=1"
    return sqlite3.connect(f"{file.absolute().as_uri()}?{mode}", uri=True, isolation_level=None)
