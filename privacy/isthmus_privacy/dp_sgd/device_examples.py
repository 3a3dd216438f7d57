"""The noise of a device's own examples: found on the device, as nobody else needs their number.

>>> from isthmus.job.privacy import FederatedPrivacy
>>> privacy = FederatedPrivacy(epsilon=4, delta=1e-5)
>>> settings = FederatedSection(batch_size=32, local_epochs=1, privacy=privacy)
>>> plan = DeviceExamplesPlan.of(settings, rounds=10, examples=1000)
>>> plan.steps, plan.probability, round(plan.multiplier, 3), round(plan.epsilon(10), 3)
(32, 0.032, 1.022, 3.997)
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import TYPE_CHECKING, Self

from isthmus.errors import JobError
from isthmus.job.federated import FederatedSection
from isthmus.job.privacy import LARGEST_NOISE, FederatedPrivacy
from isthmus_privacy.dp.accounting import SampledGaussian
from isthmus_privacy.dp.searching import least_between
from isthmus_privacy.dp_sgd.renyi import epsilon_of_steps

if TYPE_CHECKING:
    from isthmus.job import Job

EXAMPLE = "example"
"""The unit: one example of one device."""
ZERO_OUT = "zero-out"
"""How neighbouring data sets differ: the example's gradients are zeros in one of them."""

_SMALLEST_NOISE = 2.0**-7
_DIGEST_DIGITS = 16
"""Hexadecimal digits of the digest of what a job says."""
_PRECISION = 1.0005
"""Factor by which the noise may be above the least."""


@dataclasses.dataclass(frozen=True)
class DeviceExamplesPlan:
    """The noise of DP-SGD on one device, and what a participation costs."""

    privacy: FederatedPrivacy
    participations: int
    """Participations that the noise was found for."""
    multiplier: float
    """Noise multiplier; see `FederatedPrivacy.noise`."""
    probability: float
    """Probability with which an example is in a step."""
    steps: int
    """Local steps of one participation."""
    settings_digest: str = ""
    """Digest of what the job says of all this, which is the same for all devices."""

    @classmethod
    def of(
        cls, settings: FederatedSection, rounds: int, examples: int, *, whole: bool = False
    ) -> Self:
        """The plan of a device.

        Args:
            settings: with `privacy`.
            rounds: of the job.
            examples: of this device.
            whole: whether the budget must allow all participations, also with noise of the job.

        Raises:
            JobError: a batch is larger than the data, delta is too large for so few examples, no
                noise meets the budget, or the job's noise does not.
        """
        privacy = settings.privacy
        assert privacy is not None
        whose = "the number of examples of this device, "
        if reason := privacy.refusal(examples, settings.batch_size, whose):
            raise JobError(f"federated.privacy: {reason}")
        participations = privacy.most_participations(rounds)
        steps = settings.steps(examples)
        probability = settings.batch_size / examples
        multiplier = privacy.noise
        if multiplier is None:
            all_steps = participations * steps
            multiplier = _least_noise(privacy.epsilon, privacy.delta, probability, all_steps)
            if multiplier is None:
                raise JobError(
                    f"federated.privacy.epsilon={privacy.epsilon:g} at delta={privacy.delta:g} in "
                    f"{participations} participations of {steps} steps would need noise of more "
                    f"than {LARGEST_NOISE:g} times the clipping bound; raise epsilon, or lower "
                    "batch_size, participations or the local steps"
                )
        said = (
            privacy.model_dump_json(),
            settings.batch_size,
            settings.local_steps,
            settings.local_epochs,
            participations,
        )
        digest = hashlib.sha256(repr(said).encode()).hexdigest()[:_DIGEST_DIGITS]
        plan = cls(privacy, participations, multiplier, probability, steps, digest)
        if plan.epsilon(1) > privacy.epsilon:
            raise JobError(
                f"federated.privacy.noise={multiplier:g} is too little: a single participation of "
                f"{steps} steps has an epsilon of {plan.epsilon(1):.4g}, above {privacy.epsilon:g} "
                f"at delta={privacy.delta:g}; raise noise or epsilon, or remove noise"
            )
        if whole and plan.epsilon(participations) > privacy.epsilon:
            raise JobError(
                f"federated.privacy.noise={multiplier:g} is too little for {participations} "
                f"participations of {steps} steps, which have an epsilon of "
                f"{plan.epsilon(participations):.4g}, above {privacy.epsilon:g} at "
                f"delta={privacy.delta:g}; raise noise or epsilon, lower participations, or remove "
                "noise"
            )
        return plan

    @property
    def event(self) -> SampledGaussian:
        """What one participation is charged as."""
        return SampledGaussian(self.multiplier, self.probability, self.steps)

    def epsilon(self, participations: int) -> float:
        """Epsilon of one example after so many participations."""
        return epsilon_of_steps([self.event] * participations, self.privacy.delta)


def check_device_examples(job: Job) -> None:
    """Refuse a budget that no noise meets on devices with as many examples as the job says.

    Raises:
        JobError: see `DeviceExamplesPlan.of`.
    """
    privacy = job.federated.privacy
    if privacy is not None and privacy.examples is not None:
        withheld = job.federated.secure_aggregation
        DeviceExamplesPlan.of(job.federated, job.rounds, privacy.examples, whole=withheld)


@functools.lru_cache(maxsize=64)
def _least_noise(epsilon: float, delta: float, probability: float, steps: int) -> float | None:
    """The least noise multiplier of so many steps, to 0.05 %; None if it is too large."""

    def fits(multiplier: float) -> bool:
        event = SampledGaussian(multiplier, probability, steps)
        return epsilon_of_steps([event], delta) <= epsilon

    if not fits(LARGEST_NOISE):
        return None
    return least_between(_SMALLEST_NOISE, LARGEST_NOISE, _PRECISION, fits)
