"""SQLite databases that notice damage: a seal over all rows, and a head file outside the database.

SQLite detects neither a changed byte within a value nor a write-ahead log that was cut short: it
ignores everything after the first frame that does not fit. So every database of a server has

* a *seal*: the number of row changes so far, and the sum of the SHA-256 of all rows modulo 2^256
  (the incremental multiset hash MSet-Add-Hash of Clarke et al., ASIACRYPT 2003). Triggers update it
  in the transaction of each change. It detects accidents: a user who can write the file can also
  seal it.
* a *head*: a small file next to the database with the seal as of the last important commit. It is
  written after the commit. A database with fewer changes than its head has lost commits; one with
  more is that of a crash between the two, or is being written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from isthmus.errors import DamagedError, TakenOver, UserError
from isthmus.system.private_files import create_state_file
from isthmus.system.volumes import is_shared
from isthmus_server.storage.fence import Fence, epoch_of, held
from isthmus_server.storage.head_file import HeadFile, Seal

_SEAL = """
CREATE TABLE IF NOT EXISTS seal (
    one INTEGER PRIMARY KEY CHECK (one = 1), changes INTEGER NOT NULL, total BLOB NOT NULL
);
INSERT OR IGNORE INTO seal VALUES (1, 0, zeroblob(32));
"""
_MODULUS = 1 << 256

_FENCED = "another server has taken over"
"""What SQLite says when a connection of an earlier server changes a row."""

Mode = Literal["write", "read", "immutable"]

_IN_USE = "another process has it open; end that process, or try again later"
_NO_ACCESS = "let this user read and write it and its directory"
_REMEDIES = {
    sqlite3.SQLITE_BUSY: _IN_USE,
    sqlite3.SQLITE_LOCKED: _IN_USE,
    sqlite3.SQLITE_CANTOPEN: _NO_ACCESS,
    sqlite3.SQLITE_READONLY: _NO_ACCESS,
    sqlite3.SQLITE_PERM: _NO_ACCESS,
    sqlite3.SQLITE_IOERR: "check its disk, and the space on it",
    sqlite3.SQLITE_FULL: "free space on its disk",
    sqlite3.SQLITE_NOMEM: "free memory on this machine",
}
"""What to do after the errors of SQLite that say nothing about the contents of a database."""


def database_error(file: Path, error: Exception) -> UserError:
    """The error for users when a sealed database fails: its file, what is wrong, and what to do.

    Args:
        file: the database.
        error: of SQLite or of the operating system, from any statement on the database.

    Returns:
        A `DamagedError` unless the error says nothing about the contents.
    """
    if isinstance(error, OSError):
        return UserError(
            f"{file} cannot be used ({error.strerror or error}); check its directory, disk and "
            "permissions"
        )
    if is_fenced(error):
        return TakenOver(
            f"another server has taken over {file}: this one has changed nothing there since"
        )
    # An extended code contains the primary one in its lowest byte.
    remedy = _REMEDIES.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
    # SQLite quotes the whole text of a column that it cannot decode.
    what = str(error).partition("\n")[0][:100]
    if remedy is not None:
        return UserError(f"{file} cannot be used ({what}); {remedy}")
    return DamagedError(f"{file} is damaged ({what}); restore it from a backup")


def is_fenced(error: Exception) -> bool:
    """Whether a database has refused a change as another server has taken over."""
    return isinstance(error, sqlite3.Error) and _FENCED in str(error)


class SealedDatabase:
    """One connection to a sealed database.

    Guarantees:
      * a change of a row, its effect on the seal, and the comparison of its epoch with that of the
        connection (see `isthmus_server.storage.fence`) are in one transaction;
      * `check` passes only if all rows are those that were written, and none that were committed
        before the last `write_head` is missing.
    """

    def __init__(
        self, file: Path, schema: str, mode: Mode = "write", fence: Fence | None = None
    ) -> None:
        """Open the database; to write it, create it if neither it nor its head exists.

        Nothing is checked yet. A connection that reads changes no byte of the database; for
        `immutable` the file must not change either, and its write-ahead log is ignored.

        Args:
            file: the database.
            schema: the statements that make its tables.
            mode: what the connection is for.
            fence: of the server that writes, which fences off earlier ones. Without it the
                connection writes until a server begins to.

        Raises:
            DamagedError: it is missing, although its head exists.
            TakenOver: another server has taken over.
            sqlite3.Error: it cannot be opened.
        """
        self.file = file
        self.head = file.with_suffix(".head")
        self._schema = schema
        self._fence = fence
        # A new database in place of a lost one would begin the run, or the queue, again.
        if not file.exists() and (self.head.exists() or mode != "write"):
            raise DamagedError(f"{file} is missing; restore it and its -wal file from a backup")
        if mode != "write":
            how = "ro&immutable=1" if mode == "immutable" else "ro"
            # Without a write-ahead log, a transaction that a crash cut short has to be undone in
            # the file before anybody can read it.
            undoing = mode == "read" and is_shared(file.parent) and os.access(file, os.W_OK)
            uri = f"{file.absolute().as_uri()}?mode={'rw' if undoing else how}"
            # Without Python's implicit transactions: each statement commits, or is in an explicit
            # transaction.
            self.connection = sqlite3.connect(uri, uri=True, isolation_level=None)
            if undoing:
                self.connection.execute("PRAGMA query_only=ON")
            return
        with contextlib.suppress(OSError):  # SQLite says what is wrong
            create_state_file(file)  # if it is new; its write-ahead log gets the same mode
        self.connection = sqlite3.connect(file, timeout=10.0, isolation_level=None)
        self._synchronous = "FULL"
        try:
            self._prepare(schema, fence)
        except BaseException:
            self.connection.close()
            raise

    @classmethod
    def checked(cls, file: Path, schema: str, fence: Fence | None = None) -> SealedDatabase:
        """Check a database, then open it for writing; creates it if it is new.

        The check comes first, because a connection that can write removes what SQLite ignores.

        Raises:
            DamagedError: it is damaged, or has lost commits.
            TakenOver: another server has taken over.
            sqlite3.Error: it cannot be opened.
        """
        if file.exists() and (file.stat().st_size or file.with_suffix(".head").exists()):
            with contextlib.closing(cls(file, schema, "read")) as database:
                if not database.is_new():
                    database.check()
        database = cls(file, schema, fence=fence)
        if not database.head.exists():
            database.write_head()
        else:
            database.catch_up_head()
        return database

    def catch_up_head(self) -> None:
        """Bring the head up to date after a crash left it a commit behind, if that is possible.

        It is not with a full disk, or while another process has the write lock of the queue.
        """
        with contextlib.suppress(OSError, sqlite3.Error):
            self.write_head()

    def _prepare(self, schema: str, fence: Fence | None) -> None:
        db = self.connection
        # The index of a write-ahead log is memory that processes share, which those of two machines
        # do not.
        if is_shared(self.file.parent):
            db.execute("PRAGMA journal_mode=DELETE")
            self._synchronous = "EXTRA"  # that the journal is gone is on disk, too
        else:
            db.execute("PRAGMA journal_mode=WAL")
        # With NORMAL, in WAL mode, a commit that participants have been told of could be lost with
        # the power.
        db.execute(f"PRAGMA synchronous={self._synchronous}")
        db.execute("PRAGMA recursive_triggers=ON")  # a replaced row is deleted first
        if self.is_new():
            # Together: who opens it meanwhile, or after a crash, finds all tables or none.
            db.executescript(f"BEGIN IMMEDIATE; {schema} {_SEAL} COMMIT;")
        else:
            db.executescript(schema + _SEAL)
        if fence is not None:
            fence.claim(self.file)
        epoch = epoch_of(db) if fence is None else fence.epoch
        fenced = (
            f"SELECT RAISE(ABORT, '{_FENCED}') FROM pragma_application_id "
            f"WHERE application_id <> {epoch};"
        )
        db.create_function("row_hash", -1, row_hash, deterministic=True)
        db.create_function("total_with", 2, _total_with, deterministic=True)
        db.create_function("total_without", 2, _total_without, deterministic=True)
        for table in _tables(db):
            columns = _columns(db, table)
            # With the table and the row's number: equal rows of two tables, or at two places,
            # differ.
            new, old = (
                f"row_hash('{table}', {side}.rowid, "
                + ", ".join(f"{side}.{name}" for name in columns)
                + ")"
                for side in ("NEW", "OLD")
            )
            for event, total in (
                ("INSERT", f"total_with(total, {new})"),
                ("UPDATE", f"total_with(total_without(total, {old}), {new})"),
                ("DELETE", f"total_without(total, {old})"),
            ):
                # Temporary: only a connection that has the functions can use them.
                db.execute(
                    f"CREATE TEMP TRIGGER {event}_{table} AFTER {event} ON main.{table} BEGIN "
                    f"{fenced} UPDATE seal SET changes = changes + 1, total = {total}; END"
                )

    @contextlib.contextmanager
    def not_synced(self) -> Iterator[None]:
        """Do not wait for the disk in the block: its commits may be lost if the machine fails.

        A process that is killed loses none, and a later commit outside the block keeps them all.
        """
        # Without a write-ahead log the database itself could be damaged.
        if self._synchronous == "FULL":
            self.connection.execute("PRAGMA synchronous=NORMAL")
        try:
            yield
        finally:
            self.connection.execute(f"PRAGMA synchronous={self._synchronous}")

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def seal(self) -> Seal:
        """The seal as of the last commit."""
        row = self.connection.execute("SELECT changes, total FROM seal").fetchone()
        return Seal(int(row[0]), bytes(row[1]))

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit what the block changes as one, or nothing of it if it raises.

        Raises:
            TakenOver: another server has taken over.
            sqlite3.Error: it cannot be committed.
        """
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.connection.execute("COMMIT")
        except BaseException:
            # SQLite ends it itself in some errors, such as a full disk.
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            raise

    def write_head(self) -> None:
        """Record the last commit outside the database; call it when a commit must not be lost.

        Raises:
            OSError: the file cannot be written.
            sqlite3.Error: the database cannot be read, or the queue of the fence not be locked.
        """
        with contextlib.suppress(TakenOver), held(self._fence):  # a later server writes its own
            HeadFile(self.head).write(self.seal())

    def _read_head(self) -> Seal | None:
        """The seal in the head file; None if there is no such file.

        Raises:
            DamagedError: it is damaged.
        """
        try:
            return HeadFile(self.head).read()
        except DamagedError as error:
            raise DamagedError(
                f"{error}; if {self.file.name} is not a copy from a backup, remove "
                f"{self.head.name}: it is written again"
            ) from None

    # -- checks ------------------------------------------------------------------------------------

    def is_new(self) -> bool:
        """Whether nothing was ever committed to it: its first process opens it now, or was killed.

        Raises:
            DamagedError, sqlite3.Error: as `check`.
        """
        with self._damage_named():
            (names,) = self.connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        return not names and not self.head.exists()

    def check(self) -> int:
        """Read all rows and compare them with the seal and the head; returns the number of rows.

        Raises:
            DamagedError: rows were changed, lost or added, or the database cannot be read.
            sqlite3.Error: for another reason than damage, for example without permission.
        """
        head = self._read_head()  # first: a process that writes now changes the database first
        seal, rows = self.check_rows()
        if head is None:
            return rows
        if seal.changes < head.changes:
            raise DamagedError(
                f"{self.file} has lost its last {head.changes - seal.changes} changes: it ends "
                f"before the commit that {self.head.name} names. Restore the database with its "
                f"-wal file, or remove {self.head.name} to continue without these changes"
            )
        if seal.changes == head.changes and seal != head:
            raise self._damaged(f"{self.head.name} does not belong to it")
        return rows

    def check_rows(self) -> tuple[Seal, int]:
        """Read all rows and compare them with the seal; returns the seal and the number of rows.

        Raises:
            DamagedError, sqlite3.Error: as `check`.
        """
        # One transaction: rows that are committed while this reads would not be those of the seal.
        with self._damage_named(), self._snapshot():
            self._check_structure()
            seal = self.seal()
            rows = 0
            total = 0
            for table in _tables(self.connection):
                for row in self.connection.execute(f"SELECT rowid, * FROM {table}"):
                    total += int.from_bytes(row_hash(table, *row), "big")
                    rows += 1
        if seal.total != (total % _MODULUS).to_bytes(32, "big"):
            raise self._damaged("its rows are not those that were written")
        return seal, rows

    def _check_structure(self) -> None:
        query = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name"
        with contextlib.closing(sqlite3.connect(":memory:")) as reference:
            reference.executescript(self._schema + _SEAL)
            expected = reference.execute(query).fetchall()
        if self.connection.execute(query).fetchall() != expected:
            raise DamagedError(
                f"{self.file} was written by another version of isthmus, or is damaged (its tables "
                "are not those of this version); open it with that version, or restore it from a "
                "backup"
            )
        (found,) = self.connection.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise self._damaged(" ".join(str(found).split()))

    @contextlib.contextmanager
    def _snapshot(self) -> Iterator[None]:
        self.connection.execute("BEGIN")
        try:
            yield
        finally:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")

    @contextlib.contextmanager
    def _damage_named(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            named = database_error(self.file, error)
            if not isinstance(named, DamagedError):
                raise
            raise named from error
        except (TypeError, ValueError, OverflowError) as error:
            # Among these it is a `ValueError`, and it says more already.
            if isinstance(error, DamagedError):
                raise
            raise self._damaged("its seal cannot be read") from error

    def _damaged(self, why: str) -> DamagedError:
        return DamagedError(f"{self.file} is damaged ({why}); restore it from a backup")


def check_database(file: Path, schema: str, *, may_be_new: bool = False) -> None:
    """Check a database without changing it.

    Args:
        file: the database.
        schema: the statements that make its tables.
        may_be_new: another process may be making it.

    Raises:
        DamagedError: it is damaged or missing.
        UserError: it cannot be read for another reason.
    """
    try:
        with contextlib.closing(SealedDatabase(file, schema, "read")) as database:
            if not (may_be_new and database.is_new()):
                database.check()
    except (OSError, sqlite3.Error) as error:
        raise database_error(file, error) from error


def row_hash(table: str, *values: Any) -> bytes:
    """The SHA-256 of one row: its table, its row number and its values with their types.

    >>> row_hash("jobs", 1, "x", None) == row_hash("jobs", 1, "x", b"")
    False
    >>> row_hash("jobs", 1, 2.0) == row_hash("jobs", 1, 2)  # SQLite may store one as the other
    True
    """
    digest = hashlib.sha256(table.encode())
    for value in values:
        match value:
            case None:
                kind = b"n"
                data = b""
            case str():
                kind = b"t"
                data = value.encode("utf-8", "surrogatepass")
            case bytes():
                kind = b"b"
                data = value
            case float() if not value.is_integer():
                kind = b"f"
                data = struct.pack(">d", value)
            case _:
                kind = b"i"
                data = str(int(value)).encode()
        digest.update(kind + len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.digest()


def _total_with(total: bytes, row: bytes) -> bytes:
    value = int.from_bytes(total, "big") + int.from_bytes(row, "big")
    return (value % _MODULUS).to_bytes(32, "big")


def _total_without(total: bytes, row: bytes) -> bytes:
    value = int.from_bytes(total, "big") - int.from_bytes(row, "big")
    return (value % _MODULUS).to_bytes(32, "big")


def _tables(db: sqlite3.Connection) -> list[str]:
    """The sealed tables: all but the seal itself and those of SQLite."""
    rows = db.execute(
        "SELECT name FROM sqlite_master WHERE type='table' AND name NOT LIKE 'sqlite_%' "
        "AND name <> 'seal' ORDER BY name"
    )
    return [name for (name,) in rows]


def _columns(db: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in db.execute(f"PRAGMA main.table_info({table})")]
