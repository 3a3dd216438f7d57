"""Repeat what failed: attempts at a round, at a comparison, or at a sum of the devices' counts."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

from isthmus.errors import RoundFailed
from isthmus.job import Job
from isthmus_server.regimes.base import AttemptFailed
from isthmus_server.rounds.clock import Clock
from isthmus_server.rounds.cohort_selection import NoAllowedCohort
from isthmus_server.rounds.drain import Drain

_SHORTEST_RETRY = 0.25
"""Seconds of the first pause after lost devices; each further one is twice as long."""
_LONGEST_RETRY = 30.0
"""Seconds of the longest pause."""
_Result = TypeVar("_Result")


class GivenUp(Exception):
    """All attempts have failed."""

    def __init__(self, failure: RoundFailed, attempts: int) -> None:
        super().__init__(str(failure))
        self.failure = failure
        """The failure of the last attempt."""
        self.attempts = attempts
        """Attempts that were made."""


class Retries:
    """Counts the failed attempts at a round, or at a comparison.

    A task that fails in two attempts for the same reason would fail in all of them: that ends the
    round early. An attempt that failed only because devices were lost, or refused for privacy, does
    not count towards `attempts`. Such attempts are repeated for at least `time.join_seconds`, after
    growing pauses.
    """

    def __init__(self, job: Job, clock: Clock) -> None:
        self._attempts = job.attempts
        self._seconds = job.time.join_seconds
        self._clock = clock
        self.failed = 0
        """All failed attempts."""
        self._counted = 0
        self._excused_since: float | None = None
        self._task_failures: Collection[str] = ()
        """Reasons for which tasks failed in the last attempt."""

    def give_up(self, error: RoundFailed) -> bool:
        """Count a failed attempt; returns whether it was the last."""
        self.failed += 1
        if isinstance(error, AttemptFailed):
            repeated = error.task_failures.intersection(self._task_failures)
            self._task_failures = error.task_failures
            if repeated:
                return True
        if not _excused(error):
            self._counted += 1
            return self._counted >= self._attempts
        now = self._clock.now()
        if self._excused_since is None:
            self._excused_since = now
        return self.failed >= self._attempts and now - self._excused_since >= self._seconds

    async def until_done(
        self,
        attempt: Callable[[], Awaitable[_Result]],
        note_failure: Callable[[RoundFailed, bool], None],
        drain: Drain | None = None,
        may_repeat: Callable[[], bool] = lambda: True,
    ) -> _Result:
        """Make attempts until one succeeds or was the last; returns the result of that attempt.

        Args:
            attempt: makes one attempt.
            note_failure: receives the failure of an attempt before the next one begins, and
                whether it was the last.
            drain: ends the run between attempts; None if the whole of them is not interrupted.
            may_repeat: whether one more may be made after one has failed.

        Raises:
            GivenUp: the last attempt failed.
        """
        while True:
            try:
                return await attempt()
            except RoundFailed as failure:
                # Inside of the handler: a failure that lived on would keep the memory of its
                # attempt, through its traceback, while the next one needs as much.
                last = self.give_up(failure) or not may_repeat()
                # Stored before anything else: a crash from here on must find the failure, with
                # what its participants are paid for.
                note_failure(failure, last)
                if last:
                    raise GivenUp(failure, self.failed) from None
                if drain is not None:
                    drain.check()
                await self.pause(failure)

    async def pause(self, error: RoundFailed) -> None:
        """Wait before the next attempt, if devices were lost."""
        if _excused(error):
            longest = min(_SHORTEST_RETRY * 2 ** min(self.failed - 1, 16), _LONGEST_RETRY)
            await self._clock.sleep(longest * random.uniform(0.5, 1.0))  # noqa: S311 - jitter


def _excused(error: RoundFailed) -> bool:
    return isinstance(error, NoAllowedCohort) or (
        isinstance(error, AttemptFailed) and error.excused
    )
