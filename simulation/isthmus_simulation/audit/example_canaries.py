"""Canary examples in a simulated run, for a job whose devices protect their examples.

All devices have the data of one, so that the promise is the same for each; nine tenths of the
examples of each are canaries. Sampling, gradients, clipping, noise and accounts are those of a
device. The auditor sees the sum of each step with its noise, and guesses the coin of each canary
from the likelihood of the sums with and without it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from isthmus.errors import UserError
from isthmus.job import Job, with_changes
from isthmus.task import Participant, Task, user_code
from isthmus.task.scoring import count_examples
from isthmus.wire import link_pb2
from isthmus_privacy.dp_sgd.device_examples import DeviceExamplesPlan
from isthmus_privacy.dp_sgd.isolation import EXAMPLES
from isthmus_simulation.audit.canary_task import KEY, SOURCE, CanaryTask, canaries_among
from isthmus_simulation.audit.device_canaries import OVER, Guesses, Undercharge
from isthmus_simulation.audit.directions import Directions
from isthmus_simulation.devices.device import VirtualHost
from isthmus_simulation.devices.fleet import VirtualFleet
from isthmus_simulation.run import Simulation

if TYPE_CHECKING:
    from isthmus_server.rounds.run_parts import RunParts

MOST_LOOKED_AT = 64
"""Devices whose data are loaded to find one with many examples."""
MOST_ON_A_DEVICE = 1000
"""Canaries among the examples of a device: each has a direction in memory."""
_REPEATED = 0.5
"""Noise of the differences between steps, over that of a step, below which it repeats itself."""
_LEAST_NOISE = 1 / 16
"""Least noise, over the promised noise: less is not told apart from it."""
_MEDIAN_DISTANCE = 0.6745
"""Median distance of a standard normal number from zero."""


class ExampleCanaries:
    """What is seen of the canaries of all devices."""

    def __init__(self) -> None:
        """Nothing was seen yet."""
        self._seen: dict[str, list[torch.Tensor]] = {}
        """The part of each step's sum in each direction, over the bound, by device."""
        self._coins: dict[str, torch.Tensor] = {}
        self._plans: dict[str, DeviceExamplesPlan] = {}

    def device(self, name: str, task: CanaryTask, plan: DeviceExamplesPlan, examples: int) -> None:
        """Add a device."""
        self._plans[name] = plan
        self._coins[name] = torch.tensor(task.coins(name, examples), dtype=torch.bool)

    def watch(self, name: str, directions: Directions, total: torch.Tensor) -> None:
        """See the sum (N) of a step of a device with its noise."""
        canaries = len(self._coins[name])
        seen = directions.of_all(total)[:canaries] / self._plans[name].privacy.clip
        self._seen.setdefault(name, []).append(seen)

    def costs(self, times: int) -> Mapping[str, float]:
        """What the steps of each device that were seen cost one of its examples, as an epsilon.

        Args:
            times: participations that are claimed, above which a device would not train.
        """
        found = {}
        for name, rows in self._seen.items():
            plan = self._plans[name]
            found[name] = plan.epsilon(min(times, math.ceil(len(rows) / plan.steps)))
        return found

    @property
    def most_times(self) -> int:
        """How often the device has trained that trained most often."""
        times = (len(rows) / self._plans[name].steps for name, rows in self._seen.items())
        return math.ceil(max(times, default=0.0))

    def guesses(self, times: int) -> Guesses:
        """Guess the coin of each canary of a device that has trained.

        Args:
            times: participations that are claimed.
        """
        right = 0
        shares = Counter[float]()
        for name, rows in self._seen.items():
            plan = self._plans[name]
            present = _evidence(torch.stack(rows), plan) > 0
            right += int((present == self._coins[name]).sum())
            shares[min(1.0, len(rows) / (plan.steps * times))] += len(present)
        return Guesses(right, shares.total(), shares)


def _evidence(seen: torch.Tensor, plan: DeviceExamplesPlan) -> torch.Tensor:
    """The logarithm of the likelihood of the steps with each canary over that without it.

    With the noise that each step seems to have, by the median distance from zero, and not with the
    promised one: with that, one that is missing would hardly be noticed. If steps differ by much
    less, their noise repeats itself, and is subtracted.

    Args:
        seen: what each step has of each canary, (steps, canaries).
        plan: the noise that is promised.

    Returns:
        float64 (canaries).
    """
    median = float(seen.abs().median())
    differences = seen - seen.median(0).values
    if len(seen) > 2 and float(differences.abs().median()) < _REPEATED * median:
        seen = differences
    # Of each step by itself: one without noise shows all that it has drawn.
    deviation = seen.abs().median(1, keepdim=True).values / _MEDIAN_DISTANCE
    deviation = deviation.clamp(_LEAST_NOISE * plan.multiplier, plan.multiplier)
    exponent = (seen - 0.5) / deviation**2
    if plan.probability == 1:
        return exponent.sum(0)
    absent = torch.full_like(exponent, math.log1p(-plan.probability))
    return torch.logaddexp(absent, math.log(plan.probability) + exponent).sum(0)


class WatchedHost(VirtualHost):
    """The task of a device, whose steps the auditor sees."""

    def __init__(
        self, fleet: VirtualFleet, participant: Participant, canaries: ExampleCanaries
    ) -> None:
        """`canaries` are told of its steps."""
        super().__init__(fleet, participant)
        self._canaries = canaries

    def open(self, work: link_pb2.OpenRun) -> int:
        """See `TaskHost.open`."""
        examples = super().open(work)
        run = self.run
        assert run is not None
        task = run.task
        steps = run.private_steps
        if steps is None:
            return examples
        assert isinstance(task, CanaryTask)
        assert task.directions is not None
        directions = task.directions
        name = self._participant.name
        self._canaries.device(name, task, steps.plan, examples)
        steps.watch = lambda total: self._canaries.watch(name, directions, total)
        return examples


class ExampleAudit(Simulation):
    """A simulated run with canary examples."""

    canaries: ExampleCanaries
    shard: tuple[int, int]
    """The device whose data all have, and the devices of the job."""
    _fleet: VirtualFleet

    def undercharged(self, times: int, delta: float) -> Undercharge | None:
        """The device whose account has least of what its steps cost, if one has too little.

        Args:
            times: participations that are claimed.
            delta: of both epsilons.
        """
        found = []
        for name, due in self.canaries.costs(times).items():
            account = self._fleet.accounts.get(name)
            charged = 0.0 if account is None else account.spent(delta)
            found.append(Undercharge.of(charged, due))
        return Undercharge.worst(found)

    def _host(self, fleet: VirtualFleet, index: int) -> VirtualHost:
        return WatchedHost(fleet, fleet.participant(index), self.canaries)

    def _watch(self, parts: RunParts, fleet: VirtualFleet) -> None:
        self._fleet = fleet
        shard = self.shard
        fleet.shard_of = lambda index: shard


def audit_examples(
    job: Job,
    base: Path,
    directory: Path,
    shard: tuple[int, int],
    examples: int,
    trained: Mapping[str, int],
    seed: int,
) -> ExampleAudit:
    """A run of a job with canary examples, which is yet to be run.

    Args:
        job: with `[federated.privacy]`.
        base: where its relative paths start.
        directory: of the run.
        shard: the device whose data all devices have, and the devices of the job.
        examples: in these data.
        trained: the names of the parameters that devices train, and their elements.
        seed: of directions and coins.

    Raises:
        JobError: it cannot be simulated.
    """
    privacy = job.federated.privacy
    assert privacy is not None
    audit = {
        "source": job.task.source,
        "base": str(base),
        "seed": seed,
        # No more directions than canaries, so that each has elements in several layers.
        "count": canaries_among(examples, min(sum(trained.values()), MOST_ON_A_DEVICE)),
        "trained": list(trained),
        "norm": OVER * privacy.clip,
    }
    changes = {
        "task.source": SOURCE,
        "task.settings": {**job.task.settings, KEY: audit},
        # One process has all devices, whose steps it sees.
        "simulation.processes": 1,
        "simulation.clients": job.federated.cohort,
        "simulation.connected": None,
        "federated.device": "cpu",
    }
    simulation = ExampleAudit.new(with_changes(job, changes), base, directory)
    assert isinstance(simulation, ExampleAudit)
    simulation.canaries = ExampleCanaries()
    simulation.shard = shard
    return simulation


def most_of_devices(job: Job, examples: int, elements: int) -> int:
    """Canaries of a run whose devices have so many examples, and gradients so many elements."""
    return job.federated.cohort * canaries_among(examples, min(elements, MOST_ON_A_DEVICE))


def largest_device(task: Task, devices: int) -> tuple[int, int]:
    """The device with the most examples, among the first ones, and how many those are.

    Raises:
        UserError: even that has too few.
    """
    counts = []
    for index in range(min(devices, MOST_LOOKED_AT)):
        shard = index, devices
        participant = Participant(name=f"client-{index}", regime="federated", shard=shard)
        with user_code("local_data()"):
            dataset = task.local_data(participant)
        counts.append(count_examples(dataset, f"local_data() of {participant.name}"))
    most = max(counts)
    if canaries_among(most, 1) == 0:
        raise UserError(
            f"the device with the most examples has {most}, and an audit makes canaries of all but "
            f"{EXAMPLES} of them; let devices have more examples"
        )
    return counts.index(most), most
