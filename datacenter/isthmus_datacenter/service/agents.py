"""The agents of one generation: one on this machine, or one on each node of a cluster.

On a cluster the service starts no agents. Each node runs `serve_node`, connects to the control
store and waits there for a generation to be published. When a rank on any node is lost the whole
generation is retired, and the next one starts all ranks anew: restarts counted by each node
separately would not agree on the incarnation.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from isthmus.system.private_files import make_state_directory
from isthmus.transport.backoff import Backoff
from isthmus_datacenter.service.agent_settings import AgentSettings
from isthmus_datacenter.service.control_store import ControlStore
from isthmus_datacenter.service.flight_recorder import recorder_environment
from isthmus_datacenter.service.fork_server import AgentForkServer
from isthmus_datacenter.service.logs import delete_old_logs, last_line
from isthmus_datacenter.service.signed_store import ForgedValueError, read_key_file

MAX_RECONNECT_SECONDS = 1.0
"""Longest pause of a node between two attempts to connect to the control store."""
_POLL_SECONDS = 0.2
"""Interval of reading the control store, which has no notifications."""

log = logging.getLogger(__name__)


class Agents(Protocol):
    """The agents of one generation."""

    def ended(self) -> bool:
        """Whether an agent has ended."""
        ...

    def end(self) -> None:
        """End the agents with all their ranks."""
        ...

    def last_line(self) -> str:
        """The last useful line of an agent's log."""
        ...


class LocalAgent:
    """The agent process of this machine; it and its ranks end with this process."""

    def __init__(self, settings: AgentSettings, fork_server: AgentForkServer) -> None:
        logs = Path(settings.logs)
        make_state_directory(logs)
        self._log = logs / f"agent-{settings.generation}.log"
        # Another start of the service may have left the log of a generation with this number.
        self._log.unlink(missing_ok=True)
        delete_old_logs(logs, starting_generation=settings.generation)
        environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0"}
        environment |= recorder_environment(os.environ)
        if settings.nodes == 1:
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._process = fork_server.start(settings, environment, self._log)

    def ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.wait(0) is not None

    def end(self) -> None:
        """Kill the agent and all its ranks."""
        self._process.end()

    def last_line(self) -> str:
        """The last useful line of its log."""
        return last_line(self._log)


class RemoteAgents:
    """The agents of all nodes, which connect to the control store themselves."""

    def __init__(self, settings: AgentSettings) -> None:
        # A separate connection: another thread than the group's uses it.
        self._control = ControlStore.connect(
            bytes.fromhex(settings.key), settings.host, settings.port
        )
        self._generation = settings.generation
        # Without the key, which nodes have from elsewhere: anyone can read the store.
        published = dataclasses.replace(settings, key="")
        self._control.publish_generation(settings.generation, published.to_json())

    def ended(self) -> bool:
        """Whether some node's agent has ended: the others cannot go on without it."""
        return self._control.has_agent_ended(self._generation)

    def end(self) -> None:
        """Make every node end this generation."""
        self._control.retire_generation(self._generation)

    def last_line(self) -> str:
        """A reference to the nodes, which keep the logs."""
        return "see the logs of the nodes"


def serve_node(host: str, port: int, key_file: Path, leaving: Callable[[], bool]) -> None:
    """Run this node's agent for every generation that the service at `host:port` publishes.

    When `leaving` returns true, this node asks the service to leave. The service then ends its
    round in good order and retires the generation, after which this function returns.

    Args:
        host: of the service.
        port: of its control store.
        key_file: the key of the control store, which the service makes anew when it starts.
        leaving: whether this node is about to be taken.

    Raises:
        UserError: the file is no key, or others can read it.
    """
    backoff = Backoff(MAX_RECONNECT_SECONDS)
    with AgentForkServer("fork") as fork_server:
        node = _Node(fork_server, leaving)
        while not leaving():
            connected_at = math.inf
            try:
                key = read_key_file(key_file)
                control = ControlStore.connect(key, host, port)
                connected_at = time.monotonic()
                node.serve(control)
            except (dist.DistError, FileNotFoundError) as error:
                # The service does not run: ranks without a service are of no use.
                if backoff.broke(open_seconds=time.monotonic() - connected_at):
                    if isinstance(error, FileNotFoundError):  # nothing has been asked yet
                        log.info(
                            "no key %s; this node waits until the service at %s:%d has made it, "
                            "with the same --state",
                            key_file,
                            host,
                            port,
                        )
                    else:
                        log.info("no service at %s:%d; this node waits for it", host, port)
                time.sleep(backoff.pause())  # a connection is the only test for the service
            except ForgedValueError as forged:
                # The file may be that of the service before: a shared file system can show it for
                # some seconds.
                if backoff.broke(open_seconds=0.0):
                    log.warning("%s; this node reads %s again", forged, key_file)
                time.sleep(backoff.pause())  # as before: nothing tells of a new file


class _Node:
    """One machine of a cluster."""

    def __init__(self, fork_server: AgentForkServer, leaving: Callable[[], bool]) -> None:
        self._fork_server = fork_server
        self._leaving = leaving
        self._key = b""
        self._last_generation = 0
        """The last generation that ran here, of the service with that key."""

    def serve(self, control: ControlStore) -> None:
        """Run agents until this node leaves."""
        if control.key != self._key:
            self._key = control.key
            self._last_generation = 0
        while True:
            if self._leaving():
                control.request_leave()
            generation = control.newest_generation()
            # An earlier one is what somebody has read before, and written again.
            if generation is not None and generation > self._last_generation:
                self._run(control, generation)
            elif self._leaving():
                return
            time.sleep(_POLL_SECONDS)  # the store does not notify of a generation

    def _run(self, control: ControlStore, generation: int) -> None:
        published = AgentSettings.from_json(control.generation_settings(generation))
        settings = dataclasses.replace(published, key=control.key.hex())
        agent = LocalAgent(settings, self._fork_server)
        leave_requested = False
        try:
            while not agent.ended() and not control.is_retired(generation):
                # The service decides when: it ends its round in good order and then retires the
                # generation.
                if self._leaving() and not leave_requested:
                    control.request_leave()
                    leave_requested = True
                time.sleep(_POLL_SECONDS)  # nor of its end
        finally:
            agent.end()
        # After the agent has ended, as the service then starts all ranks anew.
        control.report_agent_ended(generation)
        self._last_generation = generation
