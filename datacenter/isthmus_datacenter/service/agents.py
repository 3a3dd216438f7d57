"""Agents as the group sees them: one on this machine, or one on each node of a cluster.

On several nodes nobody is started by the group. A node runs `serve_node`, dials the control store
and waits there for a generation to be published; when a rank on any node is lost the whole
generation is retired, and the next one is a new start of all. Restarts that each node counts for
itself would not agree on which attempt is meant.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from isthmus.transport.backoff import Backoff
from isthmus_datacenter.service.agent_settings import AgentSettings
from isthmus_datacenter.service.control_store import Control
from isthmus_datacenter.service.fork_server import AgentForkServer
from isthmus_datacenter.service.logs import keep_latest, last_words

_LOOK_SECONDS = 0.2
"""Between two looks at the control store, a store of PyTorch's, which tells nobody of anything."""
_REDIAL_SECONDS = 1.0

log = logging.getLogger(__name__)


class Agents(Protocol):
    """The agents of one generation."""

    def ended(self) -> bool:
        """Whether there are none any more."""
        ...

    def end(self) -> None:
        """End them with all their ranks."""
        ...

    def last_words(self) -> str:
        """Why they ended, if they said so."""
        ...


class LocalAgent:
    """The agent process of this machine; it and its ranks end with this process."""

    def __init__(self, settings: AgentSettings, template: AgentForkServer) -> None:
        logs = Path(settings.logs)
        logs.mkdir(parents=True, exist_ok=True)
        self._log = logs / f"agent-{settings.generation}.log"
        self._log.unlink(missing_ok=True)
        keep_latest(logs, beside=settings.generation)
        environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0"}
        if settings.nodes == 1:
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._process = template.start(settings, environment, self._log)

    @property
    def pid(self) -> int:
        """The agent's process; waits for it to be started."""
        return self._process.pid

    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.ended()

    def end(self) -> None:
        """Kill the agent and all ranks."""
        self._process.end()

    def last_words(self) -> str:
        """The end of its log."""
        return last_words(self._log)


class RemoteAgents:
    """The agents of all nodes, which come to the control store by themselves."""

    def __init__(self, settings: AgentSettings) -> None:
        # A connection of its own: it is used by another thread than the group's.
        self._control = Control.connect(settings.host, settings.port)
        self._generation = settings.generation
        self._control.publish(settings.generation, settings.to_json())

    def ended(self) -> bool:
        """Whether some node's agent is gone: the others cannot go on without it."""
        return self._control.is_over(self._generation)

    def end(self) -> None:
        """Ask every node to end this generation."""
        self._control.retire(self._generation)

    def last_words(self) -> str:
        """The logs are on the nodes."""
        return "see the logs of the nodes"


def serve_node(host: str, port: int, leaving: Callable[[], bool]) -> None:
    """Run this node's agent whenever the service at `host:port` wants one, for ever.

    `leaving` says whether this node was told to go: the service hears of it, finishes what it can
    and ends the generation; after that this returns.
    """
    backoff = Backoff(_REDIAL_SECONDS)
    with AgentForkServer("fork") as template:
        node = _Node(template, leaving)
        while not leaving():
            connected = math.inf
            try:
                control = Control.connect(host, port)
                connected = time.monotonic()
                node.serve(control)
            except dist.DistError:
                # No service, not yet or not any more: ranks without one are of no use.
                if backoff.broke(held=time.monotonic() - connected):
                    log.info("no service at %s:%d; this node waits for it", host, port)
                time.sleep(backoff.pause())  # nobody tells when a service is there again


class _Node:
    """One machine of several."""

    def __init__(self, template: AgentForkServer, leaving: Callable[[], bool]) -> None:
        self._template = template
        self._leaving = leaving
        self._done = 0
        """The last generation that ran here."""

    def serve(self, control: Control) -> None:
        """Run agents until this node was told to go."""
        while True:
            if self._leaving():
                control.ask_to_leave()
            generation = control.newest()
            if generation is not None and generation != self._done:
                self._run(control, generation)
            elif self._leaving():
                return
            time.sleep(_LOOK_SECONDS)  # the store tells nobody of a generation

    def _run(self, control: Control, generation: int) -> None:
        settings = AgentSettings.from_json(control.published(generation))
        agent = LocalAgent(settings, self._template)
        told = False
        try:
            while not agent.ended() and not control.is_retired(generation):
                if self._leaving() and not told:
                    control.ask_to_leave()
                    told = True
                time.sleep(_LOOK_SECONDS)  # nor of its end
        finally:
            agent.end()
        control.declare_over(generation)
        self._done = generation
