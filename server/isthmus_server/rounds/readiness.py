"""Wait until a planned round may begin, and decide whether a failed attempt is repeated."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from typing import TypeVar

from isthmus.errors import RoundFailed
from isthmus.job import Job
from isthmus.wire import link_pb2
from isthmus_server.budgets.run_budgets import RunBudgets
from isthmus_server.regimes.base import AttemptFailed
from isthmus_server.rounds.assignment import cohort_settings
from isthmus_server.rounds.clock import Clock
from isthmus_server.rounds.cohort_selection import CohortSelector, NoAllowedCohort
from isthmus_server.rounds.roster import ParticipantRoster
from isthmus_server.storage.events import Event, Paused
from isthmus_server.strategy.limits import enforce_limits
from isthmus_server.strategy.policy import CURRENT, Observation, Plan, Stop, Wait

_SHORTEST_RETRY = 0.25
_LONGEST_RETRY = 30.0
_Held = TypeVar("_Held")


class RoundReadiness:
    """Brings a plan to the point at which its round can begin."""

    def __init__(
        self,
        job: Job,
        roster: ParticipantRoster,
        cohorts: CohortSelector,
        clock: Clock,
        observe: Callable[[], Observation],
        publish: Callable[[Event], None],
        budgets: RunBudgets | None = None,
    ) -> None:
        """`budgets` are those of privacy."""
        self._examples = None if budgets is None else budgets.examples
        self._job = job
        self._roster = roster
        self._cohorts = cohorts
        self._clock = clock
        self._observe = observe
        self._publish = publish

    async def wait(
        self, round_: int, plan: Plan, model_hash: Callable[[Plan], bytes | None]
    ) -> Plan | Stop:
        """Wait for the limits, the participants and an allowed cohort.

        Args:
            round_: number of the round.
            plan: as it was decided.
            model_hash: the SHA-256 of the model that a plan starts from, if devices may know it.

        Returns the plan; a datacenter round where only that can change the model; or the stop that
        ends the run.

        Raises:
            ParticipantsMissing: too few are ready in time, or those that are may not be summed.
        """
        while True:
            stop = await self._wait_for_limits(plan)
            if stop is not None:
                return stop
            await self._roster.require(plan.regime)
            if plan.regime == "datacenter":
                return plan
            settings = cohort_settings(self._job, plan)
            await self._roster.gather_cohort(settings.invited)
            refusal = self._refusal(round_, plan, model_hash)
            if refusal is None:
                return plan
            instead = self._datacenter_first(plan, refusal)
            if instead is not None:
                return instead
            if not await self._roster.until(
                lambda: self._refusal(round_, plan, model_hash) is None,
                clients=settings.needed,
                missing=refusal.missing,
            ):
                raise self._roster.missing(str(refusal), [link_pb2.CLIENT])

    def _refusal(
        self, round_: int, plan: Plan, model_hash: Callable[[Plan], bytes | None]
    ) -> NoAllowedCohort | None:
        try:
            self._cohorts.select(round_, cohort_settings(self._job, plan), model_hash(plan))
        except NoAllowedCohort as refusal:
            return refusal
        return None

    def _datacenter_first(self, plan: Plan, refusal: NoAllowedCohort) -> Plan | None:
        """A datacenter round in place of the plan, if its policy uses the datacenter at all."""
        if (
            not self._roster.datacenters
            or plan.start != CURRENT
            or self._job.strategy.policy == "federated"
        ):
            return None
        instead = dataclasses.replace(
            plan,
            regime="datacenter",
            reason=f"the datacenter changes the model first: {refusal}",
            cohort=None,
            merge=None,
            transfer_weight=None,
        )
        answer = enforce_limits(instead, self._observe()).answer
        return instead if answer == instead else None

    async def _wait_for_limits(self, plan: Plan) -> Stop | None:
        """Enforce the limits of this moment on a plan that was made earlier.

        The plan does not change: it waits until the limits allow it, or a limit ends the run.
        """
        while True:
            answer = enforce_limits(plan, self._observe()).answer
            if isinstance(answer, Stop):
                return answer
            if used_up := await asyncio.to_thread(self._without_privacy, plan):
                return Stop(used_up)
            if not isinstance(answer, Wait):
                return None
            await self.pause(answer)

    def _without_privacy(self, plan: Plan) -> str:
        """Why the datacenters' examples may not be used again; empty if they may.

        Accounting for thousands of steps takes seconds.
        """
        if self._examples is None or plan.regime == "federated":
            return ""
        steps = plan.datacenter_steps or self._job.datacenter.steps
        return self._examples.refusal(steps * max(1, len(self._roster.datacenters)))

    async def pause(self, wait: Wait) -> None:
        """Publish that the run waits, and wait."""
        round_ = self._observe().round
        self._publish(Paused(round=round_, seconds=wait.seconds, reason=wait.reason))
        await self._clock.sleep(wait.seconds)


class Drain:
    """Ends a run without interrupting its running attempt, as the first SIGTERM does.

    The run's task is cancelled at once if it only waits, and else after the attempt: nothing new
    begins.
    """

    def __init__(self) -> None:
        self._requested = False
        self._held = False
        self._task: asyncio.Task[object] | None = None

    def begin(self) -> None:
        """From now on `request` is for the current task."""
        self.check()
        self._task = asyncio.current_task()

    def request(self) -> None:
        """End the run now, or after the attempt that is running."""
        self._requested = True
        if self._task is not None and not self._held:
            self._task.cancel()

    def check(self) -> None:
        """End the run here if that was requested.

        Raises:
            CancelledError: it was.
        """
        if self._requested:
            raise asyncio.CancelledError

    def hold(self) -> None:
        """From now on the run is not interrupted."""
        self._held = True

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Do not interrupt the run inside the block."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    @contextlib.asynccontextmanager
    async def during(
        self, turn: contextlib.AbstractAsyncContextManager[_Held]
    ) -> AsyncIterator[_Held]:
        """Interrupt the run while it waits for a turn, and not inside the block."""
        async with contextlib.AsyncExitStack() as entered:
            self.check()
            self._held = False
            held = await entered.enter_async_context(turn)
            self._held = True
            yield held


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
        """Those of the last attempt."""

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

    async def pause(self, error: RoundFailed) -> None:
        """Wait before the next attempt, if devices were lost."""
        if _excused(error):
            longest = min(_SHORTEST_RETRY * 2 ** min(self.failed - 1, 16), _LONGEST_RETRY)
            await self._clock.sleep(longest * random.uniform(0.5, 1.0))  # noqa: S311 - jitter


def _excused(error: RoundFailed) -> bool:
    return isinstance(error, NoAllowedCohort) or (
        isinstance(error, AttemptFailed) and error.excused
    )
