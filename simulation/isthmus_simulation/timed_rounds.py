"""The simulated part of a plan's durations: rounds of devices that train nothing.

The coordinator, its selection, over-selection and deadlines are those of a run, and a request takes
the time of the device's profile; only the updates are made up. `isthmus plan` finds `time_rounds`
by the entry-point group `isthmus.plans`.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import torch

from isthmus.job import Job, with_changes
from isthmus.wire import link_pb2
from isthmus_simulation.devices.device import MadeUpHost, VirtualHost
from isthmus_simulation.devices.fleet import VirtualFleet
from isthmus_simulation.devices.profiles import DeviceProfile
from isthmus_simulation.trial import Trial, run_apart

_OTHER_DRAWS = 2**31
"""Added to the seed of the job: other devices are invited and lost than in the job's own rounds."""
_UPDATE = 0.01
"""Each element of an update, over the range of the job."""
_CONNECTED = 4
"""Connected devices for each that is invited, of a population that is not connected as a whole."""
_ROUNDS = 1000
"""Rounds after which updates are twice as large."""


class UntrainedRounds(Trial):
    """Rounds on the fleet of a job, whose devices train nothing, in the time of their profiles."""

    fleet_seed: int
    """Seed of the job that is planned, with which its devices are drawn."""
    deadline: float
    """When it ends, after the running round, on `time.monotonic()`."""

    def _profile(self, index: int) -> DeviceProfile:
        job = self.store.job
        drawn = DeviceProfile.drawn(job.simulation, self.fleet_seed, index)
        return dataclasses.replace(drawn, seed=job.seed)

    def _host(self, fleet: VirtualFleet, index: int) -> VirtualHost:
        return MadeUpHost(fleet, fleet.participant(index), self._update)

    def _update(self, work: link_pb2.TrainLocal, update: torch.Tensor) -> None:
        """A small update, the same from each device.

        It leads to a model that no other round has had: with secure sums, devices that have
        unmasked one for a model take part for it again only together.
        """
        size = _UPDATE * (self.store.job.federated.clip or 1.0) * (1 + work.round / _ROUNDS)
        update.fill_(size if work.round % 2 else -size)

    def _is_last(self, round_: int) -> bool:
        return time.monotonic() >= self.deadline or super()._is_last(round_)


def time_rounds(
    job: Job, base: Path, directory: Path, rounds: int, seconds: float, draws: int = 0
) -> None:
    """Simulate federated rounds in a new run directory, of devices that train nothing, and stop.

    The devices are those of the job's seed, and are invited and lost as in other rounds than its
    own. Nothing is evaluated.

    Args:
        job: the job, under any policy.
        base: the job file's folder.
        directory: of the run, which can be read like any other.
        rounds: how many there are at most; not more than those of the job if the first ones differ
            from later ones.
        seconds: on this machine after which no further one begins.
        draws: which others than its own; the same number gives the same rounds.

    Raises:
        UserError: the job cannot be simulated, or its rounds fail.
    """
    deadline = time.monotonic() + seconds
    if not _has_rounds_alike(job):
        rounds = min(rounds, job.rounds)

    def make() -> UntrainedRounds:
        timed = UntrainedRounds.new(_timed(job, rounds, draws), base, directory)
        timed.last_round = rounds
        timed.fleet_seed = job.seed
        timed.deadline = deadline
        return timed

    run_apart(make)


def _timed(job: Job, rounds: int, draws: int) -> Job:
    """The job with federated rounds alone, of other draws, without evaluations and earlier ends.

    Raises:
        JobError: it cannot have such rounds.
    """
    changes: dict[str, object] = {
        "seed": (job.seed + _OTHER_DRAWS + draws) % 2**32,
        "strategy.policy": "federated",
        "strategy.settings": {},
        "strategy.schedule": [],
        "strategy.objective": "quality",  # any other needs a target
        "strategy.target_metric": None,
        "datacenter.ranks": 0,
        "budget": None,
        "seconds": None,
        "device_bytes": None,
        "evaluation.every": rounds + 1,
        "evaluation.devices": 0,
        "evaluation.same_devices": False,
        "evaluation.per_device": False,
        "evaluation.keep_best": None,
        "evaluation.patience": None,
        "evaluation.deliver": "last",
        "federated.fine_tune_steps": 0,  # before an evaluation
        "federated.device": "cpu",
        "federated.compile": False,
        "simulation.training": "one-by-one",
        "simulation.processes": 1,
    }
    if job.exchange.buffers == "recompute":  # a datacenter does; devices send as few with these
        changes["exchange.buffers"] = "frozen"
    if job.privacy is None:  # which limits the rounds of a device, and has noise for so many
        changes["rounds"] = rounds + 1  # the last round of a job is evaluated
    population = job.simulation.population(job.federated)
    connected = job.simulation.connections(population, job.federated.invited)
    if connected < population and _has_rounds_alike(job):
        # Others are connected in each round: with fewer of them the invited are drawn alike.
        changes["simulation.connected"] = min(connected, _CONNECTED * job.federated.invited)
    return with_changes(job, changes)


def _has_rounds_alike(job: Job) -> bool:
    """Whether chance alone decides who is invited, in the last round as in the first one.

    Selection by utility explores at first, hours depend on when a run begins, and devices that may
    take part only so often, or have noise for so many rounds, are missing in the end.
    """
    federated = job.federated
    is_limited = federated.participation or federated.privacy or job.privacy
    has_hours = federated.hours or job.strategy.windows
    return federated.selection == "uniform" and not is_limited and not has_hours
