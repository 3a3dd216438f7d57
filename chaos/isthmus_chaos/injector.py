"""Carries out a plan of faults on a deployment."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence

from isthmus_chaos import control_block, plan
from isthmus_chaos.deployment import ChaosDeployment
from isthmus_chaos.plan import RANK, SERVER, Fault
from isthmus_chaos.proxy import DisturbedLink

_DISK = {
    plan.FULL_DISK: control_block.FULL_DISK,
    plan.IO_ERROR: control_block.IO_ERROR,
    plan.TORN_WRITE: control_block.TORN_WRITE,
}

Ended = Callable[[Fault, str], None]
"""Called when a fault has ended, with a note on its effect."""


class FaultInjector:
    """Applies faults at their times and takes them back."""

    def __init__(self, deployment: ChaosDeployment, ended: Ended) -> None:
        self.deployment = deployment
        self._ended = ended

    async def run(self, faults: Sequence[Fault]) -> None:
        """Apply all faults of a plan; returns when the last one has ended."""
        begin = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for fault in faults:
                await asyncio.sleep(max(0.0, begin + fault.at - time.monotonic()))
                tasks.create_task(self._apply(fault))

    async def _apply(self, fault: Fault) -> None:
        note = await {
            "process": self._disturb_process,
            "link": self._disturb_link,
            "disk": self._disturb_disk,
            "clock": self._disturb_clock,
        }[fault.part[1]](fault)
        self._ended(fault, note)

    async def _disturb_process(self, fault: Fault) -> str:
        if fault.target.endswith(RANK):
            service = self.deployment.processes[fault.target.removesuffix(RANK)]
            pid = service.descendant(int(fault.amount))
            stop = fault.kind == plan.STOP
            if pid is None or not _signal(pid, signal.SIGSTOP if stop else signal.SIGKILL):
                return "none was running"
            await asyncio.sleep(fault.seconds)
            if stop:
                _signal(pid, signal.SIGCONT)
            return ""
        process = self.deployment.processes[fault.target]
        if fault.kind == plan.KILL:
            killed = process.kill(fault.seconds)
            await asyncio.sleep(fault.seconds)
            return "" if killed else "it was not running"
        pid = process.pid
        if pid is None or not _signal(pid, signal.SIGSTOP):
            return "it was not running"
        await asyncio.sleep(fault.seconds)
        _signal(pid, signal.SIGCONT)
        return ""

    async def _disturb_link(self, fault: Fault) -> str:
        links = self._links(fault.target)
        for link in links:
            if fault.kind == plan.CUT:
                link.cut()
            elif fault.kind == plan.RESET:
                link.reset()
            elif fault.kind == plan.HALF_OPEN:
                link.hold()
            else:
                link.delay(fault.amount)
        await asyncio.sleep(fault.seconds)
        for link in links:
            link.restore()
        return ""

    def _links(self, target: str) -> list[DisturbedLink]:
        """The link of a participant; of the server: all."""
        links = self.deployment.links
        return list(links.values()) if target == SERVER else [links[target]]

    async def _disturb_disk(self, fault: Fault) -> str:
        control = self.deployment.processes[fault.target].control
        before = control.hits
        control.disk = _DISK[fault.kind]
        await asyncio.sleep(fault.seconds)
        control.disk = control_block.NO_FAULT
        return f"{control.hits - before} calls failed"

    async def _disturb_clock(self, fault: Fault) -> str:
        control = self.deployment.processes[fault.target].control
        control.clock_offset = fault.amount
        await asyncio.sleep(fault.seconds)
        control.clock_offset = 0.0
        return ""


def _signal(pid: int, number: signal.Signals) -> bool:
    """Send a signal; False if the process has ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
