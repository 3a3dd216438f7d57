"""How long runs take, by the seconds of some rounds that are like theirs."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence

from isthmus_server.strategy.learning_curves import Interval

NORMAL_NINETY = statistics.NormalDist().inv_cdf(0.95)
"""Deviations from the mean within which nine of ten values of a normal distribution are."""

MANY = 20
"""Rounds of which the shortest is about as short as any."""


@dataclasses.dataclass(frozen=True)
class SecondsOfRounds:
    """Seconds of rounds of one kind, in the order in which they were."""

    seconds: Sequence[float]

    @property
    def mean(self) -> float:
        """Seconds of a round."""
        return statistics.fmean(self.seconds)

    def middle_of_runs(self, rounds: int) -> float:
        """Seconds of the run in the middle, of all runs that these rounds make from one of them on.

        A long round that is rare is in the mean of rounds, and in most runs of few rounds it is
        not. After the last round follows the first one.

        Args:
            rounds: of each run.
        """
        count = len(self.seconds)
        times, rest = divmod(rounds, count)
        until = [0.0, *itertools.accumulate([*self.seconds, *self.seconds])]
        rests = [until[start + rest] - until[start] for start in range(count)]
        return times * sum(self.seconds) + statistics.median(rests)

    def run(self, rounds: int) -> Interval | None:
        """Where nine of ten runs are, and the one in the middle; None if one round is known.

        Args:
            rounds: of each run.
        """
        return run_of([(self, rounds)])

    @property
    def mean_off(self) -> float | None:
        """How far the mean of all such rounds may be from that of these; None for one round.

        That is so in nine of ten cases.
        """
        count = len(self.seconds)
        return None if count < 2 else ninety(count) * self.spread / math.sqrt(count)

    @property
    def spread(self) -> float:
        """Standard deviation of a round, as far as sums of rounds show it.

        A lost device is missing for many rounds, which are alike for that: sums spread by more than
        their rounds would by themselves.
        """
        count = len(self.seconds)
        if count < 2:
            return 0.0
        size = math.isqrt(count)
        starts = range(0, count - size + 1, size)
        blocks = [statistics.fmean(self.seconds[start : start + size]) for start in starts]
        of_blocks = statistics.stdev(blocks) * math.sqrt(size)
        return max(statistics.stdev(self.seconds), of_blocks)


def run_of(parts: Sequence[tuple[SecondsOfRounds, int]]) -> Interval | None:
    """Where nine of ten runs are that have so many rounds of each kind, and the one in the middle.

    Args:
        parts: rounds of a kind that are known, and how many a run has.

    Returns:
        None if one round alone is known of a kind: that says nothing of how they differ.
    """
    if any(len(times.seconds) < 2 for times, _ in parts):
        return None
    middle = sum(times.middle_of_runs(rounds) for times, rounds in parts)
    whole = sum(times.mean * rounds for times, rounds in parts)
    # The mean is one of rounds that are known, and the run has a mean of its own.
    off = math.hypot(
        *(
            ninety(len(times.seconds))
            * times.spread
            * math.sqrt(rounds + rounds**2 / len(times.seconds))
            for times, rounds in parts
        )
    )
    # No run is faster than one of the shortest rounds, of which a few known ones say too little.
    least = sum(
        min(times.seconds) * rounds for times, rounds in parts if len(times.seconds) >= MANY
    )
    return Interval(max(least, min(whole - off, middle)), middle, max(whole + off, middle))


def ninety(count: int) -> float:
    """Deviations from a mean within which nine of ten values are, if so many say the deviation.

    The quantile of Student's distribution, by its expansion around that of the normal one.

    >>> [round(ninety(count), 2) for count in (3, 6, 200)]
    [2.88, 2.01, 1.65]
    """
    normal = NORMAL_NINETY
    free = float(count - 1)
    terms = (
        normal,
        (normal**3 + normal) / 4,
        (5 * normal**5 + 16 * normal**3 + 3 * normal) / 96,
        (3 * normal**7 + 19 * normal**5 + 17 * normal**3 - 15 * normal) / 384,
    )
    return sum(term / free**power for power, term in enumerate(terms))
