"""The simulated part of a plan: the first rounds of a job, trained to forecast the others.

`isthmus plan --trial` finds `train_trial` by the entry-point group `isthmus.plans`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from isthmus.job import Job
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.events import Event, RoundCommitted
from isthmus_simulation.devices.fleet import VirtualFleet
from isthmus_simulation.run import Simulation
from isthmus_simulation.virtual_time import VirtualTimeLoop


class Trial(Simulation):
    """A simulation that ends after some rounds of its job, which decides as if it went on."""

    last_round: int | None = None
    """The round after which it ends; None for the last one of its job."""

    def _watch(self, parts: RunParts, fleet: VirtualFleet) -> None:
        parts.events.subscribe(self._end_after_the_last)

    def _end_after_the_last(self, event: Event) -> None:
        if isinstance(event, RoundCommitted) and self._is_last(event.record.round):
            self.leave()

    def _is_last(self, round_: int) -> bool:
        """Whether it ends after a round."""
        return self.last_round is not None and round_ >= self.last_round


def train_trial(job: Job, base: Path, directory: Path, rounds: int) -> None:
    """Simulate the first rounds of a job in a new run directory, and stop.

    Args:
        job: the job, with as many rounds as it is planned for: policies plan by them.
        base: the job file's folder.
        directory: of the run, which can be read like any other.
        rounds: how many are trained, fewer if the job has fewer.

    Raises:
        UserError: the job cannot be simulated, or its training failed.
    """

    def make() -> Trial:
        trial = Trial.new(job, base, directory)
        trial.last_round = rounds
        return trial

    run_apart(make)


def run_apart(make: Callable[[], Trial]) -> None:
    """Make a trial and run it, in a thread of its own: a notebook has a loop in this one already.

    Raises:
        UserError: the job cannot be simulated, or its training failed.
    """
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(1, thread_name_prefix="trial") as apart:
        try:
            apart.submit(_run, make).result()
        finally:
            torch.set_num_threads(threads)


def _run(make: Callable[[], Trial]) -> None:
    """All of it: a store is used in the thread that has opened it."""
    trial = make()
    with (
        contextlib.suppress(asyncio.CancelledError),  # that is how a run leaves
        asyncio.Runner(loop_factory=VirtualTimeLoop) as runner,
    ):
        runner.run(trial.run())
