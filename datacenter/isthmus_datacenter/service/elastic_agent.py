"""The agent process: torchrun's elastic agent, which also reports to the control store.

Agents meet in the service's store, so that no other port is opened. Ranks form their process
groups there too, under keys of their incarnation, since ranks that read the addresses of dead
ranks hang.

Ranks are forked from the agent, which has everything imported and no threads. The agent leads a
session, so that killing its process group ends everything below it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from isthmus_datacenter.messages import Incarnation, RankFailure
from isthmus_datacenter.service import rank
from isthmus_datacenter.service.agent_settings import AgentSettings
from isthmus_datacenter.service.control_store import ControlStore
from isthmus_datacenter.service.logs import abort_reason, last_line

MONITOR_SECONDS = 0.1
"""Interval of the checks whether ranks have ended."""


def main(settings: AgentSettings, environment: Mapping[str, str]) -> None:
    """Run in a process of its own until the ranks have failed too often, or it is killed."""
    os.environ.update(environment)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True
    )
    run(settings)


def run(settings: AgentSettings) -> None:
    """Start the ranks, and restart them when one dies, at most `settings.restarts` times."""
    # On a cluster, None makes torch use the name of the node.
    local_address = settings.host if settings.nodes == 1 else None
    rank_settings = rank.RankSettings(
        host=settings.host,
        port=settings.port,
        generation=settings.generation,
        participant=settings.participant,
        state=settings.state,
        key=settings.key,
    )
    control = ControlStore.connect(bytes.fromhex(settings.key), settings.host, settings.port)
    _ReportingAgent(
        settings,
        control,
        WorkerSpec(
            role="rank",
            local_world_size=settings.ranks,
            entrypoint=rank.main,
            args=(rank_settings.to_json(),),
            rdzv_handler=_Rendezvous(settings, control),
            max_restarts=settings.restarts,
            monitor_interval=MONITOR_SECONDS,
            local_addr=local_address,
        ),
        DefaultLogsSpecs(log_dir=settings.logs, redirects=Std.ALL),
    ).run()


class _Rendezvous(RendezvousHandler):
    """How the agents of a generation meet: each claims a number, once, in the control store.

    PyTorch's own rendezvous keeps its state in the store as a pickle, which executes what anyone
    writes there; and a generation has as many agents as nodes, none of which is replaced.
    """

    def __init__(self, settings: AgentSettings, control: ControlStore) -> None:
        self._settings = settings
        self._store = control.node_store(settings.generation)
        self._number = control.claim_node(settings.generation, settings.nodes)

    def get_backend(self) -> str:
        return "isthmus"

    @property
    def use_agent_store(self) -> bool:
        return False  # the ranks meet through a connection of their own

    def next_rendezvous(self) -> RendezvousInfo:
        where = RendezvousStoreInfo(self._settings.host, self._settings.port)
        return RendezvousInfo(self._store, self._number, self._settings.nodes, where)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody waits for agents that have ended: the service retires the generation."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return f"generation-{self._settings.generation}"

    def shutdown(self) -> bool:
        return True


class _ReportingAgent(LocalElasticAgent):
    """Reports starts and failures of ranks, by overriding two documented methods."""

    def __init__(
        self,
        settings: AgentSettings,
        control: ControlStore,
        spec: WorkerSpec,
        logs: DefaultLogsSpecs,
    ) -> None:
        super().__init__(spec, logs_specs=logs, start_method="fork")
        self._control = control
        self._generation = settings.generation
        self._incarnation = Incarnation(settings.generation, 0)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        restart = worker_group.spec.max_restarts - self._remaining_restarts
        self._incarnation = Incarnation(self._generation, restart)
        # Before the ranks start: they register under it.
        self._control.begin_incarnation(self._incarnation)
        workers: dict[int, Any] = super()._start_workers(worker_group)
        return workers

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            # One is enough for the report; the lowest, so that it is the same one in each.
            rank, failure = min(result.failures.items())
            assert self._pcontext is not None
            stderr = Path(self._pcontext.stderrs[failure.local_rank])
            # Only native code can say the reason of a signal, before the stacks of Python.
            line = abort_reason(stderr) if failure.exitcode < 0 else last_line(stderr)
            self._control.report_rank_failure(
                self._incarnation,
                RankFailure(rank=rank, exit_code=failure.exitcode, last_line=line),
            )
        return result
