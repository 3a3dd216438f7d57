"""Choose what directs a run: the round loop, statistics in place of training, or an app."""

from __future__ import annotations

from typing import Protocol

from isthmus.job.apps import registered
from isthmus_server.budgets.populations import Populations
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.drain import Drain
from isthmus_server.rounds.measurements.statistics import StatisticsRun
from isthmus_server.rounds.roster import ParticipantRoster
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.events import EventStream
from isthmus_server.storage.records import FinalModel
from isthmus_server.storage.store import Store
from isthmus_server.transport.link import Link

RUN_LOOPS = "isthmus.run_loops"
"""Entry-point group of those that have an app direct a run, each a `MakeRunLoop`; see
`isthmus.job.apps`."""


class RunLoop(Protocol):
    """Directs a run from its beginning, or from where it stopped, to its end."""

    drain: Drain
    """Asks it to stop."""
    roster: ParticipantRoster
    """The participants of the run."""

    async def run(self) -> FinalModel | None:
        """Run to the end; returns the final model, if there is one.

        Raises:
            UserError: the run cannot continue; it is stored as failed, with the reason.
        """
        ...

    def abandon(self) -> None:
        """The run will not be resumed."""
        ...


class MakeRunLoop(Protocol):
    """Prepares a run that an app directs."""

    def __call__(
        self, store: Store, link: Link, events: EventStream, *, installed: bool
    ) -> RunLoop:
        """Prepare the run.

        Args:
            store: the run on disk.
            link: connects the participants; it may outlive the run.
            events: receives every event of the run.
            installed: whether the job's paths start at a directory of installed tasks.

        Raises:
            UserError: the job cannot be used.
        """
        ...


def run_loop(
    store: Store,
    link: Link,
    events: EventStream,
    *,
    installed: bool,
    populations: Populations | None = None,
) -> RunLoop:
    """What directs the run of `store`: an app, `StatisticsRun` or `Coordinator`.

    Raises:
        UserError: the job, its task or a checkpoint cannot be used.
    """
    if store.job.federated.server_app is not None:
        make: MakeRunLoop = registered(RUN_LOOPS, store.job.federated)
        return make(store, link, events, installed=installed)
    if store.job.statistics.collect:
        return StatisticsRun(RunParts.of(store, link, events))
    return Coordinator(RunParts.of(store, link, events, populations=populations))
