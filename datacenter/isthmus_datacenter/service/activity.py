"""What the main thread of a rank does, as seen by the thread that sends its heartbeats.

A rank whose code loops for ever, or sleeps, still sends heartbeats, while the others wait for it in
a collective. The place in the code is sent along, so that the service can name the rank and line.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

import isthmus
from isthmus_datacenter.messages import Activity

DUMP_SECONDS = 5.0
"""Time at one place after which the stacks of all threads are written to the rank's log."""

_PACKAGE = Path(__file__).parent.parent
_WAITING = (
    str(Path(torch.__file__).parent / "distributed"),
    str(_PACKAGE / "training" / "consensus.py"),
)
"""Files that wait for other ranks."""
_NOT_OF_USERS = tuple(
    f"{directory}/"
    for directory in (
        _PACKAGE,
        Path(isthmus.__file__).parent,
        Path(torch.__file__).parent,
        Path(threading.__file__).parent,
    )
)


class MainThread:
    """Samples the stack of the main thread, without stopping it."""

    def __init__(self) -> None:
        self._place: object = None
        self._since = time.monotonic()
        self._dumped = False

    def sample(self, progress: object) -> Activity:
        """Where the main thread is, and since when.

        Args:
            progress: another value whenever the rank has got on, as frames are reused.
        """
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        assert frame is not None
        stack = list(_outwards(frame))
        waits = frame.f_code.co_filename.startswith(_WAITING)
        user = next((each for each in stack if not _is_known(each)), frame)
        place = (progress, id(user), user.f_code)
        now = time.monotonic()
        if place != self._place:
            self._place = place
            self._since = now
            self._dumped = False
        seconds = now - self._since
        if seconds > DUMP_SECONDS and not self._dumped:
            self._dumped = True
            faulthandler.dump_traceback()
        code = user.f_code
        where = f"{Path(code.co_filename).name}:{user.f_lineno} in {code.co_name}()"
        return Activity(waits=waits, seconds=round(seconds, 1), where=where)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_known(frame: FrameType) -> bool:
    """Whether a frame is of PyTorch, of this package or of Python's own library."""
    return frame.f_code.co_filename.startswith((*_NOT_OF_USERS, "<"))
