"""A sealed database notices changed, lost and restored rows."""

import contextlib
import errno
import re
import shutil
import sqlite3

import pytest

from isthmus.errors import DamagedError
from isthmus_server.fleet import registry_file
from isthmus_server.fleet.registry import Registry
from isthmus_server.runs.jobs import queue
from isthmus_server.runs.jobs.queue import JobQueue
from isthmus_server.storage import recovery
from isthmus_server.storage.fence import QUEUE, Fence, write_lock
from isthmus_server.storage.sealed_database import SealedDatabase, database_error
from isthmus_server.storage.store import Store

SCHEMA = "CREATE TABLE IF NOT EXISTS things (name TEXT PRIMARY KEY, size REAL, note BLOB) STRICT;"


@pytest.fixture
def opened(tmp_path):
    """Open the database of this test; all are closed at its end."""
    with contextlib.ExitStack() as stack:

        def opened(file=tmp_path / "things.sqlite"):
            database = SealedDatabase.checked(file, SCHEMA)
            stack.enter_context(contextlib.closing(database))
            return database

        yield opened


def fill(database, names="abc"):
    for name in names:
        row = (name, 5, name.encode())
        database.connection.execute("INSERT OR REPLACE INTO things VALUES (?, ?, ?)", row)
    database.write_head()


def test_every_kind_of_change_keeps_the_seal_valid(opened):
    database = opened()
    fill(database)
    fill(database, "b")  # replaced
    database.connection.execute("UPDATE things SET size=2.5, note=NULL WHERE name='a'")
    database.connection.execute("DELETE FROM things WHERE name='c'")
    assert database.check() == 2
    assert opened().check() == 2  # ahead of its head, as after a crash before it was written


def test_a_new_database_has_all_tables_or_none_for_others(tmp_path, monkeypatch):
    """Another process may open it at any moment, and would call it damaged."""
    file = tmp_path / "things.sqlite"
    prepare = SealedDatabase._prepare
    counts = []

    def look(_statement):
        with contextlib.closing(sqlite3.connect(file)) as other:
            counts.extend(*other.execute("SELECT count(*) FROM sqlite_master WHERE type='table'"))

    def watched(database, *more):
        database.connection.set_trace_callback(look)
        prepare(database, *more)
        database.connection.set_trace_callback(None)

    monkeypatch.setattr(SealedDatabase, "_prepare", watched)
    schema = registry_file.SCHEMA
    with contextlib.closing(SealedDatabase.checked(file, schema)) as database:
        (tables,) = database.connection.execute(
            "SELECT count(*) FROM sqlite_master WHERE type='table'"
        ).fetchone()
    assert set(counts) == {0, tables}


def test_a_new_database_whose_first_process_was_killed_is_opened(tmp_path, opened):
    with contextlib.closing(sqlite3.connect(tmp_path / "things.sqlite")) as begun:
        begun.execute("PRAGMA journal_mode=WAL")
    assert (tmp_path / "things.sqlite").stat().st_size
    fill(opened())
    assert opened().check() == 3


def test_a_transaction_that_is_rolled_back_does_not_change_the_seal(opened):
    database = opened()
    fill(database)
    before = database.seal()
    database.connection.execute("BEGIN")
    database.connection.execute("DELETE FROM things")
    database.connection.execute("ROLLBACK")
    assert database.seal() == before
    assert database.check() == 3


def test_a_block_that_fails_changes_nothing_and_leaves_no_transaction(opened):
    database = opened()
    fill(database)
    before = database.seal()

    def change():
        with database.transaction():
            database.connection.execute("DELETE FROM things WHERE name='a'")
            database.connection.execute("INSERT INTO things VALUES ('b', 1, NULL)")

    with pytest.raises(sqlite3.IntegrityError):
        change()
    assert not database.connection.in_transaction
    assert database.seal() == before
    with database.transaction():
        database.connection.execute("DELETE FROM things WHERE name='a'")
    assert database.check() == 2


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE things SET size=6 WHERE name='a'",
        "DELETE FROM things WHERE name='a'",
        "INSERT INTO things VALUES ('d', 1, NULL)",
        "UPDATE seal SET changes=1",
        "DROP TABLE things",
        "CREATE TABLE more (name TEXT)",
    ],
)
def test_a_change_by_another_program_is_refused(opened, change, tmp_path):
    fill(opened())
    with contextlib.closing(sqlite3.connect(tmp_path / "things.sqlite")) as db, db:
        db.execute(change)
    with pytest.raises(DamagedError, match=r"things.sqlite .*(is damaged|has lost its last 2 c)"):
        opened()


def test_a_database_that_lost_commits_is_refused_and_left_as_it_is(opened, tmp_path):
    fill(opened())
    (tmp_path / "copy").mkdir()
    for name in ("things.sqlite", "things.sqlite-wal", "things.head"):
        shutil.copyfile(tmp_path / name, tmp_path / "copy" / name)
    wal = tmp_path / "copy" / "things.sqlite-wal"
    data = bytearray(wal.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    wal.write_bytes(data)
    with pytest.raises(DamagedError, match=r"has lost its last \d changes: it ends before the"):
        opened(tmp_path / "copy" / "things.sqlite")
    assert wal.read_bytes() == data
    (tmp_path / "copy" / "things.head").unlink()  # as the message says
    assert opened(tmp_path / "copy" / "things.sqlite").check() < 3


def test_a_missing_database_or_damaged_head_is_refused(opened, tmp_path):
    fill(opened())
    head = tmp_path / "things.head"
    head.write_bytes(head.read_bytes().replace(b"changes", b"changed"))
    with pytest.raises(DamagedError, match=r"things.head is damaged: .*remove things.head: it is"):
        opened()
    head.write_bytes(b"")
    (tmp_path / "things.sqlite").unlink()
    with pytest.raises(DamagedError, match=r"things.sqlite is missing; restore it"):
        opened()


def test_a_head_of_another_database_is_refused(opened, tmp_path):
    for name in ("things", "others"):
        fill(opened(tmp_path / f"{name}.sqlite"), "abc" if name == "things" else "xyz")
    shutil.copyfile(tmp_path / "others.head", tmp_path / "things.head")
    with pytest.raises(DamagedError, match=r"things.head does not belong to it"):
        opened()


def damaged_schema(file):
    """Overwrite what the first page of a database says of its tables."""
    data = file.read_bytes()
    file.write_bytes(data.replace(b"CREATE TABLE", b"CREATE TAXLE"))


def test_a_damaged_schema_names_its_file_and_what_to_do(tmp_path, make_job):
    """Before any check SQLite refuses every statement, in whatever command is the first."""
    store = Store.create(tmp_path / "run", make_job(), tmp_path)
    store.close()
    JobQueue(tmp_path).close()
    Registry(tmp_path).close()
    for file in (*tmp_path.glob("*.sqlite"), tmp_path / "run" / "run.sqlite"):
        damaged_schema(file)

    def sentences(file, *readers):
        for read in readers:
            with pytest.raises(DamagedError) as told:
                read(tmp_path)
            expected = rf"{re.escape(str(file))} is damaged \(malformed.*\); restore it from a"
            assert re.search(expected, str(told.value)), told.value

    sentences(tmp_path / "jobs.sqlite", JobQueue, queue.check)
    sentences(tmp_path / "fleet.sqlite", Registry, registry_file.check)
    sentences(
        tmp_path / "run" / "run.sqlite",
        lambda folder: Store.open(folder / "run"),
        lambda folder: Store.open(folder / "run", check=True),
        lambda folder: Store.open_to_continue(folder / "run"),
        lambda folder: Store.open_by_log(folder / "run"),
    )
    assert "restore it from a backup" in next(recovery.verify(tmp_path / "run")).damage


def test_an_error_that_is_no_damage_names_the_file_and_what_to_do(tmp_path):
    file = tmp_path / "things.sqlite"
    file.mkdir()
    with pytest.raises(sqlite3.OperationalError) as cannot_open:
        SealedDatabase(file, SCHEMA)
    for error, sentence in (
        (cannot_open.value, r"\(unable to open database file\); let this user read and write it"),
        (OSError(errno.ENOSPC, "No space left"), r"\(No space left\); check its directory, disk"),
    ):
        named = database_error(file, error)
        assert not isinstance(named, DamagedError)
        assert re.fullmatch(rf".*things.sqlite cannot be used {sentence}.*", str(named)), named


def test_a_head_that_cannot_be_written_now_is_written_later(tmp_path, monkeypatch):
    """As while another process has the write lock of the queue."""
    monkeypatch.setattr("isthmus_server.storage.fence._BUSY_SECONDS", 0.01)
    JobQueue(tmp_path).close()
    fence = Fence(tmp_path, 0)
    with contextlib.closing(SealedDatabase(tmp_path / "things.sqlite", SCHEMA, fence=fence)) as db:
        fill(db)
        written = db.head.read_bytes()
        db.connection.execute("DELETE FROM things")
        with write_lock(tmp_path / QUEUE):
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                db.write_head()
            db.catch_up_head()
            assert db.head.read_bytes() == written
        db.catch_up_head()
        assert db.head.read_bytes() != written
