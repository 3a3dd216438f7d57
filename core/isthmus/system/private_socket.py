"""Provide a Unix socket address in a directory that only its user may enter.

The directory is in the system's temporary folder, whose paths are short enough for sockets and
whose file system supports them. It is removed at the end. A run that was killed leaves it behind;
the next run removes it if nothing holds its lock.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from isthmus.errors import UserError
from isthmus.system.file_lock import file_lock

_PREFIX = "isthmus-"
_SOCKET = "link"
_LOCK = "lock"
_MAX_BYTES = 100
"""Maximum length of a Unix socket address: the kernel accepts paths of up to 107 bytes."""
_MIN_AGE_SECONDS = 60.0
"""Age below which the directory of a new run may not have its lock yet."""


@contextlib.contextmanager
def private_socket() -> Iterator[str]:
    """Provide an address to listen on while the block lasts.

    Raises:
        UserError: its path would be too long, or the temporary folder cannot be used.
    """
    with contextlib.ExitStack() as opened:
        try:
            _remove_stale_directories()
            made = tempfile.TemporaryDirectory(prefix=_PREFIX)  # of mode 0700
            private = opened.enter_context(made)
        except OSError as error:
            raise UserError(
                f"there is no folder for temporary files ({error.strerror or error}); set TMPDIR "
                "to one"
            ) from None
        address = f"unix:{private}/{_SOCKET}"
        if len(os.fsencode(address)) > _MAX_BYTES:
            raise UserError(
                f"{private} is too long a path for a socket; set TMPDIR to a folder with a shorter "
                "one"
            )
        opened.enter_context(file_lock(Path(private) / _LOCK, f"another process uses {private}"))
        yield address


def _remove_stale_directories() -> None:
    """Remove directories of killed runs, which contain nothing but a socket and a free lock."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, UserError):  # of another user, or removed already
            status = directory.lstat()
            lock = directory / _LOCK
            own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            old = time.time() - status.st_mtime > _MIN_AGE_SECONDS
            entries = {entry.name for entry in directory.iterdir()} if own and old else set()
            if _LOCK in entries and entries <= {_SOCKET, _LOCK}:
                with file_lock(lock, "its run is active"):
                    (directory / _SOCKET).unlink(missing_ok=True)
                    lock.unlink()
                    directory.rmdir()
