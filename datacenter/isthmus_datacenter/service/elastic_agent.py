"""The agent process: torchrun's elastic engine, made to say in the control store what it sees.

Agents meet in the service's store, so nothing else listens; and ranks form their process groups
there too, under keys of their attempt, since ranks that read a dead attempt's addresses hang.

Ranks are forked from the agent, which has everything imported and no more threads than the one
that keeps its place in the rendezvous. It is a session of its own, so that ending its process
group ends everything below it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed.elastic.rendezvous.registry as rendezvous_registry
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous import RendezvousParameters

from isthmus.system.process import die_with_parent
from isthmus_datacenter.service import rank
from isthmus_datacenter.service.agent_settings import AgentSettings
from isthmus_datacenter.service.control_store import Attempt, Control, Death
from isthmus_datacenter.service.logs import last_words

MONITOR_SECONDS = 0.1
"""How often the ranks are looked at."""


def main(settings: AgentSettings, environment: Mapping[str, str], log: Path) -> None:
    """Entry point of the process: run until the ranks have failed too often, or it is ended."""
    os.setsid()
    die_with_parent()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True
    )
    run(settings)


def run(settings: AgentSettings) -> None:
    """Start the ranks, and again whenever one dies, until that happened too often."""
    # Otherwise torch starts one more store, on all interfaces, for ranks that need it. Ours do not.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    local = settings.host if settings.nodes == 1 else None  # its own name, on a node of several
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=f"{settings.host}:{settings.port}",
        run_id=f"generation-{settings.generation}",
        min_nodes=settings.nodes,
        max_nodes=settings.nodes,
        local_addr=local,
        is_host=False,
    )
    given = rank.Settings(
        host=settings.host,
        port=settings.port,
        generation=settings.generation,
        participant=settings.participant,
        state=settings.state,
    )
    handler = rendezvous_registry.get_rendezvous_handler(parameters)
    try:
        _ReportingAgent(
            settings,
            WorkerSpec(
                role="rank",
                local_world_size=settings.ranks,
                entrypoint=rank.main,
                args=(given.to_json(),),
                rdzv_handler=handler,
                max_restarts=settings.restarts,
                monitor_interval=MONITOR_SECONDS,
                local_addr=local,
            ),
            DefaultLogsSpecs(log_dir=settings.logs, redirects=Std.ALL),
        ).run()
    finally:
        handler.shutdown()


class _ReportingAgent(LocalElasticAgent):
    """The local elastic agent, through the two methods its documentation lets one override."""

    def __init__(self, settings: AgentSettings, spec: WorkerSpec, logs: DefaultLogsSpecs) -> None:
        super().__init__(spec, logs_specs=logs, start_method="fork")
        self._control = Control.connect(settings.host, settings.port)
        self._generation = settings.generation
        self._attempt = Attempt(settings.generation, 0)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        restart = worker_group.spec.max_restarts - self._remaining_restarts
        self._attempt = Attempt(self._generation, restart)
        self._control.begin(self._attempt)
        started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            rank, failure = min(result.failures.items())
            assert self._pcontext is not None
            words = last_words(Path(self._pcontext.stderrs[failure.local_rank]))
            death = Death(rank=rank, exit_code=failure.exitcode, last_words=words)
            self._control.report_death(self._attempt, death)
        return result
