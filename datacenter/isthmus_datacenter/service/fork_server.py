"""The fork server of a datacenter, from which agents are forked in milliseconds.

Importing torch takes seconds, which is nearly all of the start of an agent or a rank. Agents are
forked from the fork server and ranks from their agent, so that each process dies with its parent,
however that one ends. The fork server ends with the process that started it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from isthmus.system.fork_server import ForkedProgram, ForkServer
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
        start = ForkServer.fork if method == "fork" else ForkServer.start_anew
        self._server = start(_run_agent, [PRELOADED_MODULE])

    def start(
        self, settings: AgentSettings, environment: Mapping[str, str], log: Path
    ) -> ForkedProgram:
        """Start an agent; its output is added to `log`. `end` kills it with all its ranks."""
        request = {"settings": settings.to_json(), "environment": dict(environment)}
        with contextlib.suppress(OSError):
            return self._server.start(request, log)
        # The fork server was killed; by now this process has threads.
        self._server.close()
        self._server = ForkServer.start_anew(_run_agent, [PRELOADED_MODULE])
        return self._server.start(request, log)

    def __enter__(self) -> AgentForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the fork server, and with it all its agents."""
        self._server.close()


def _run_agent(request: Mapping[str, Any]) -> None:
    from isthmus_datacenter.service import elastic_agent

    settings = AgentSettings.from_json(request["settings"])
    elastic_agent.main(settings, request["environment"])
