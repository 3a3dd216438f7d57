"""Exponential backoff with jitter between connection attempts.

The growth is slow: a pause is about 0.6 of the time without a connection, so that all participants
are connected again soon after a short interruption. The longest pause limits the load on a server
that accepts connections and drops them: with one minute, 5,000 devices connect about 110 times a
second.

>>> backoff = Backoff(longest_pause=60.0)
>>> reported = [backoff.broke(open_seconds=0.0) for _ in range(100)]
>>> [failures for failures, is_reported in enumerate(reported, 1) if is_reported]
[1, 2, 4, 8, 16, 32, 64]
"""

from __future__ import annotations

import random

STABLE_SECONDS = 5.0
"""A connection that was open for longer resets the backoff."""

_SHORTEST_PAUSE = 0.05
_GROWTH = 1.6
_RETRIED_SHARE = 0.25


class Backoff:
    """The pauses of one participant between attempts to connect to a server."""

    def __init__(self, longest_pause: float) -> None:
        """`longest_pause`: upper bound of a pause, in seconds."""
        self.spread = 0.0
        """Seconds over which the first attempts of all participants are spread after a break."""
        self.away = 0.0
        """Seconds for which the server has sent this participant away, if it has not been back."""
        self.tries = 0
        """Attempts since a connection was open for more than `STABLE_SECONDS`."""
        self.longest = longest_pause
        """Upper bound of a pause, in seconds."""

    def broke(self, open_seconds: float) -> bool:
        """Record that a connection or an attempt ended after so many seconds open.

        Returns whether to log it: the 1st, 2nd, 4th, 8th ... failure in a row is logged.
        """
        self.tries = 1 if open_seconds > STABLE_SECONDS else self.tries + 1
        return self.tries & (self.tries - 1) == 0

    def pause(self) -> float:
        """Seconds until the next attempt, with jitter."""
        if self.away > 0:
            # A check-in without a server: all that have found none one after the other, and were
            # quick to try again, would be too many when it is back.
            return random.uniform(0.5, 1.0) * self.away * _RETRIED_SHARE  # noqa: S311 - jitter
        if self.tries == 1 and self.spread > 0:
            return random.uniform(0.0, self.spread)  # noqa: S311 - jitter
        exponent = min(self.tries - 1, 64)
        longest = min(_SHORTEST_PAUSE * _GROWTH**exponent, self.longest)
        longest = max(longest, 2 * self.spread)
        return longest * random.uniform(0.5, 1.0)  # noqa: S311 - jitter
