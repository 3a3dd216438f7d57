"""Kill each process before and after each of its durable steps, and compare the final models.

The steps are not listed: the wrapper of the processes counts every call that changes what is left
after a crash (`isthmus_chaos.worker`). One run without crashes gives the numbers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Callable, Sequence

from isthmus.errors import AdmissionRefused
from isthmus_chaos.control_block import NEVER
from isthmus_chaos.deployment import ChaosDeployment
from isthmus_chaos.invariants import InvariantChecker

_POLL_SECONDS = 0.05
_IDLE_SECONDS = 0.3
_JOB_SECONDS = 300.0
_RESTART_SECONDS = 0.05


@dataclasses.dataclass(frozen=True, order=True)
class CrashPoint:
    """A moment to kill a process: before or after one of its durable steps."""

    process: str
    step: int
    """Number of the step since the job was submitted, from 1."""
    after: bool

    def __str__(self) -> str:
        return f"{self.process:<9} {'after' if self.after else 'before':<6} step {self.step:<3}"


@dataclasses.dataclass(kw_only=True)
class SweepReport:
    """What a sweep found."""

    points: int = 0
    """Crashes that took place."""
    same_models: int = 0
    """Jobs with the same SHA-256 as the one without crashes."""
    not_compared: int = 0
    """Jobs in which other participants were accepted, or with noise."""
    not_reached: int = 0
    violations: list[str] = dataclasses.field(default_factory=list)
    steps: dict[str, int] = dataclasses.field(default_factory=dict)
    """Durable steps of each process in one job."""
    reference_sha256: str = ""

    def summary(self) -> str:
        """The figures in one line."""
        return (
            f"{self.points} crashes, {self.same_models} with the same model as without, "
            f"{self.not_compared} not compared; {len(self.violations)} violations"
        )


class CrashSweep:
    """Runs a job once for each crash point, in one deployment."""

    def __init__(
        self,
        deployment: ChaosDeployment,
        say: Callable[[str], None],
        *,
        seed: int,
        sample: int | None,
    ) -> None:
        """`sample`: the number of crash points, drawn with the seed; None for all."""
        self.deployment = deployment
        self.report = SweepReport()
        self._say = say
        self._seed = seed
        self._sample = sample
        self._checker = InvariantChecker(deployment)

    async def run(self) -> SweepReport:
        """Run everything; the deployment is stopped in any case.

        Raises:
            UserError: the deployment could not be started.
        """
        try:
            await self.deployment.start()
            before = self._steps()
            reference = await self._run_job()
            if reference is None:
                self._violation("a job without crashes did not finish")
                return self.report
            after = self._steps()
            self.report.steps = {name: after[name] - before[name] for name in after}
            self.report.reference_sha256 = self._checker.model(reference)
            await asyncio.to_thread(self._checker.check)
            self._say(f"durable steps of one job: {self.report.steps}")
            for process in self.deployment.processes.values():
                process.restart_seconds = _RESTART_SECONDS
            for point in self._points():
                await self._crash(point, reference)
        finally:
            problems = await self.deployment.stop()
        for violation in [*problems, *await asyncio.to_thread(self._checker.check_end)]:
            self._violation(violation)
        return self.report

    def _points(self) -> Sequence[CrashPoint]:
        points = [
            CrashPoint(name, step, after)
            for name, count in self.report.steps.items()
            for step in range(1, count + 1)
            for after in (False, True)
        ]
        if self._sample is None or self._sample >= len(points):
            return points
        draw = random.Random(f"isthmus/crash/{self._seed}")  # noqa: S311 - repeatable, not secret
        return sorted(draw.sample(points, self._sample))

    async def _crash(self, point: CrashPoint, reference: str) -> None:
        control = self.deployment.processes[point.process].control
        control.crash_at = 2 * (control.steps + point.step) + point.after
        id_ = await self._run_job()
        about = control.take_crash()
        control.crash_at = NEVER
        if about:
            self.report.points += 1
        else:
            self.report.not_reached += 1
        self._say(f"{point}  {about or 'was not reached'}")
        for violation in await asyncio.to_thread(self._checker.check):
            self._violation(f"{point} ({about}): {violation}")
        if id_ is None:
            self._violation(f"{point} ({about}): the job did not finish")
        elif not self._checker.repeatable:
            self.report.not_compared += 1
        elif self._checker.model(id_) == self.report.reference_sha256:
            self.report.same_models += 1
        elif (number := self._checker.differing_round(reference, id_)) is not None:
            self.report.not_compared += 1
            self._say(f"           not compared: other participants are in round {number}")
        else:
            self._violation(f"{point} ({about}): the model differs")

    async def _run_job(self) -> str | None:
        """Submit the job and wait for its end; its id, or None if it did not finish."""
        earlier = set(self.deployment.jobs())
        deadline = time.monotonic() + _JOB_SECONDS
        while True:
            try:
                id_ = await self.deployment.submit()
                break
            except AdmissionRefused:  # the server crashed, and may have stored the job
                started = set(self.deployment.jobs()) - earlier
                if started:
                    id_ = started.pop()
                    break
                await asyncio.sleep(_POLL_SECONDS)
        while (state := self.deployment.jobs()[id_][0]) in ("queued", "running", "paused"):
            if time.monotonic() > deadline:
                return None
            await asyncio.sleep(_POLL_SECONDS)
        await self._until_idle()
        return id_ if state == "finished" else None

    async def _until_idle(self) -> None:
        """Wait until all processes run again, and have no further steps to make."""
        steps = None
        while steps != (steps := self._steps()):
            await self.deployment.until_connected()
            await asyncio.sleep(_IDLE_SECONDS)

    def _steps(self) -> dict[str, int]:
        return {name: process.control.steps for name, process in self.deployment.processes.items()}

    def _violation(self, violation: str) -> None:
        self._say(f"VIOLATION  {violation}")
        self.report.violations.append(violation)
