"""Consistent copies of sealed databases that another process may write."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

from isthmus_server.storage.sealed_database import SealedDatabase, database_error


def copy_database(source: Path, target: Path, schema: str) -> None:
    """Copy a database as of one commit, with SQLite's online backup, and write its head.

    Raises:
        UserError: the source is damaged or cannot be read, or the copy cannot be written.
    """
    try:
        with contextlib.closing(SealedDatabase(source, schema, "read")) as database:
            database.check()
            os.close(os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
            with contextlib.closing(sqlite3.connect(target)) as copy:
                database.connection.backup(copy)
    except (OSError, sqlite3.Error) as error:
        raise database_error(source, error) from error
    try:
        # A connection that writes removes its write-ahead log when it is closed.
        with contextlib.closing(SealedDatabase(target, schema)) as copied:
            copied.check_rows()
            copied.write_head()
            # Without a write-ahead log, so that reading the copy adds no file to it.
            copied.connection.execute("PRAGMA journal_mode=DELETE")
    except (OSError, sqlite3.Error) as error:
        raise database_error(target, error) from error
