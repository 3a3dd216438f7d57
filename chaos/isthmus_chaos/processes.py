"""Processes that are started again whenever they end, as a service manager does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from isthmus_chaos.control_block import ControlBlock
from isthmus_server.runs.local.fork_server import ParticipantForkServer, Program

_RESTART_SECONDS = 1.0
_MAX_EXITS = 5
_EXIT_WINDOW = 60.0
_REFUSED = 1
"""The exit code of what needs a person; a service manager starts nothing again after it."""
_TERM_SECONDS = 45.0
"""Time for a process to end after SIGTERM."""


class SupervisedProcess:
    """One process of the deployment: `isthmus ARGUMENTS` with its control block and log."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        folder: Path,
        control: Path,
        log: Path,
        fork_server: ParticipantForkServer,
    ) -> None:
        """`folder` holds the files whose writes can fail."""
        self.name = name
        self.folder = folder
        self.control = ControlBlock(control)
        self.log = log
        self.exits: list[str] = []
        """Ends of the process that nobody caused, each with its last line of output."""
        self.failed = ""
        """Why it is not started again; empty while it is."""
        self.restart_seconds = _RESTART_SECONDS
        self._arguments = [str(control), str(folder), *arguments]
        self._fork_server = fork_server
        self._program: Program | None = None
        self._pause: float | None = None
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the process, and again whenever it ends."""
        self._task = asyncio.create_task(self._supervise())

    @property
    def pid(self) -> int | None:
        """The running process; None between an end and the next start."""
        return None if self._program is None else self._program.pid

    def kill(self, pause: float) -> bool:
        """Kill the process, and start it again after a pause; False if it is not running."""
        if self._program is None:
            return False
        self._pause = pause
        os.kill(self._program.pid, signal.SIGKILL)
        return True

    def descendant(self, index: int) -> int | None:
        """One of the processes that the process's children started; None if there is none."""
        leaves = [] if self._program is None else _leaves(self._program.pid)
        return leaves[index % len(leaves)] if leaves else None

    async def stop(self) -> str:
        """End the process with SIGTERM; returns a sentence if it had to be killed."""
        self._stopping = True
        problem = ""
        if self._program is not None:
            self._program.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(_TERM_SECONDS):
                    await asyncio.shield(self._program.ended)
            except TimeoutError:
                self._program.send_signal(signal.SIGKILL)
                problem = f"{self.name} did not end within {_TERM_SECONDS:.0f} s of SIGTERM"
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        return problem

    async def _supervise(self) -> None:
        ends: list[float] = []
        while not self._stopping:
            self._program = await self._fork_server.start(self._arguments, self.log)
            code = await asyncio.shield(self._program.ended)
            self._program = None
            if self._stopping:
                return
            if self._pause is None and code != -signal.SIGKILL:
                self.exits.append(f"ended with status {code}: {_last_line(self.log)}")
                if code == _REFUSED:
                    self.failed = self.exits[-1]
                    return
                now = time.monotonic()
                ends = [end for end in ends if now - end < _EXIT_WINDOW] + [now]
                if len(ends) >= _MAX_EXITS and not self.control.disk:
                    self.failed = f"ended {len(ends)} times within {_EXIT_WINDOW:.0f} s"
                    return
            pause = self.restart_seconds if self._pause is None else self._pause
            self._pause = None
            await asyncio.sleep(pause)


def _leaves(root: int) -> list[int]:
    """The processes without children that are at least two generations below a process."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    leaves = []
    generation = [root]
    depth = 0
    while generation:
        leaves += [pid for pid in generation if depth > 1 and pid not in children]
        generation = [child for pid in generation for child in children.get(pid, [])]
        depth += 1
    return sorted(leaves)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1] if lines else "it printed nothing"
