"""Faults of storage and memory, which pass, are told from mistakes."""

import errno
import sqlite3

import pytest

from isthmus.errors import CannotContinue, StorageError, UserError
from isthmus.system.faults import is_transient


@pytest.mark.parametrize(
    "error",
    [
        *(OSError(code, "") for code in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)),
        StorageError("the disk is full"),
        MemoryError(),
    ],
    ids=repr,
)
def test_a_full_or_failing_disk_may_pass_also_below_another_error(error):
    assert is_transient(error)
    shown = UserError("for the user")
    shown.__context__ = error  # as after `raise ... from None`
    assert is_transient(shown)


@pytest.mark.parametrize("code", ["SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_READONLY_DBMOVED"])
def test_faults_below_a_database_may_pass(code):
    error = sqlite3.OperationalError("")
    error.sqlite_errorcode = getattr(sqlite3, code)
    assert is_transient(error)


def test_mistakes_and_damage_stay():
    damaged = sqlite3.DatabaseError("")
    damaged.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    for error in (None, damaged, OSError(errno.ENOENT, ""), OSError(errno.EACCES, "")):
        assert not is_transient(error)
    assert not is_transient(CannotContinue("devices are missing"))  # paused for its own reason
