"""How much of a run's time trains, where ranks fail and continue from checkpoints.

Failures come at random and independently (exponential times), and any of a rank stops all. With a
mean time M between failures of all ranks, C seconds for a checkpoint, R for a restart, and a
checkpoint after each t seconds of training, Daly (2006) has

    goodput = t / (M exp(R / M) (exp((t + C) / M) - 1))

which is exact if failures may also come during checkpoints and restarts. The best t solves
1 - t / M = exp(-(t + C) / M); Young (1974) has sqrt(2 C M) for it, which is close where C is far
below M.

J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.
J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS
22(3), 2006.
"""

from __future__ import annotations

import dataclasses
import math

from isthmus.job.planned import GIVEN, Figure


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failures:
    """How often ranks fail, and what a failure costs."""

    rank_mtbf_seconds: float
    """Mean time between failures of one rank."""
    ranks: int
    checkpoint_seconds: float
    """For which training waits."""
    restart_seconds: float
    """From a failure to the first step after it."""

    @property
    def mtbf_seconds(self) -> float:
        """Mean time between failures of any of the ranks."""
        return self.rank_mtbf_seconds / self.ranks

    def goodput(self, interval: float) -> float:
        """Share of the time that trains, with a checkpoint after so many seconds of training."""
        mean = self.mtbf_seconds
        # Beyond it nothing is ever finished, and exp() overflows.
        if (interval + self.checkpoint_seconds + self.restart_seconds) / mean > 500:
            return 0.0
        waited = mean * math.exp(self.restart_seconds / mean)
        return interval / (waited * math.expm1((interval + self.checkpoint_seconds) / mean))

    def best_interval(self) -> float:
        """Seconds of training between checkpoints with the highest goodput.

        >>> failures = Failures(
        ...     rank_mtbf_seconds=3600.0, ranks=1, checkpoint_seconds=1.0, restart_seconds=0.0
        ... )
        >>> round(failures.best_interval(), 1), round((2 * 3600) ** 0.5, 1)  # Young's
        (84.2, 84.9)
        """
        mean = self.mtbf_seconds
        low = 0.0
        high = mean
        # The difference of both sides falls from 1 - exp(-C / M) to below 0. Both without their 1,
        # next to which nothing would be left of them where ranks hardly ever fail.
        for _ in range(200):
            middle = (low + high) / 2
            if -middle / mean > math.expm1(-(middle + self.checkpoint_seconds) / mean):
                low = middle
            else:
                high = middle
        return low

    def figures(self, interval: float | None, run_seconds: float | None) -> list[Figure]:
        """What a plan says of them.

        Args:
            interval: seconds of training between the job's checkpoints; None if it is not known.
            run_seconds: of the whole run without failures and checkpoints; None if not known.
        """
        how = f"by Daly's model, from what was {GIVEN}"
        best = self.best_interval()
        found = [
            Figure("time between failures of any rank", self.mtbf_seconds, "s", how),
            Figure("best time between checkpoints", best, "s", how),
            Figure(
                "goodput at the best time between checkpoints",
                self.goodput(best),
                "of the time",
                how,
            ),
        ]
        used = best
        if interval is not None:
            used = interval
            found.append(Figure("time between checkpoints of the job", interval, "s", how))
            found.append(
                Figure(
                    "goodput at the job's time between checkpoints",
                    self.goodput(interval),
                    "of the time",
                    how,
                )
            )
        share = self.goodput(used)
        if run_seconds is not None and share:
            name = "time of the run with failures"
            found.append(Figure(name, run_seconds / share, "s", how))
        return found
