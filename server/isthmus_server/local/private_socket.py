"""Where an embedded run listens: a directory that only its own user enters, gone afterwards.

It is in the system's temporary folder, whose paths are short enough for sockets and whose file
system has them. What a run leaves that was killed, the next one takes away: its lock tells.
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
_SOCKET, _LOCK = "link", "lock"
_MAX_BYTES = 100
"""That the address of a Unix socket may have: the kernel takes paths of up to 107."""
_YOUNG_SECONDS = 60.0
"""For so long a run may still be about to take its lock."""


@contextlib.contextmanager
def private_socket() -> Iterator[str]:
    """An address to listen on, for as long as the block lasts.

    Raises:
        UserError: its path would be too long, or the temporary folder cannot be used.
    """
    _take_away_the_dead()
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as private:  # of mode 0700
        address = f"unix:{private}/{_SOCKET}"
        if len(os.fsencode(address)) > _MAX_BYTES:
            raise UserError(
                f"{private} is too long a path for a socket; set TMPDIR to a folder with a shorter "
                "one, or give --address 127.0.0.1:0"
            )
        with file_lock(Path(private) / _LOCK, f"another process has {private}"):
            yield address


def _take_away_the_dead() -> None:
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, UserError):  # somebody's, or gone already
            about, lock = left.lstat(), left / _LOCK
            ours = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid()
            old = time.time() - about.st_mtime > _YOUNG_SECONDS
            held = {each.name for each in left.iterdir()} if ours and old else set()
            if _LOCK in held and held <= {_SOCKET, _LOCK}:
                with file_lock(lock, "its run goes on"):
                    (left / _SOCKET).unlink(missing_ok=True)
                    lock.unlink()
                    left.rmdir()
