"""Which of several addresses a participant dials, and when it tries earlier ones again.

The first one that serves it is the best: owners name aggregators, and the server after them.

>>> order = DialOrder(3)
>>> order.choose(tries=1, was_open=False)
>>> order.now, list(order.earlier())
(1, [0])
"""

from __future__ import annotations

import math
import random
import time

UNLINKED_SECONDS = 20.0
"""Time in which aggregators that have no link to their server are tried before the last address: a
server that starts again, or another one in its place, has its aggregators back by then."""
FIRST_RETURN_SECONDS = 30.0
"""Longest time at a later address until an earlier one is asked for the first time."""
LONGEST_RETURN_SECONDS = 600.0
"""Upper bound of the time between two such questions, which grows with each of them."""


class DialOrder:
    """The addresses of one participant, by their numbers in the order of its owner.

    Guarantees:
      * an address at which no stream was opened is not the next one dialled, if there is another
        one that may be;
      * what aggregators without a server say keeps a participant from no address for longer than
        `UNLINKED_SECONDS`.
    """

    def __init__(self, count: int) -> None:
        """`count`: how many addresses there are."""
        self.now = 0
        """The address that is dialled."""
        self._count = count
        self._unlinked_at: float | None = None
        """Monotonic time of the first answer of an aggregator without a server, since a stream
        held."""
        self._unlinked: set[int] = set()
        """Addresses whose last answer was that of an aggregator without a server."""
        self._longest = 0.0
        """Longest time until the next question; 0 before the first."""

    def choose(
        self,
        *,
        tries: int,
        was_open: bool,
        goes_on: bool = False,
        is_unlinked: bool = False,
        works: bool = False,
        patience: float = UNLINKED_SECONDS,
    ) -> None:
        """Choose the address that is dialled next.

        One of which a stream has broken is tried once more. One where streams end as soon as they
        are open may have a welcome for everybody and nothing else.

        Args:
            tries: attempts since a stream held.
            was_open: whether the last attempt has opened a stream.
            goes_on: who ended the stream refuses this participant, or has no room.
            is_unlinked: an aggregator answered that it has no link to its server.
            works: whether a request is in progress, which goes on where it was.
            patience: seconds for which aggregators without a link are tried.
        """
        if tries == 1:
            self._unlinked_at = None
            if was_open and self.now == 0 and not goes_on:
                self._longest = 0.0
        now = time.monotonic()
        self._unlinked.discard(self.now)
        if is_unlinked:
            self._unlinked.add(self.now)
        if is_unlinked and self._unlinked_at is None:
            self._unlinked_at = now
        if not was_open or tries > 1 or goes_on:
            begin = -math.inf if self._unlinked_at is None else self._unlinked_at
            waits = self._unlinked and now < begin + patience
            # The last one is the server, which is to be spared what aggregators do.
            among = max(1, self._count - 1) if waits else self._count
            self.now = (self.now + 1) % among
        elif not works:
            self.now = 0  # what took it to another address may be over

    def earlier(self) -> range:
        """The addresses before the one that is dialled."""
        return range(self.now)

    def pause(self, spread: float) -> float:
        """Seconds until the earlier addresses are asked next, with jitter.

        Args:
            spread: seconds over which participants spread their return after a break.
        """
        self._longest = min(max(2 * self._longest, FIRST_RETURN_SECONDS), LONGEST_RETURN_SECONDS)
        longest = max(self._longest, 2 * spread)
        return random.uniform(0.5, 1.0) * longest  # noqa: S311 - jitter
