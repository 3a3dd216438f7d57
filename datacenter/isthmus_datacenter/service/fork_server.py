"""A process that has everything imported, from which agents are forked in milliseconds.

Importing torch takes seconds, and nearly all of an agent's start and of a rank's is that. Agents
are forked from the template and ranks from their agent, so that each dies with the one above it,
however that one ends; the template ends when its owner does.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, NoReturn

from isthmus.system.process import die_with_parent
from isthmus_datacenter.service.agent_settings import AgentSettings

IMPORTED = "isthmus_datacenter.service.elastic_agent"
"""What agents and ranks run, with everything it needs."""


class AgentForkServer:
    """Starts agents for the process that made it."""

    def __init__(self, method: Literal["fork", "forkserver"]) -> None:
        """Start it.

        `fork` costs nothing, and is for a process that has started no thread yet: no store, no
        gRPC. `forkserver` is for any other; it imports everything once more.
        """
        self._launch(method)

    def _launch(self, method: Literal["fork", "forkserver"]) -> None:
        context = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload([IMPORTED])
        self._pipe, theirs = context.Pipe()
        # A forked child has a copy of our end, which would keep the pipe from ever breaking.
        ours = self._pipe if method == "fork" else None
        self._process = context.Process(target=_serve, args=(theirs, ours))  # type: ignore[attr-defined]  # typeshed has none
        self._process.start()
        theirs.close()

    def start(self, settings: AgentSettings, environment: Mapping[str, str], log: Path) -> Running:
        """Start an agent; its output goes to `log`."""
        if not self._process.is_alive():
            self.close()
            self._launch("forkserver")  # by now there are threads
        self._pipe.send((settings, dict(environment), log))
        return Running(self._pipe)

    def __enter__(self) -> AgentForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it, and with it whatever it started."""
        self._pipe.close()
        self._process.join()


class Running:
    """An agent, as the owner of its template sees it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._pid: int | None = None
        self._handle: int | None = None
        """Becomes readable when the process ends."""

    @property
    def pid(self) -> int:
        """Its process; waits for it to be started.

        Raises:
            EOFError: the template ended before.
        """
        if self._pid is None:
            self._pid = self._pipe.recv()
            # The template waits for its agents only when it starts another one: until then the
            # number is this one's, also when it has ended.
            self._handle = os.pidfd_open(self._pid)
        return self._pid

    def ended(self) -> bool:
        """Whether it is gone."""
        try:
            if self._pid is None and self._pipe.poll():
                _ = self.pid
        except (EOFError, OSError):
            return True
        if self._pid is None:
            return False
        return self._handle is None or bool(select.select([self._handle], [], [], 0)[0])

    def end(self) -> None:
        """Kill its session: the agent and all its ranks."""
        try:
            pid = self.pid
        except (EOFError, OSError):
            return
        if self._handle is None:
            return
        for kill in (os.killpg, os.kill):  # just forked, it may not be a group's leader yet
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        select.select([self._handle], [], [])
        os.close(self._handle)
        self._handle = None


def _serve(pipe: Connection, others: Connection | None) -> NoReturn:
    """Fork an agent for every request, until the owner is gone."""
    os.setsid()  # a Ctrl-C is for the owner, which then ends us
    die_with_parent()
    if others is not None:
        others.close()
    from isthmus_datacenter.service import elastic_agent

    context = multiprocessing.get_context("fork")
    while True:
        try:
            settings, environment, log = pipe.recv()
        except EOFError:
            os._exit(0)  # without waiting for the agents, which end because of that
        agent = context.Process(target=elastic_agent.main, args=(settings, environment, log))
        agent.start()
        pipe.send(agent.pid)
