"""Disturb aggregators, servers and a mirror in a round of each kind; check that nothing is lost.

One deployment with two aggregators, two servers and a mirror runs a job once for each fault. Each
device knows one aggregator, so that every fault meets some, and they have to come back there. Of
the servers one serves, and the other one has to take over in time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import sqlite3
import time
from collections.abc import Callable, Sequence

from isthmus.job.schema import with_changes
from isthmus.printable import counted
from isthmus_chaos.deployment import ChaosDeployment
from isthmus_chaos.injector import FaultInjector
from isthmus_chaos.invariants import InvariantChecker, attempts_of
from isthmus_chaos.network_plan import REPEATABLE, NetworkFault, of_kind
from isthmus_chaos.plan import CUT, HALF_OPEN, KILL, MIRROR, SERVER, STOP, Fault, device_names
from isthmus_server.mirror.mirrored_blobs import LEAST_BYTES
from isthmus_server.service.server import LEASE_SECONDS

_TAKEOVER_SECONDS = 30.0
"""Longest time until the standby serves."""
_SECONDS = {KILL: 1.0, CUT: 2.0, HALF_OPEN: LEASE_SECONDS + 2.0}
"""How long each fault takes: one in which nothing comes and nothing breaks outlasts the lease."""
_SERVER_SECONDS = {KILL: 5.0, STOP: _TAKEOVER_SECONDS}
"""How long a server is away: who is killed is followed at once, and who is stopped later."""
_JOB_SECONDS = 300.0
_GOES_ON = ("queued", "running", "paused")
"""States of a job that has not ended."""
_POLL_SECONDS = 0.05


@dataclasses.dataclass(kw_only=True)
class NetworkReport:
    """What a sweep found."""

    faults: list[dict[str, object]] = dataclasses.field(default_factory=list)
    """Faults that met a running job: kind of round, fault, target, attempts that failed, and of a
    server the seconds until the other one served."""
    models_from_mirror: int = 0
    """Models that devices got from the mirror; none if models are too small for one."""
    why_not_from_mirror: str = ""
    """Why none was, as a clause."""
    same_models: int = 0
    """Jobs with the same SHA-256 as the one of their kind without faults."""
    not_compared: int = 0
    """Jobs whose model timing or the devices in a round decide."""
    not_reached: int = 0
    """Jobs that had ended before the fault."""
    not_tested: int = 0
    """Faults of the mirror in rounds of kinds in which nobody gets a model from it."""
    violations: list[str] = dataclasses.field(default_factory=list)

    def summary(self) -> str:
        """The figures in one line."""
        parts = [
            f"{counted(len(self.faults), 'fault')} met a running job",
            f"{counted(self.same_models, 'job')} ended with the model of one without faults",
        ]
        if self.not_compared:
            parts.append(
                f"{counted(self.not_compared, 'job')} could not be compared, as timing or the "
                "devices in a round decide the model"
            )
        if self.not_reached:
            parts.append(f"{counted(self.not_reached, 'fault')} came too late")
        if self.not_tested:
            faults = counted(self.not_tested, "fault")
            were = "was" if self.not_tested == 1 else "were"
            parts.append(f"{faults} of the mirror {were} not tested: nobody got a model from it")
        models = (
            counted(self.models_from_mirror, "model") if self.models_from_mirror else "no model"
        )
        parts.append(f"{models} came from the mirror{self.why_not_from_mirror}")
        parts.append(counted(len(self.violations), "violation"))
        return "; ".join(parts)


class NetworkSweep:
    """Runs a job once for each fault, in one deployment with aggregators."""

    def __init__(
        self,
        deployment: ChaosDeployment,
        say: Callable[[str], None],
        *,
        seed: int,
        faults: Sequence[NetworkFault],
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
        self._mirrored: set[str] = set()
        """Kinds of rounds in which devices get models from the mirror."""
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
                if fault.kind not in self._references and not await self._run_reference(fault.kind):
                    continue
                if fault.target == MIRROR and fault.kind not in self._mirrored:
                    self.report.not_tested += 1
                    self._say(f"{fault}  not tested: nobody gets a model from the mirror")
                    continue
                await self._disturb(fault)
        finally:
            self.report.models_from_mirror = self.deployment.models_from_mirror
            problems = await self.deployment.stop()
        self._check_mirror()
        for violation in [*problems, *await asyncio.to_thread(self._checker.check_end)]:
            self._violation(violation)
        return self.report

    def _check_mirror(self) -> None:
        if self.report.models_from_mirror or not self._references:
            return
        size = max(self._checker.model_bytes(id_) for id_, _ in self._references.values())
        if size < LEAST_BYTES:
            self.report.why_not_from_mirror = f", as models have less than {LEAST_BYTES >> 10} KiB"
        else:
            self._violation("no device got a model from the mirror")

    async def _run_reference(self, kind: str) -> bool:
        from_mirror = self.deployment.models_from_mirror
        id_ = await self._submit(kind)
        await self._until_attempts(id_, 2)  # in the first one devices open the task, for a while
        begin = time.monotonic()
        finished = await self._finished(id_)
        if finished:
            seconds = (time.monotonic() - begin) / max(1, self.deployment.job.rounds - 1)
            self._references[kind] = (id_, seconds)
            if self.deployment.models_from_mirror > from_mirror:
                self._mirrored.add(kind)
            await self._check(f"{kind} without faults")
        else:
            self._violation(f"{kind}: a job without faults did not finish")
        return finished

    async def _disturb(self, fault: NetworkFault) -> None:
        reference, round_seconds = self._references[fault.kind]
        id_ = await self._submit(fault.kind)
        # Half of the faults are as early in an attempt as can be, others anywhere in it.
        attempt = self._draw.randint(1, max(1, self.deployment.job.rounds - 1))
        is_met = await self._until_attempts(id_, attempt)
        await asyncio.sleep(self._draw.choice((0.0, self._draw.random())) * round_seconds)
        is_met = is_met and self.deployment.jobs()[id_][0] == "running"
        taken_over = await self._apply(fault)
        finished = await self._finished(id_)
        await self._check(str(fault))
        failed = self._checker.attempts.get(id_, 0) - len(self._checker.rounds.get(id_, ()))
        said = f"{fault}  {failed} failed attempts"
        if is_met:
            met = {**dataclasses.asdict(fault), "failed_attempts": failed}
            if taken_over is not None:
                met["taken_over"] = round(taken_over, 1)
                said += f", another server after {taken_over:.1f} s"
            self.report.faults.append(met)
        else:
            self.report.not_reached += 1
            said = f"{fault}  came too late"
        self._say(said)
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
        if fault.target == MIRROR:
            await self._restart_devices()

    async def _restart_devices(self) -> None:
        """Have devices forget that the mirror failed, which they then leave alone for long."""
        names = device_names(self.deployment.devices)
        injector = FaultInjector(self.deployment, lambda *_: None)
        await injector.run([_now(KILL, name, _SECONDS[KILL]) for name in names])

    async def _apply(self, fault: NetworkFault) -> float | None:
        """Carry a fault out; returns the seconds until another server served, if it was one's."""
        injector = FaultInjector(self.deployment, lambda *_: None)
        if fault.target != SERVER:
            await injector.run([_now(fault.what, fault.target, _SECONDS[fault.what])])
            return None
        target = self.deployment.serving()
        if target is None:
            return None
        process = self.deployment.processes[target]
        pid = process.pid
        begin = time.monotonic()
        seconds = _SERVER_SECONDS[fault.what]
        applied = asyncio.create_task(injector.run([_now(fault.what, target, seconds)]))
        if fault.what == STOP:
            self.deployment.stopped = target
        if not await _until(lambda: self.deployment.serving() not in (None, target)):
            self._violation(f"{fault}: no other server within {_TAKEOVER_SECONDS:g} s")
        taken_over = time.monotonic() - begin
        await applied
        # One that was stopped ends when it finds that another server has its place.
        if not await _until(lambda: process.pid != pid):
            self._violation(f"{fault}: {target} goes on after another server has taken over")
        self.deployment.stopped = ""
        return taken_over

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


def _now(what: str, target: str, seconds: float) -> Fault:
    return Fault(at=0.0, kind=what, target=target, seconds=seconds)


async def _until(done: Callable[[], bool]) -> bool:
    """Wait for what the standby is to do; whether it comes in time."""
    deadline = time.monotonic() + _TAKEOVER_SECONDS
    while not done():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(_POLL_SECONDS)
    return True
