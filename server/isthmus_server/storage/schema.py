"""The SQLite tables of a run's round log, and how the database is opened."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from isthmus_server.storage.sealed_database import SealedDatabase

FORMAT = 5
"""Version of the contents of a run directory."""

SCHEMA = f"""
PRAGMA user_version = {FORMAT};
CREATE TABLE IF NOT EXISTS run (
    run_id TEXT PRIMARY KEY, about TEXT NOT NULL, status TEXT NOT NULL, reason TEXT NOT NULL,
    final TEXT
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
CREATE TABLE IF NOT EXISTS unmaskings (
    run_id TEXT NOT NULL, round INTEGER NOT NULL, attempt INTEGER NOT NULL,
    model_hash TEXT NOT NULL, draw INTEGER NOT NULL, devices TEXT NOT NULL,
    sum_group TEXT NOT NULL, refused INTEGER NOT NULL, request BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS ranges (
    round INTEGER NOT NULL, model_hash TEXT NOT NULL, sum_group TEXT NOT NULL,
    devices TEXT NOT NULL, counts TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS layouts (
    round INTEGER NOT NULL, changes TEXT NOT NULL
);
"""


def log_format(file: Path) -> int | None:
    """The version in the header of a round log; None if the file has no header of SQLite."""
    with file.open("rb") as log:
        header = log.read(100)
    if len(header) < 100 or not header.startswith(b"SQLite format 3\0"):
        return None
    return int.from_bytes(header[60:64], "big")


def read_log(file: Path) -> SealedDatabase:
    """Open a round log for reading, also on a medium that cannot be written.

    Raises:
        OSError, sqlite3.Error: it cannot be used.
    """
    folder = file.parent
    wal = file.with_name(f"{file.name}-wal")
    read_only = os.statvfs(folder).f_flag & os.ST_RDONLY or not os.access(folder, os.W_OK)
    if not read_only or file.with_name(f"{file.name}-shm").exists():
        return SealedDatabase(file, SCHEMA, "read")
    if not wal.exists() or not wal.stat().st_size:
        return SealedDatabase(file, SCHEMA, "immutable")
    # The newest entries are in the write-ahead log, which SQLite reads with an index of it that it
    # cannot create there.
    with tempfile.TemporaryDirectory(prefix="isthmus-") as copy:
        for path in (file, wal):
            shutil.copyfile(path, Path(copy) / path.name)
        database = SealedDatabase(Path(copy) / file.name, SCHEMA, "read")
        database.seal()  # opens the files of the copy, which can be unlinked then
        database.file = file
        database.head = file.with_suffix(".head")
        return database
