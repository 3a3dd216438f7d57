"""The tables of differential privacy, with the ranges of their numbers.

`[privacy]` is for what devices send; `[datacenter.privacy]` and `[federated.privacy]` are for the
single examples of a datacenter and of each device.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from isthmus.job.section import Section

LARGEST_NOISE = 1e4
"""Largest noise multiplier: with more, nothing can be learned."""
MAX_CORRELATED_ROUNDS = 100_000
"""Most rounds of correlated noise: the search for its bands takes time in proportion."""
MOST_MEASUREMENTS = 1_000_000
"""Most evaluations and comparisons of a device."""
SMALLEST_CLIP = 1e-9
LARGEST_CLIP = 1e9
"""Clipping bounds with which updates and their noise are numbers of float32, and of any ring of
secure aggregation."""


def _clip_in_range(clip: float) -> float:
    if not SMALLEST_CLIP <= clip <= LARGEST_CLIP:
        raise ValueError(
            f"{clip:g} is not in the range of clipping bounds, {SMALLEST_CLIP:g} to "
            f"{LARGEST_CLIP:g}; scale what is trained, or use another bound"
        )
    return clip


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NoiseMultiplier = Annotated[float, Field(gt=0, le=LARGEST_NOISE, allow_inf_nan=False)]
ClippingBound = Annotated[float, Field(gt=0, allow_inf_nan=False), AfterValidator(_clip_in_range)]
PopulationName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


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
    """Quantile of the norms of the updates towards which the bound moves after the first round,
    whose bound is `clip`, such as 0.5 for their median (Andrew et al. 2021); only with `gaussian`.
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
    """Name of the population of devices: a server keeps one ledger for all jobs with the same name,
    and so does a comparison for all of its runs."""

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


class DatacenterPrivacy(Section):
    """Differential privacy of the datacenter's examples by DP-SGD (Abadi et al. 2016).

    Neighbouring data sets differ in one example, which is added or removed. Every step uses each
    example with the probability batch_size x replicas / examples, independently of all others and
    of earlier steps; the gradient of each is clipped, and Gaussian noise is added to their sum.
    """

    epsilon: Positive
    """The budget: the run ends before a round with which epsilon would exceed this."""
    delta: Annotated[float, Field(gt=0, lt=1)]
    """Delta of the guarantee; below 1 / examples."""
    examples: Annotated[int, Field(ge=1)]
    """Number of examples that a datacenter has; it is not protected."""
    clip: ClippingBound = 1.0
    """Bound on the 2-norm of the gradient of one example, 1e-9 to 1e9."""
    clipping: Literal["per_example", "ghost"] = "per_example"
    """`ghost` finds the norms of gradients without the gradients, for large models, and also with
    zero_stage 1 to 3; not with all layers."""
    noise: NoiseMultiplier | None = None
    """Noise multiplier: standard deviation of the noise in the sum of a step's gradients, over
    `clip`. Default: the least with which `steps` stay within `epsilon`."""
    steps: Annotated[int, Field(ge=1)] | None = None
    """Steps of the run that the noise is found for. Default: those of all `rounds`."""
    population: PopulationName = "datacenter"
    """Name of the population of examples: a server keeps one ledger for all jobs with the same
    name. The steps of several datacenters are charged as if all had the same examples."""
    overlap: bool = False
    """Whether somebody with a device may also have an example here: the report and the ledger then
    also say what both together reveal. Needs `[privacy]`."""


class FederatedPrivacy(Section):
    """Differential privacy of a device's examples by DP-SGD on the device (Abadi et al. 2016).

    Neighbouring data sets of a device differ in one example, whose gradients are zeros in one of
    them: the number of examples is not protected, as the probability with which each is in a step
    (batch_size / examples) and the noise follow from it. Each device finds its noise from its own
    number, counts what it has spent, and refuses more, whatever the server asks for.
    """

    epsilon: Positive
    """The budget of a run: a device refuses to train where its epsilon would exceed this."""
    delta: Annotated[float, Field(gt=0, lt=1)]
    """Delta of the guarantee; below 1 / examples of a device."""
    clip: ClippingBound = 1.0
    """Bound on the 2-norm of the gradient of one example, 1e-9 to 1e9."""
    participations: Annotated[int, Field(ge=1)] | None = None
    """Times that a device may train in the run, failed attempts included: the noise is made for so
    many. Default: the rounds of the job."""
    noise: NoiseMultiplier | None = None
    """Noise multiplier: standard deviation of the noise in the sum of a step's gradients, over
    `clip`. Default: the least with which `participations` stay within `epsilon`, which each device
    finds for itself."""
    examples: Annotated[int, Field(ge=1)] | None = None
    """Number of examples for which `isthmus privacy plan` and `isthmus job check` compute the
    noise; devices use their own. Default: only devices know."""

    def most_participations(self, rounds: int) -> int:
        """Participations that the noise is made for, in a job of so many rounds."""
        return self.participations or rounds

    def refusal(self, examples: int, batch_size: int, whose: str) -> str:
        """Why the guarantee makes no sense for a device with so many examples; empty if it does.

        `whose` is what the number stands behind in the sentence.
        """
        if batch_size > examples:
            return (
                f"federated.batch_size={batch_size} is more than {whose}{examples}, and each is in "
                "a step with the probability batch_size / examples; lower batch_size"
            )
        if self.delta >= 1 / examples:
            return (
                f"delta={self.delta:g} is not below 1 / examples, with {whose}{examples}: it would "
                f"allow to publish one of them; use {0.1 / examples:.1g}"
            )
        return ""
