"""Between two tries to dial: pauses that grow, and a word of it now and then.

This is exponential backoff with jitter, slow to grow: a pause is about 0.6 of how long there has
been no link, so that all are back soon after a short break. The longest is for a server that lets
everybody in and drops them: where that is a minute, 5,000 devices dial about 110 times a second.

>>> backoff = Backoff(longest_pause=60.0)
>>> told = [backoff.broke(held=0.0) for _ in range(100)]
>>> [tries + 1 for tries, said in enumerate(told) if said]
[1, 2, 4, 8, 16, 32, 64]
"""

from __future__ import annotations

import random

HELD_SECONDS = 5.0
"""A link that was open for so long was no mere try: after it everything begins anew."""

_SHORTEST_PAUSE = 0.05
_GROWTH = 1.6


class Backoff:
    """How one participant keeps on dialling a server that may be away for months."""

    def __init__(self, longest_pause: float) -> None:
        """`longest_pause` in seconds."""
        self.tries = 0
        """Since a link last held."""
        self._longest = longest_pause

    def broke(self, held: float) -> bool:
        """A link, or a try, ended after it had been open for `held` seconds.

        Returns whether to tell a person: of the first, and from there on twice as rarely each time.
        """
        self.tries = 1 if held > HELD_SECONDS else self.tries + 1
        return self.tries & (self.tries - 1) == 0

    def pause(self) -> float:
        """Seconds until the next try, jittered."""
        grown = min(self.tries - 1, 64)
        longest = min(_SHORTEST_PAUSE * _GROWTH**grown, self._longest)
        return longest * random.uniform(0.5, 1.0)  # noqa: S311 - jitter
