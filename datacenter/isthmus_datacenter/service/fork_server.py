"""A process with all imports done, from which agents are forked in milliseconds.

Importing torch takes seconds, which is nearly all of the start of an agent or a rank. Agents are
forked from the fork server and ranks from their agent, so that each process dies with its parent,
however that one ends. The fork server ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import select
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal, NoReturn

from isthmus.system.process import die_with_parent
from isthmus_datacenter.service.agent_settings import AgentSettings

PRELOADED_MODULE = "isthmus_datacenter.service.elastic_agent"
"""Imports everything that agents and ranks need."""


class AgentForkServer:
    """Starts agents for the process that created it."""

    def __init__(self, method: Literal["fork", "forkserver"]) -> None:
        """Start the fork server.

        `fork` costs nothing, but is only safe in a process that has not started threads yet: no
        store, no gRPC. `forkserver` is for any other process; it imports everything once more.
        """
        # Now: with `fork` it must be before the first thread.
        self._process, self._pipe = _start_server(method)

    def start(
        self, settings: AgentSettings, environment: Mapping[str, str], log: Path
    ) -> AgentProcess:
        """Start an agent; its output goes to `log`."""
        if not self._process.is_alive():
            self.close()
            self._process, self._pipe = _start_server("forkserver")  # by now there are threads
        self._pipe.send((settings, dict(environment), log))
        return AgentProcess(self._pipe)

    def __enter__(self) -> AgentForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the fork server, and with it all its agents."""
        self._pipe.close()
        self._process.join()


class AgentProcess:
    """An agent's process, for the process that owns the fork server."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._pid: int | None = None
        self._handle: int | None = None
        """Becomes readable when the process ends."""

    @property
    def pid(self) -> int:
        """Process id of the fork; waits until it is started.

        Raises:
            EOFError: the fork server ended before.
        """
        if self._pid is None:
            self._pid = self._pipe.recv()
            # The fork server reaps its agents only when it starts another one: until then the id
            # remains this agent's, also after it has ended.
            self._handle = os.pidfd_open(self._pid)
        return self._pid

    def ended(self) -> bool:
        """Whether the process has ended."""
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
        for kill in (os.killpg, os.kill):  # just forked, it may not lead a process group yet
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        # Waited for: the next agent's ranks would meet these at the disk and the devices.
        select.select([self._handle], [], [])
        os.close(self._handle)
        self._handle = None


def _start_server(method: Literal["fork", "forkserver"]) -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload([PRELOADED_MODULE])
    owner_end, server_end = context.Pipe()
    # A forked child has a copy of the owner's end, which would keep the pipe from ever breaking.
    inherited_end = owner_end if method == "fork" else None
    process: BaseProcess = context.Process(  # type: ignore[attr-defined]  # typeshed has none
        target=_serve, args=(server_end, inherited_end)
    )
    process.start()
    # Otherwise this process would keep the pipe open when the fork server has ended.
    server_end.close()
    return process, owner_end


def _serve(pipe: Connection, inherited_end: Connection | None) -> NoReturn:
    """Fork an agent for every request, until the owner has ended."""
    os.setsid()  # Ctrl-C is for the owner, which then ends this process
    die_with_parent()
    if inherited_end is not None:
        inherited_end.close()
    from isthmus_datacenter.service import elastic_agent

    gc.freeze()  # a collection would write to memory that all forks share until then
    context = multiprocessing.get_context("fork")
    while True:
        try:
            settings, environment, log = pipe.recv()
        except EOFError:
            os._exit(0)  # without waiting for the agents, which end with this process
        agent = context.Process(target=elastic_agent.main, args=(settings, environment, log))
        agent.start()
        pipe.send(agent.pid)
