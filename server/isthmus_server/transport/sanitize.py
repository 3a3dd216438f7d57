r"""Validate and sanitise text and figures that participants send.

>>> in_a_line("no\nbattery \x1b[2J")
'no battery  [2J'
"""

from __future__ import annotations

import math

from isthmus.errors import UpdateError
from isthmus.wire import link_pb2

MAX_LINE = 1000
"""Characters of a participant's text that are kept."""


def in_a_line(text: str) -> str:
    """Return text as one bounded line without control characters, safe to print on a terminal."""
    printable = (char if char.isprintable() else " " for char in text[:MAX_LINE])
    line = "".join(printable).strip()
    return line if len(text) <= MAX_LINE else f"{line}..."


def reason_of(reply: link_pb2.Reply) -> str:
    """Return why a participant failed a request, sanitised."""
    return in_a_line(reply.failure.reason) or "it answered something else than was asked"


def check_figures(trained: link_pb2.Trained) -> None:
    """Check that the reported duration and averages are finite and can be summed.

    Raises:
        UpdateError: one is not finite, or the duration is below 0.
    """
    if not all(map(math.isfinite, (trained.seconds, *trained.training.values()))):
        raise UpdateError("its time or one of its figures is not finite")
    if trained.seconds < 0:
        raise UpdateError(f"its time of {trained.seconds:g} s is below 0")
