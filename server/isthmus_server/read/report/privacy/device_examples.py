"""The guarantee for the examples of devices, which each device counts by itself."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from isthmus.errors import JobError
from isthmus.job import Job
from isthmus_privacy.dp_sgd.device_examples import EXAMPLE, ZERO_OUT, DeviceExamplesPlan
from isthmus_server.read.report.privacy.device_forecast import budget, tenths
from isthmus_server.storage.records import Record

_BATCHES = (10, 100, 1000)
"""Sizes of devices that are shown if the job gives none, in batches."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromisedToExamples(Record):
    """What devices promise to their examples in a run with `[federated.privacy]`.

    How much of it is spent only the devices know, as it follows from their numbers of examples.
    """

    budget: float
    """Epsilon that no device exceeds in the run, failed attempts included."""
    delta: float
    participations: int
    """Participations of a device that the noise is made for."""
    unit: str = EXAMPLE
    """What is protected: one of these, of one device."""
    adjacency: str = ZERO_OUT
    """How neighbouring data sets differ: zeros in place of one example's gradients."""

    @classmethod
    def of(cls, job: Job) -> Self | None:
        """The promise of a job; None without `[federated.privacy]`."""
        privacy = job.federated.privacy
        if privacy is None:
            return None
        most = privacy.most_participations(job.rounds)
        return cls(budget=privacy.epsilon, delta=privacy.delta, participations=most)

    @property
    def sentence(self) -> str:
        """The guarantee in words."""
        return (
            f"epsilon of at most {self.budget:g} at delta {self.delta:g} for one {self.unit} of "
            f"one device ({self.adjacency}), by noise in its training for {self.participations} "
            "participations; each device keeps the account itself"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceExamplesForecast:
    """Noise and cost of DP-SGD on devices, before anything runs."""

    promise: PromisedToExamples
    devices: list[dict[str, Any]]
    """For each number of examples: the steps of a participation, the sampling probability, the
    noise multiplier, and epsilon after so many participations."""

    @classmethod
    def of(cls, job: Job) -> Self | None:
        """Compute it; None for a job without `[federated.privacy]`.

        Raises:
            JobError: no noise meets the budget, or no number of examples the delta.
        """
        promise = PromisedToExamples.of(job)
        privacy = job.federated.privacy
        if promise is None or privacy is None:
            return None
        sizes = [times * job.federated.batch_size for times in _BATCHES]
        if privacy.examples is not None:
            sizes = [privacy.examples]
        fitting = [each for each in sizes if privacy.delta < 1 / each] or [_largest(job)]
        return cls(promise=promise, devices=[_of_size(job, each) for each in fitting])

    def to_json(self) -> dict[str, Any]:
        """All figures, with the unit and the adjacency of the guarantee."""
        return {**dataclasses.asdict(self.promise), "devices": self.devices}

    def lines(self) -> list[tuple[str, str]]:
        """Names and sentences for a terminal."""
        promise = self.promise
        lines = [
            ("mechanism", "DP-SGD on each device"),
            ("protects", f"one {promise.unit} of one device ({promise.adjacency})"),
            (
                "budget",
                f"{budget(promise.budget, promise.delta)}; in "
                f"{promise.participations} participations, counted by the device",
            ),
        ]
        for each in self.devices:
            after = ", ".join(
                f"{spent:.4g} after {n}" for n, spent in each["epsilon_after"].items()
            )
            lines.append(
                (
                    "noise",
                    f"{each['noise_multiplier']:.4g} times the clipping bound in each of "
                    f"the {each['steps']} steps of a participation, on a device with "
                    f"{each['examples']} examples",
                )
            )
            lines.append(("epsilon", f"{after} participations"))
        lines.append(("refused", f"by devices with {_most(promise.delta) + 1} or more examples"))
        return lines


def _most(delta: float) -> int:
    """The largest number of examples of which delta is below the inverse."""
    most = int(1 / delta)
    return most if delta < 1 / most else most - 1


def _largest(job: Job) -> int:
    """The number of examples to show where delta is too large for ten batches."""
    privacy = job.federated.privacy
    batch = job.federated.batch_size
    assert privacy is not None
    if (most := _most(privacy.delta)) < batch:
        raise JobError(
            f"federated.privacy: delta={privacy.delta:g} is for devices of at most {most} "
            f"examples, and federated.batch_size={batch} for devices of at least {batch}; "
            "lower one of them"
        )
    return most


def _of_size(job: Job, examples: int) -> dict[str, Any]:
    plan = DeviceExamplesPlan.of(job.federated, job.rounds, examples)
    return {
        "examples": examples,
        "steps": plan.steps,
        "sampling_probability": plan.probability,
        "noise_multiplier": plan.multiplier,
        "epsilon_after": {each: plan.epsilon(each) for each in tenths(plan.participations)},
    }
