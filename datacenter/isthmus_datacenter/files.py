"""The files through which models cross, and the lock on the directory that they are in."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from pathlib import Path
from typing import Any

from isthmus.contents import Buffer
from isthmus.errors import UpdateError, UserError
from isthmus.exchange import Layout

_LOCK_SECONDS = 5.0


def mapped(path: Path, size: int) -> memoryview:
    """A file of that size as memory, shared with whoever else maps it.

    Its room on the disk is taken now: where there is none when a page is written, the process dies.

    Raises:
        OSError: there is none.
    """
    with path.open("a+b") as file:
        file.truncate(size)
        os.posix_fallocate(file.fileno(), 0, size)
        return memoryview(mmap.mmap(file.fileno(), size))


def check_model(model: Buffer, layout: Layout) -> None:
    """Refuse a model of another layout before the ranks read it.

    Raises:
        UpdateError: with the first difference.
    """
    if len(model) != layout.nbytes:
        raise UpdateError(
            f"a model of {len(model)} bytes came where this run's takes {layout.nbytes}"
        )
    header = bytes(memoryview(model)[: len(layout.header)])
    if header != layout.header:
        difference = Layout.from_header(header).explain_difference(layout)
        raise UpdateError(f"a model of another exchange set came: {difference}")


def locked(state: Path) -> Any:
    """An open, locked file; the kernel unlocks it when this process ends, however it ends."""
    try:
        state.mkdir(parents=True, exist_ok=True)
        file = (state / "lock").open("w")
    except OSError as error:
        raise UserError(f"the state directory {state} cannot be used: {error}") from error
    # A service that was killed a moment ago may still be going.
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.1)  # `flock` waits for ever, or not at all
                continue
            file.close()
            raise UserError(
                f"another datacenter service uses the state directory {state}; give each its own"
            ) from None
        return file
