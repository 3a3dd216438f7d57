r"""What participants say, before anything is made of it: reasons for people, figures for the log.

>>> in_a_line("no\nbattery \x1b[2J")
'no battery  [2J'
"""

from __future__ import annotations

import math

from isthmus.errors import UpdateError
from isthmus.wire import link_pb2

LONGEST_LINE = 1000
"""Characters of a participant's own words that are kept."""


def in_a_line(text: str) -> str:
    """A participant's words as one bounded line that does nothing to a terminal."""
    line = "".join(one if one.isprintable() else " " for one in text[:LONGEST_LINE]).strip()
    return line if len(text) <= LONGEST_LINE else f"{line}..."


def reason_of(reply: link_pb2.Reply) -> str:
    """Why a participant did not do what it was asked."""
    return in_a_line(reply.failure.reason) or "it answered something else than was asked"


def check_figures(trained: link_pb2.Trained) -> None:
    """Refuse a time or averages that nobody could add up.

    Raises:
        UpdateError: one is not finite, or the time is below 0.
    """
    if not all(map(math.isfinite, (trained.seconds, *trained.training.values()))):
        raise UpdateError("its time or one of its figures is not finite")
    if trained.seconds < 0:
        raise UpdateError(f"its time of {trained.seconds:g} s is below 0")
