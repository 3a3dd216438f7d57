"""Tell faults of storage and memory, which pass, from errors that stay."""

from __future__ import annotations

import errno
import sqlite3

from isthmus.errors import StorageError, TakenOver

_TRANSIENT_ERRNO = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.EROFS,
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
    errno.ESTALE,
    errno.ETIMEDOUT,
}
_TRANSIENT_SQLITE = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
}


def is_transient(error: BaseException | None) -> bool:
    """Whether an error may pass by itself, or was raised while one that may pass was handled.

    >>> is_transient(OSError(errno.ENOSPC, "No space left on device"))
    True
    >>> is_transient(FileNotFoundError(errno.ENOENT, "No such file or directory"))
    False
    >>> error = ValueError("raised from itself")
    >>> error.__cause__ = error
    >>> is_transient(error)
    False
    """
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, StorageError | TakenOver | MemoryError):
            return True
        if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNO:
            return True
        if isinstance(error, sqlite3.Error):
            # An extended code contains the primary one in its lowest byte.
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in _TRANSIENT_SQLITE:
                return True
        error = error.__cause__ or error.__context__  # also after `raise ... from None`
    return False
