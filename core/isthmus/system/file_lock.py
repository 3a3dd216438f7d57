"""Exclusive file locks between processes; the kernel releases them when a process ends.

Who holds a lock may sign it. One who may be stopped, or on a machine that is cut off, and whom a
later holder is allowed to follow without waiting, signs with what tells the two apart. The later
one puts another file in the place of the locked one: the lock of the earlier one is then of a file
that nobody finds any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from isthmus.errors import UserError

_LOOKS = 5
"""Tries before a lock counts as taken: `is_locked` holds one for an instant to find out."""
_LOOK_SECONDS = 0.01
_MAX_SIGNATURE = 64
"""Bytes of a signature that are read."""


class LockTaken(UserError):
    """Another process holds a lock."""


@contextlib.contextmanager
def file_lock(
    path: Path,
    taken: str,
    *,
    signature: str = "",
    follows: Callable[[str], bool] = lambda signature: False,
) -> Iterator[None]:
    """Hold an exclusive lock on a file inside the block; the file is created if it is missing.

    Args:
        path: of the file.
        taken: what the error says if another process holds the lock.
        signature: of this process, for the `follows` of a later one; empty for none.
        follows: whether the lock is taken from a process with a signature, which may still run.

    Raises:
        LockTaken: another process holds the lock (with the message `taken`).
        UserError: the file cannot be opened.
    """
    handle = _locked(path, taken, follows)
    try:
        # Also without a signature: that of an earlier holder must not stay.
        os.ftruncate(handle, 0)
        if signature:
            os.pwrite(handle, signature.encode(), 0)
        yield
    finally:
        os.close(handle)


def _locked(path: Path, taken: str, follows: Callable[[str], bool]) -> int:
    """The descriptor of the file, which is locked and in its place.

    Of two processes that follow an earlier holder in the same microseconds, one may remove the file
    of the other from its place. Each has a number of its own then, which it signs with, and the
    fence lets only the one with the higher number change anything (`isthmus_server.storage.fence`).
    """
    left = _LOOKS
    while True:
        handle = _open(path)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_in_place(handle, path):
                return handle
        except BlockingIOError:
            left -= 1
            if follows(_signature(handle)):
                # Not the file that another follower may have put there meanwhile.
                if is_in_place(handle, path):
                    path.unlink(missing_ok=True)
            elif not left:
                os.close(handle)
                raise LockTaken(taken) from None
            else:
                time.sleep(_LOOK_SECONDS)
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise UserError(f"{path} cannot be used: {error.strerror}") from None


def is_in_place(handle: int, path: Path) -> bool:
    """Whether nobody has put another file in the place of an open one."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _signature(handle: int) -> str:
    return os.pread(handle, _MAX_SIGNATURE, 0).decode(errors="replace")


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
