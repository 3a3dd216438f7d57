"""One process at a time: a lock on a file, which ends with its holder, however that ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from isthmus.errors import UserError


@contextlib.contextmanager
def file_lock(path: Path, taken: str) -> Iterator[None]:
    """Hold the lock on a file, which is made if it is not there, while the block lasts.

    Raises:
        UserError: another process holds it (`taken` says of what), or the file cannot be opened.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise UserError(f"{path} cannot be used: {error.strerror}") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(taken) from None
        yield
    finally:
        os.close(handle)
