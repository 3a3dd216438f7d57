"""What the main thread of a rank does, as seen by the thread that sends its heartbeats.

A rank whose code loops for ever, or sleeps, still sends heartbeats, while the others wait for it in
a collective. The place in the code is sent along, so that the service can name the rank and line,
and end ranks that hang (see `hangs`).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Literal

import torch

import isthmus
from isthmus_datacenter.messages import Activity, Collective
from isthmus_datacenter.service.flight_recorder import (
    describe,
    last_collectives,
    recorder_status,
)

DUMP_SECONDS = 5.0
"""Time at one place after which the stacks of all threads are written to the rank's log, unless
steps take about as long."""
STACKS_SIGNAL = signal.SIGRTMIN + 9
"""Has a rank write the stacks of its threads to its log; no signal that a scheduler or user sends.
"""
_UNUSUAL = 3
"""Time at one place, in longest steps so far, that no step is expected to take."""

_PACKAGE = Path(__file__).parent.parent
_TORCH = Path(torch.__file__).parent
_WAITING = (
    str(_TORCH / "distributed"),
    str(_PACKAGE / "training" / "consensus.py"),
    str(_PACKAGE / "rank_messages.py"),
)
"""Files that wait for other ranks."""
_CALLING = (str(_TORCH / "_ops.py"), str(_TORCH / "_library"))
"""Files through which operators are called, collectives too."""
_COMPILING = tuple(str(_TORCH / name) for name in ("_dynamo", "_inductor", "_functorch", "fx"))
_READING = (str(_TORCH / "utils" / "data" / "dataloader.py"), "_get_data")
"""File and function that wait for reader processes."""
_NOT_OF_USERS = tuple(
    f"{directory}/"
    for directory in (
        _PACKAGE,
        Path(isthmus.__file__).parent,
        _TORCH,
        Path(threading.__file__).parent,
    )
)


class Pace:
    """How a rank gets on with its command, and how long a step takes at most.

    >>> pace = Pace()
    >>> pace.tick("step")
    >>> pace.count, pace.longest
    (1, 0.0)
    """

    def __init__(self) -> None:
        self.count = 0
        """How often a command has got on."""
        self.longest = 0.0
        """Longest time from one step, or batch of an evaluation, to the next, in this run."""
        self._kind = ""
        self._at = 0.0

    def begin(self, *, run: bool) -> None:
        """Begin a command, before whose first step is other work; with `run`, of another run."""
        self._kind = ""
        if run:
            self.longest = 0.0

    def tick(self, kind: Literal["step", "evaluation"]) -> None:
        """Note that a step, or a batch of an evaluation, has begun."""
        now = time.monotonic()
        if kind == self._kind:
            self.longest = max(self.longest, now - self._at)
        self._kind = kind
        self._at = now
        self.count += 1


class MainThread:
    """Samples the stack of the main thread, without stopping it."""

    def __init__(self) -> None:
        self._place: object = None
        self._since = time.monotonic()
        self._starved_before = 0.0
        self._held: FrameType | None = None
        """The user's frame at an unusually long place. As long as it is held, no other frame has
        its id, so that another call of the same function is another place."""
        self._dumped = False

    def rest(self) -> None:
        """Forget the place, as no command runs."""
        self._place = self._held = None

    def sample(self, number: int, pace: Pace) -> Activity:
        """Where the main thread is, and since when.

        Args:
            number: of the command.
            pace: how the command gets on; each step is another place, as frames are reused.
        """
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        assert frame is not None
        stack = list(_outwards(frame))
        above = next((at for at, each in enumerate(stack) if not _is_known(each)), len(stack))
        user = stack[above] if above < len(stack) else frame
        inner = [each.f_code.co_filename for each in stack[:above]]
        calls = [(each.f_code.co_filename, each.f_code.co_name) for each in stack[:above]]
        place = (number, pace.count, recorder_status(), id(user), user.f_code)
        now = time.monotonic()
        starved = _starved_seconds()
        if place != self._place:
            self._place = place
            self._since = now
            self._starved_before = starved
            self._held = None
            self._dumped = False
        there = now - self._since
        # At most half of it, so that the time until a hang is noticed has a bound.
        seconds = there - min(starved - self._starved_before, there / 2)
        unusual = seconds > max(DUMP_SECONDS, _UNUSUAL * pace.longest)
        collectives: Sequence[Collective] = ()
        if unusual:
            self._held = user
            collectives = last_collectives()
            if not self._dumped:
                self._dumped = True
                _dump(collectives)
        # The user's code is then in another process.
        reads = _READING in calls and above == len(stack)
        code = user.f_code
        where = f"{Path(code.co_filename).name}:{user.f_lineno} in {code.co_name}()"
        return Activity(
            waits=_waits(frame, inner),
            seconds=round(seconds, 1),
            where="the wait for a reader (datacenter.readers)" if reads else where,
            in_task=reads or (above < len(stack) and not _compiles(inner)),
            longest=round(pace.longest, 3),
            collectives=collectives,
        )


def _waits(frame: FrameType, inner: Sequence[str]) -> bool:
    """Whether the main thread is in a call that waits for other ranks.

    `inner` has the files of the frames within the user's code.
    """
    called = next((each for each in inner if not each.startswith(_CALLING)), "")
    return (called or frame.f_code.co_filename).startswith(_WAITING)


def _compiles(inner: Sequence[str]) -> bool:
    return any(each.startswith(_COMPILING) for each in inner)


def _dump(collectives: Sequence[Collective]) -> None:
    """Write the stacks of all threads and the last collectives to the rank's log."""
    faulthandler.dump_traceback()
    for each in collectives:
        print(f"{'last' if each.done else 'in'} {describe(each)}", file=sys.stderr, flush=True)


def _starved_seconds() -> float:
    """How long the main thread was ready to run and had no processor; 0 where it is not known."""
    try:
        text = Path(f"/proc/self/task/{os.getpid()}/schedstat").read_text()
        return int(text.split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_known(frame: FrameType) -> bool:
    """Whether a frame is of PyTorch, of this package or of Python's own library."""
    return frame.f_code.co_filename.startswith((*_NOT_OF_USERS, "<"))
