"""Exclusive file locks between processes; the kernel releases them when a process ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from isthmus.errors import UserError


@contextlib.contextmanager
def file_lock(path: Path, taken: str) -> Iterator[None]:
    """Hold an exclusive lock on a file inside the block; the file is created if it is missing.

    Raises:
        UserError: another process holds the lock (with the message `taken`), or the file cannot be
            opened.
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
