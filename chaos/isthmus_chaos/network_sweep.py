"""Disturb an aggregator in a round of each kind, and check that nothing is lost.

One deployment with two aggregators runs a job once for each fault. Each device knows one
aggregator, so that every fault meets some, and they have to come back there.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import sqlite3
import time
from collections.abc import Callable, Sequence

from isthmus.job.schema import with_changes
from isthmus_chaos.deployment import ChaosDeployment
from isthmus_chaos.injector import FaultInjector
from isthmus_chaos.invariants import InvariantChecker, attempts_of
from isthmus_chaos.network_plan import REPEATABLE, AggregatorFault, of_kind
from isthmus_chaos.plan import CUT, HALF_OPEN, KILL, Fault
from isthmus_server.service.server import LEASE_SECONDS

_SECONDS = {KILL: 1.0, CUT: 2.0, HALF_OPEN: LEASE_SECONDS + 2.0}
"""How long each fault takes: one in which nothing comes and nothing breaks outlasts the lease."""
_JOB_SECONDS = 300.0
_GOES_ON = ("queued", "running", "paused")
"""States of a job that has not ended."""
_POLL_SECONDS = 0.05


@dataclasses.dataclass(kw_only=True)
class NetworkReport:
    """What a sweep found."""

    faults: list[dict[str, object]] = dataclasses.field(default_factory=list)
    """Faults that met a running job: kind of round, fault, target, and attempts that failed."""
    same_models: int = 0
    """Jobs with the same SHA-256 as the one of their kind without faults."""
    not_compared: int = 0
    """Jobs whose model timing or the devices in a round decide."""
    not_reached: int = 0
    """Jobs that had ended before the fault."""
    violations: list[str] = dataclasses.field(default_factory=list)

    def summary(self) -> str:
        """The figures in one line."""
        return (
            f"{len(self.faults)} faults of aggregators, {self.same_models} models as without, "
            f"{self.not_compared} not compared; {len(self.violations)} violations"
        )


class NetworkSweep:
    """Runs a job once for each fault, in one deployment with aggregators."""

    def __init__(
        self,
        deployment: ChaosDeployment,
        say: Callable[[str], None],
        *,
        seed: int,
        faults: Sequence[AggregatorFault],
    ) -> None:
        """`seed` chooses the moments of the faults."""
        self.deployment = deployment
        self.report = NetworkReport()
        self._say = say
        self._draw = random.Random(f"isthmus/network/{seed}/moments")  # noqa: S311 - not secret
        self._faults = faults
        self._checker = InvariantChecker(deployment)
        self._references: dict[str, tuple[str, float]] = {}
        """By kind: the job without faults, and the seconds of one of its rounds."""
        self._seeds = 0
        """Jobs so far that have a seed of their own."""

    async def run(self) -> NetworkReport:
        """Run everything; the deployment is stopped in any case.

        Raises:
            UserError: the deployment could not be started.
        """
        try:
            await self.deployment.start()
            for fault in self._faults:
                await self.deployment.until_connected()
                if fault.kind in self._references or await self._run_reference(fault.kind):
                    await self._disturb(fault)
        finally:
            problems = await self.deployment.stop()
        for violation in [*problems, *await asyncio.to_thread(self._checker.check_end)]:
            self._violation(violation)
        return self.report

    async def _run_reference(self, kind: str) -> bool:
        id_ = await self._submit(kind)
        await self._until_attempts(id_, 2)  # in the first one devices open the task, for a while
        begin = time.monotonic()
        finished = await self._finished(id_)
        if finished:
            seconds = (time.monotonic() - begin) / max(1, self.deployment.job.rounds - 1)
            self._references[kind] = (id_, seconds)
            await self._check(f"{kind} without faults")
        else:
            self._violation(f"{kind}: a job without faults did not finish")
        return finished

    async def _disturb(self, fault: AggregatorFault) -> None:
        reference, round_seconds = self._references[fault.kind]
        id_ = await self._submit(fault.kind)
        # Half of the faults are as early in an attempt as can be, others anywhere in it.
        attempt = self._draw.randint(1, max(1, self.deployment.job.rounds - 1))
        is_met = await self._until_attempts(id_, attempt)
        await asyncio.sleep(self._draw.choice((0.0, self._draw.random())) * round_seconds)
        is_met = is_met and self.deployment.jobs()[id_][0] == "running"
        seconds = _SECONDS[fault.what]
        await FaultInjector(self.deployment, lambda *_: None).run(
            [Fault(at=0.0, kind=fault.what, target=fault.target, seconds=seconds)]
        )
        finished = await self._finished(id_)
        await self._check(str(fault))
        failed = self._checker.attempts.get(id_, 0) - len(self._checker.rounds.get(id_, ()))
        if is_met:
            self.report.faults.append({**dataclasses.asdict(fault), "failed_attempts": failed})
        else:
            self.report.not_reached += 1
        self._say(f"{fault}  {failed} failed attempts" if is_met else f"{fault}  came too late")
        if not finished:
            self._violation(f"{fault}: the job did not finish")
        elif fault.kind not in REPEATABLE or not self._checker.repeatable:
            self.report.not_compared += 1
        elif self._checker.model(id_) == self._checker.model(reference):
            self.report.same_models += 1
        elif self._checker.differing_round(reference, id_) is not None:
            self.report.not_compared += 1
        else:
            self._violation(f"{fault}: the model differs")

    async def _submit(self, kind: str) -> str:
        """Queue a job with rounds of a kind; returns its id.

        A device gives one vector for one model, so that jobs whose vectors are others have another
        model to start from.
        """
        job = of_kind(self.deployment.job, kind)
        if kind not in REPEATABLE:
            self._seeds += 1
            job = with_changes(job, {"seed": job.seed + self._seeds})
        return await self.deployment.submit(job)

    async def _until_attempts(self, id_: str, count: int) -> bool:
        """Wait until so many attempts have begun; False if the job ends or is too slow."""
        deadline = time.monotonic() + _JOB_SECONDS
        while self.deployment.jobs()[id_][0] in _GOES_ON and time.monotonic() < deadline:
            try:
                if attempts_of(self.deployment.runs / id_) >= count:
                    return True
            except sqlite3.Error:  # the log is being created
                pass
            await asyncio.sleep(_POLL_SECONDS)
        return False

    async def _finished(self, id_: str) -> bool:
        """Wait until a job has ended; whether it has finished in time."""
        deadline = time.monotonic() + _JOB_SECONDS
        while (state := self.deployment.jobs()[id_][0]) in _GOES_ON:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_POLL_SECONDS)
        return state == "finished"

    async def _check(self, about: str) -> None:
        for violation in await asyncio.to_thread(self._checker.check):
            self._violation(f"{about}: {violation}")

    def _violation(self, violation: str) -> None:
        self._say(f"VIOLATION  {violation}")
        self.report.violations.append(violation)
