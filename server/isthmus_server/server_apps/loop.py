"""Choose what directs a run: the round loop, a ServerApp, or statistics in place of training."""

from __future__ import annotations

from isthmus_server.budgets.populations import Populations
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.measurements.statistics import StatisticsRun
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.server_apps.run import ServerAppRun
from isthmus_server.storage.events import EventStream
from isthmus_server.storage.store import Store
from isthmus_server.transport.link import Link

RunLoop = Coordinator | StatisticsRun | ServerAppRun


def run_loop(
    store: Store,
    link: Link,
    events: EventStream,
    *,
    installed: bool,
    populations: Populations | None = None,
) -> RunLoop:
    """What runs the job of `store` to its end; see each of `RunLoop`.

    Raises:
        UserError: the job, its task or a checkpoint cannot be used.
    """
    flower = store.job.federated.flower
    if flower is not None and flower.server_app is not None:
        return ServerAppRun(store, link, events, installed=installed)
    if store.job.statistics.collect:
        return StatisticsRun(RunParts.of(store, link, events))
    return Coordinator(RunParts.of(store, link, events, populations=populations))
