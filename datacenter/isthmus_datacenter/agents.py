"""Agents as the group sees them: one on this machine, or one on each node of a cluster.

On several nodes nobody is started by the group. A node runs `serve_node`, dials the control store
and waits there for a generation to be published; when a rank on any node is lost the whole
generation is retired, and the next one is a new start of all. Restarts that each node counts for
itself would not agree on which attempt is meant.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from isthmus_datacenter.agent import AgentSettings
from isthmus_datacenter.control import Control
from isthmus_datacenter.logs import last_words

_AGENT = "from isthmus_datacenter.agent import main; main()"
"""Not `-m`: every rank would run that module again, to have what was defined in it."""
_LOOK_SECONDS = 0.2
_REDIAL_SECONDS = 1.0


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

    def __init__(self, settings: AgentSettings) -> None:
        logs = Path(settings.logs)
        logs.mkdir(parents=True, exist_ok=True)
        self._log = logs / f"agent-{settings.generation}.log"
        environment = {
            **os.environ,
            "FLWR_TELEMETRY_ENABLED": "0",
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        }
        if settings.nodes == 1:
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _AGENT, settings.to_json()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )

    @property
    def pid(self) -> int:
        """The agent's process."""
        return self._process.pid

    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def end(self) -> None:
        """Kill its session: the agent, the fork server and all ranks."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

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
    done = 0
    while True:
        agent = None
        try:
            control = Control.connect(host, port)
            while True:
                if leaving():
                    control.ask_to_leave()
                generation = control.newest()
                if generation is not None and generation != done:
                    settings = AgentSettings.from_json(control.published(generation))
                    agent = LocalAgent(settings)
                    _until_over(agent, control, generation, leaving)
                    agent.end()
                    control.declare_over(generation)
                    done = generation
                elif leaving():
                    return
                time.sleep(_LOOK_SECONDS)
        except dist.DistError:
            # No service, not yet or not any more: ranks without one are of no use.
            if agent is not None:
                agent.end()
            if leaving():
                return
            time.sleep(_REDIAL_SECONDS)


def _until_over(
    agent: LocalAgent, control: Control, generation: int, leaving: Callable[[], bool]
) -> None:
    told = False
    while not agent.ended() and not control.is_retired(generation):
        if leaving() and not told:
            control.ask_to_leave()
            told = True
        time.sleep(_LOOK_SECONDS)
