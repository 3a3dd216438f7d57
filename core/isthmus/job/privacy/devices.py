"""The table `[privacy]`: differential privacy of what devices send."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from isthmus.job.privacy.bounds import (
    MAX_CORRELATED_ROUNDS,
    MOST_MEASUREMENTS,
    ClippingBound,
    NoiseMultiplier,
    PopulationName,
    Positive,
)
from isthmus.job.section import Section

if TYPE_CHECKING:
    from isthmus.job.schema import Job


class PrivacySection(Section):
    """Differential privacy of a device's updates (its unit is the device): noise and a budget.

    Neighbouring data sets differ in one device, whose updates are zeros in one of them.
    """

    mechanism: Literal["distributed", "gaussian", "correlated"]
    """Who adds the noise: `distributed`, each device a share, inside the secure sum, so that nobody
    has a sum without; `gaussian`, a server that is trusted to, independently in each round;
    `correlated`, such a server, with noise of which later rounds take a part back (banded inverse
    square root, Kalinin et al. 2025), for devices that are in few rounds far apart."""
    epsilon: Positive
    """The budget: no device is asked for a round with which its epsilon would exceed this."""
    delta: Annotated[float, Field(gt=0, lt=1)]
    """Delta of the guarantee; below 1 / number of devices."""
    clip: ClippingBound = 1.0
    """Bound on the 2-norm of one device's update (its model after training minus the start), 1e-9
    to 1e9. The update of every device counts the same, whatever its number of examples."""
    clip_quantile: Annotated[float, Field(gt=0, lt=1)] | None = None
    """With `gaussian`: `clip` is the bound of the first round only, and then moves towards this
    quantile of the norms of the updates, such as 0.5 for their median (Andrew et al. 2021).
    Default: `clip` stays."""
    noise: NoiseMultiplier | None = None
    """Noise multiplier: standard deviation of the noise in a round's sum, over `clip`. With
    `correlated` it is over what one device changes in all rounds. Default: the least with which
    `participations` rounds stay within `epsilon`."""
    participations: Annotated[int, Field(ge=1)] | None = None
    """Most rounds that one device is asked for, failed attempts included. Default: all rounds of
    the job that `separation` allows, so that after a failed attempt the budget lasts for one round
    less; a larger number leaves room for failures."""
    separation: Annotated[int, Field(ge=1)] = 1
    """Fewest rounds from one participation of a device to its next; `correlated` gains by it."""
    measurements: Annotated[int, Field(ge=0, le=MOST_MEASUREMENTS)] | None = None
    """Most evaluations and comparisons of models that one device is asked for, failed attempts
    included; their noise is made for so many. Default: one for each evaluated round of a job with
    `evaluation.devices`, else none; so a policy compares models only if this is set."""
    measurement_share: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Part of the budget that these measurements may spend together, if there are any; the rest is
    for the updates. It divides the sum of 1 / noise multiplier^2 over all sums of a device."""
    population: PopulationName = "devices"
    """Whose devices they are: a server keeps one ledger for all jobs with the same name."""

    @model_validator(mode="after")
    def _separation_is_used(self) -> PrivacySection:
        if self.separation > 1 and self.mechanism != "correlated":
            raise ValueError(
                f"separation={self.separation} is for mechanism='correlated'; remove it, or set "
                "participations"
            )
        return self

    @model_validator(mode="after")
    def _quantile_is_used(self) -> PrivacySection:
        if self.clip_quantile is not None and self.mechanism != "gaussian":
            raise ValueError(
                f"clip_quantile={self.clip_quantile:g} is for mechanism='gaussian', whose server "
                "may count the clipped updates; remove it"
            )
        return self

    def most_rounds(self, rounds: int) -> int:
        """Rounds of one device that the noise is made for, of so many rounds."""
        possible = -(-rounds // self.separation)
        if self.mechanism != "correlated":
            return self.participations or possible
        return min(possible, self.participations or possible)

    def most_measurements(self, job: Job) -> int:
        """Evaluations and comparisons of one device that the noise is made for, in this job."""
        if self.measurements is not None:
            return self.measurements
        evaluation = job.evaluation
        return -(-job.rounds // evaluation.every) if evaluation.devices else 0

    def check(self, job: Job) -> None:
        """Refuse a job in which the guarantee would not hold.

        Raises:
            ValueError: with what to change.
        """
        federated = job.federated
        for reason in (
            _about_devices(self, job),
            "federated.flower runs code that Isthmus does not clip; remove one of them"
            if federated.flower is not None
            else "",
            f"federated.codec={federated.codec!r} encodes updates after they are clipped, and what "
            "is decoded may be longer; remove one of them"
            if federated.codec is not None
            else "",
            f"federated.aggregation={federated.aggregation!r} is no mean of clipped updates, for "
            "which the noise is made; remove one of them"
            if federated.aggregation != "mean"
            else "",
            "federated.mode='buffered' sums updates to different models; use 'rounds'"
            if federated.mode == "buffered"
            else "",
            "federated.compression rounds updates after they are clipped, and keeps what noise was "
            "not added to for later rounds; remove one of them"
            if federated.compression is not None
            else "",
            "federated.groups sums several groups in a round; remove one of them"
            if federated.groups is not None
            else "",
            f"measurements=0 leaves nothing for evaluation.devices={job.evaluation.devices}; "
            "remove one of them"
            if job.evaluation.devices and self.measurements == 0
            else "",
            f"measurements={self.measurements} are of models on data whose examples "
            "[federated.privacy] protects, and would get no noise for these; remove it"
            if self.measurements and federated.privacy is not None
            else "",
            "statistics.collect sums counts without noise; remove one of them"
            if job.statistics.collect
            else "",
        ):
            if reason:
                raise ValueError(f"privacy: {reason}")


def _about_devices(privacy: PrivacySection, job: Job) -> str:
    federated = job.federated
    if privacy.mechanism == "distributed" and not federated.secure_aggregation:
        return (
            "mechanism='distributed' adds the noise inside the secure sum; set "
            "federated.secure_aggregation = true"
        )
    if privacy.clip_quantile is not None and not federated.secure_aggregation:
        return (
            "clip_quantile counts the devices within the bound in the secure sum; set "
            "federated.secure_aggregation = true"
        )
    apart = min(privacy.separation, job.rounds)
    devices = max(federated.clients, job.simulation.clients or 0)  # enough for one of the two
    if apart > 1 and federated.clients and devices < apart * federated.needed:
        return (
            f"separation={privacy.separation} needs other devices in each of {apart} rounds, "
            f"{apart * federated.needed} for a quorum of {federated.needed}, and there are "
            f"{devices}; lower it or federated.cohort, or raise federated.clients"
        )
    devices = max(
        federated.clients, federated.invited, job.simulation.clients or 0, job.evaluation.devices
    )
    if privacy.delta >= 1 / devices:
        return (
            f"delta={privacy.delta:g} is not below 1 / {devices} devices: it would allow to "
            "publish one of them; use 1e-5 or less"
        )
    if privacy.mechanism == "correlated" and job.rounds > MAX_CORRELATED_ROUNDS:
        return (
            f"mechanism='correlated' is for up to {MAX_CORRELATED_ROUNDS} rounds, and rounds="
            f"{job.rounds}; lower rounds, or use mechanism='gaussian'"
        )
    return ""
