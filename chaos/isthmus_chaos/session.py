"""A whole chaos run: a reference job without faults, then the same job under a plan of faults."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence

from isthmus.errors import AdmissionRefused
from isthmus_chaos.deployment import ChaosDeployment
from isthmus_chaos.injector import FaultInjector
from isthmus_chaos.invariants import InvariantChecker
from isthmus_chaos.plan import Fault

_POLL_SECONDS = 0.2
_REFERENCE_SECONDS = 1800.0
_SETTLE_SECONDS = 120.0
"""Time to end after the last fault, in addition to three times the reference run."""


@dataclasses.dataclass(kw_only=True)
class ChaosReport:
    """What a chaos run found."""

    faults: list[dict[str, object]] = dataclasses.field(default_factory=list)
    violations: list[str] = dataclasses.field(default_factory=list)
    jobs: int = 0
    """Jobs that finished under faults."""
    rounds: int = 0
    attempts: int = 0
    same_models: int = 0
    """Jobs with the same SHA-256 as the reference."""
    notes: list[str] = dataclasses.field(default_factory=list)
    reference_sha256: str = ""

    def summary(self) -> str:
        """The figures in one line."""
        return (
            f"{len(self.faults)} faults, {self.jobs} jobs with {self.rounds} rounds under faults, "
            f"{self.same_models} with the same model as without; {len(self.violations)} violations"
        )


class ChaosSession:
    """Runs a job without faults, then again and again under faults, and checks the invariants."""

    def __init__(
        self, deployment: ChaosDeployment, faults: Sequence[Fault], say: Callable[[str], None]
    ) -> None:
        self.deployment = deployment
        self.report = ChaosReport()
        self._faults = faults
        self._say = say
        self._checker = InvariantChecker(deployment)
        self._checking = asyncio.Lock()
        self._begin = 0.0

    async def run(self) -> ChaosReport:
        """Run everything; the deployment is stopped in any case.

        Raises:
            UserError: the deployment could not be started.
        """
        try:
            await self.deployment.start()
            seconds = await self._run_reference()
            if seconds is not None:
                await self._run_faults(seconds)
        finally:
            problems = await self.deployment.stop()
        self._violations([*problems, *await asyncio.to_thread(self._checker.check_end)])
        self._compare_models()
        return self.report

    async def _run_reference(self) -> float | None:
        """Run the job without faults; its duration, or None if it did not finish."""
        begin = time.monotonic()
        id_ = await self.deployment.submit()
        self._say(f"{id_} runs without faults, for comparison")
        if not await self._ended(id_, begin + _REFERENCE_SECONDS):
            self._violations([f"{id_} did not end without any fault"])
            return None
        await self._check()
        return time.monotonic() - begin

    async def _run_faults(self, reference_seconds: float) -> None:
        """Keep the queue filled while faults are applied; then let the running job end."""
        await self.deployment.submit()
        self._begin = time.monotonic()
        checks: list[asyncio.Task[None]] = []

        def ended(fault: Fault, note: str) -> None:
            at = time.monotonic() - self._begin
            self._say(f"{at - fault.seconds:6.1f} s  {fault.describe()}  {note}".rstrip())
            self.report.faults.append({**dataclasses.asdict(fault), "note": note})
            checks.append(asyncio.create_task(self._check()))

        no_more = asyncio.Event()
        filling = asyncio.create_task(self._fill_queue(no_more))
        try:
            await FaultInjector(self.deployment, ended).run(self._faults)
            await asyncio.gather(*checks)
        finally:
            no_more.set()  # a submission in progress would arrive after a cancellation too
            await filling
        self._say(f"{time.monotonic() - self._begin:6.1f} s  no more faults")
        await self._cancel_queued()
        limit = _SETTLE_SECONDS + 3 * reference_seconds
        deadline = time.monotonic() + limit
        for id_ in self.deployment.jobs():
            if not await self._ended(id_, deadline):
                self._violations([f"{id_} did not end within {limit:.0f} s after the last fault"])
        await self.deployment.until_connected()
        await self._check()

    async def _fill_queue(self, no_more: asyncio.Event) -> None:
        """Submit the job whenever none waits, until there is to be no more of them.

        A submission may fail because of a fault.
        """
        while not no_more.is_set():
            if "queued" not in (state for state, _ in self.deployment.jobs().values()):
                with contextlib.suppress(AdmissionRefused):
                    await self.deployment.submit()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(no_more.wait(), _POLL_SECONDS)

    async def _cancel_queued(self) -> None:
        """Cancel the jobs that have not begun."""
        for id_, (state, _) in self.deployment.jobs().items():
            if state == "queued":
                self._checker.cancelled.add(id_)
                with contextlib.suppress(AdmissionRefused):  # it has just ended
                    await self.deployment.cancel(id_)

    async def _ended(self, id_: str, deadline: float) -> bool:
        """Wait until a job has ended; False if it has not by the deadline."""
        while self.deployment.jobs()[id_][0] not in _ENDED:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_POLL_SECONDS)
        return True

    async def _check(self) -> None:
        for name, process in self.deployment.processes.items():
            while process.exits:
                self._note(f"{name} {process.exits.pop(0)}")
        async with self._checking:  # a check compares what it reads with the one before
            self._violations(await asyncio.to_thread(self._checker.check))

    def _violations(self, violations: Sequence[str]) -> None:
        for violation in violations:
            self._say(f"VIOLATION  {violation}")
        self.report.violations += violations

    def _note(self, note: str) -> None:
        self._say(f"           {note}")
        self.report.notes.append(note)

    def _compare_models(self) -> None:
        """Compare finished jobs with the reference, round by round."""
        finished = [
            id_ for id_, (state, _) in self.deployment.jobs().items() if state == "finished"
        ]
        if not finished:
            return
        reference, *others = finished
        self.report.reference_sha256 = expected = self._checker.model(reference)
        self.report.jobs = len(others)
        rounds = self._checker.rounds
        self.report.rounds = sum(len(rounds[id_]) for id_ in rounds if id_ != reference)
        attempts = self._checker.attempts
        self.report.attempts = sum(attempts[id_] for id_ in attempts if id_ != reference)
        for id_ in others:
            if self._checker.model(id_) == expected:
                self.report.same_models += 1
            elif not self._checker.repeatable:
                self._note(f"{id_} is not compared: noise differs in every run")
            elif (number := self._checker.differing_round(reference, id_)) is not None:
                self._note(f"{id_} is not compared: other participants are in its round {number}")
            else:
                self._violations([f"{id_} ended with another model than {reference}"])


_ENDED = ("finished", "failed", "cancelled")
