"""Monitor the ranks while they execute one command: failures, heartbeats, progress and signals."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from isthmus_datacenter.messages import (
    Activity,
    ControlSignal,
    Incarnation,
    Outcome,
    ProgressReport,
    ReadSignal,
)
from isthmus_datacenter.service.agents import Agents
from isthmus_datacenter.service.control_store import ControlStore, ControlStoreThread
from isthmus_datacenter.service.hangs import HangLimits, describe_ranks, find_hang

_OUTCOME_SECONDS = 0.1
"""One wait for the outcome of a command, before the ranks' health is checked."""
_HEARTBEAT_CHECK_SECONDS = 0.5
"""Interval of the checks of heartbeats, progress and signals."""


log = logging.getLogger(__name__)


class IncarnationLostError(Exception):
    """The incarnation that was to execute a command has ended, or must be ended."""

    def __init__(self, reason: str, *, ranks_run: bool = False) -> None:
        super().__init__(reason)
        self.ranks_run = ranks_run
        """Whether the incarnation's ranks still run, and must be killed."""


class RanksHangError(Exception):
    """The ranks run, and get no further: they must be killed."""


class CancelIgnoredError(Exception):
    """The ranks did not stop within the lease after a command was cancelled."""


class CommandMonitor:
    """Waits for the outcome of one command and checks the ranks' health meanwhile."""

    def __init__(
        self,
        store: ControlStoreThread,
        agents: Agents,
        incarnation: Incarnation,
        number: int,
        *,
        ranks: int,
        trains: bool,
        limits: HangLimits,
        send_progress: Callable[[ProgressReport], None],
        read_signal: ReadSignal,
    ) -> None:
        self._store = store
        self._agents = agents
        self._incarnation = incarnation
        self._number = number
        self._ranks = ranks
        self._trains = trains
        self._limits = limits
        self._send_progress = send_progress
        self._read_signal = read_signal
        self._last_report: ProgressReport | None = None
        self._heartbeats: list[bytes] = [b""] * ranks
        self._heartbeat_at = [time.monotonic()] * ranks
        """When the heartbeat of each rank last changed."""
        self._named: tuple[int, str] | None = None
        """The last rank that was named, and the file where it was."""
        self._checked_at = 0.0
        self._sent_signal = ControlSignal.CONTINUE
        self._signalled_at = 0.0

    async def wait_for_outcome(self) -> Outcome:
        """Wait until the ranks report the outcome.

        Raises:
            IncarnationLostError: a rank died or is silent, or the agent has ended.
            RanksHangError: the ranks hang.
            CancelIgnoredError: the command was cancelled, and the ranks did not stop in time.
        """
        while True:
            # First of all: ranks that have reported an outcome may end at once, which is then no
            # loss.
            outcome = await self._store.call(
                ControlStore.wait_for_outcome, self._incarnation, self._number, _OUTCOME_SECONDS
            )
            if outcome is not None:
                return outcome
            failure = await self._store.call(ControlStore.rank_failure, self._incarnation)
            if failure is not None:
                raise IncarnationLostError(str(failure))
            if self._agents.ended():
                raise IncarnationLostError("the agent of the ranks died")
            now = time.monotonic()
            if now - self._checked_at >= _HEARTBEAT_CHECK_SECONDS:
                self._checked_at = now
                await self._check_heartbeats(now)
                await self._forward_progress()
                await self._forward_signal(now)

    async def _check_heartbeats(self, now: float) -> None:
        heartbeats = await self._store.call(ControlStore.heartbeats, self._incarnation, self._ranks)
        for rank, (old, new) in enumerate(zip(self._heartbeats, heartbeats, strict=True)):
            # By this machine's clock: those of other nodes may differ.
            if old != new:
                self._heartbeat_at[rank] = now
        self._heartbeats = heartbeats
        activities = [ControlStore.activity_in(each) for each in heartbeats]
        for rank, heartbeat_at in enumerate(self._heartbeat_at):
            if now - heartbeat_at > self._limits.lease_seconds:
                self._log_ranks(activities)
                activity = activities[rank]
                last = ""
                if activity is not None and activity.in_task:
                    last = f" (last seen at {activity.where})"
                raise IncarnationLostError(
                    f"rank {rank} did not answer for {self._limits.lease_seconds:g} s and was "
                    f"ended{last}",
                    ranks_run=True,
                )
        working = [each for each in activities if each is not None]
        if len(working) < self._ranks:
            return
        self._name_hanging_rank(working)
        hang = find_hang(working, self._limits, trains=self._trains)
        if hang is not None:
            self._log_ranks(activities)
            raise RanksHangError(hang)

    def _log_ranks(self, activities: Sequence[Activity | None]) -> None:
        """Log where each rank is, when the wait for them is given up."""
        for line in describe_ranks(activities):
            log.warning("%s", line)

    def _name_hanging_rank(self, activities: Sequence[Activity]) -> None:
        """Say which rank keeps all others waiting, and at what line.

        It may be at work: reading an example may take as long.
        """
        working: list[tuple[int, Activity]] = []
        for rank, activity in enumerate(activities):
            # Within the lease, as if it did not answer.
            if activity.seconds < self._limits.lease_seconds / 2:
                return
            if not activity.waits:
                working.append((rank, activity))
        # Where no rank waits, all may be at work.
        if not working or len(working) == self._ranks > 1:
            return
        rank, activity = working[0]
        place = (rank, activity.where.rpartition(":")[0])
        if place == self._named:
            return
        self._named = place
        others = ", and the others wait for it" if self._ranks > 1 else ""
        note = (
            f"rank {rank} has been at {activity.where} for {activity.seconds:.0f} s{others}; the "
            "stack of each rank is in its log"
        )
        log.warning("%s", note)
        self._send_progress(
            ProgressReport(
                steps=0,
                total_steps=0,
                loss=0.0,
                examples_per_second=0.0,
                units_per_second=0.0,
                note=note,
            )
        )

    async def _forward_progress(self) -> None:
        report = await self._store.call(ControlStore.progress, self._incarnation, self._number)
        if report is not None and report != self._last_report:
            self._last_report = report
            self._send_progress(report)

    async def _forward_signal(self, now: float) -> None:
        # A stronger signal replaces a weaker one; the time for a cancellation begins with it.
        control_signal = self._read_signal()
        if control_signal > self._sent_signal:
            self._sent_signal = control_signal
            self._signalled_at = now
            await self._store.call(
                ControlStore.send_signal, self._incarnation, self._number, control_signal
            )
        elif (
            control_signal is ControlSignal.CANCEL
            and now - self._signalled_at > self._limits.lease_seconds
        ):
            self._log_ranks([ControlStore.activity_in(each) for each in self._heartbeats])
            raise CancelIgnoredError
