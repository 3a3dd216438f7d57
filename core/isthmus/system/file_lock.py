"""Exclusive file locks between processes; the kernel releases them when a process ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from isthmus.errors import UserError

_LOOKS = 5
"""Tries before a lock counts as taken: `is_locked` holds one for an instant to find out."""
_LOOK_SECONDS = 0.01


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
        for left in reversed(range(_LOOKS)):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not left:
                    raise UserError(taken) from None
                time.sleep(_LOOK_SECONDS)
        yield
    finally:
        os.close(handle)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock; True too if it is unknown."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
