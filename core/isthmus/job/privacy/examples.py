"""The tables `[datacenter.privacy]` and `[federated.privacy]`: privacy of single examples."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from isthmus.job.privacy.bounds import ClippingBound, NoiseMultiplier, PopulationName, Positive
from isthmus.job.section import Section

if TYPE_CHECKING:
    from isthmus.job.datacenter import DatacenterSection
    from isthmus.job.schema import Job


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
    """Whose examples they are: a server keeps one ledger for all jobs with the same name. The steps
    of several datacenters are charged as if all had the same examples."""

    overlap: bool = False
    """Whether somebody with a device may also have an example here: the report and the ledger then
    also say what both together reveal. Needs `[privacy]`."""

    def check(self, job: Job) -> None:
        """Refuse a job in which the guarantee would not hold.

        Raises:
            ValueError: with what to change.
        """
        devices = None if job.privacy is None else job.privacy.population
        steps = job.datacenter.steps
        for reason in (
            f"steps={self.steps} is below datacenter.steps={steps}, those of one round, for which "
            "the budget would be too small; raise it, or remove it"
            if self.steps is not None and self.noise is None and self.steps < steps
            else "",
            "strategy.merge='transfer' gives devices the mean gradient without noise; use "
            "'weighted' or 'projected'"
            if job.strategy.merge == "transfer"
            else "",
            "exchange.buffers='recompute' computes running statistics without noise; use 'frozen'"
            if job.exchange.buffers == "recompute"
            else "",
            "overlap=true is about people whose devices are protected too; add a table [privacy], "
            "or remove it"
            if self.overlap and job.privacy is None
            else "",
            f"population={devices!r} is that of the devices, whose unit is another; choose another"
            if self.population == devices
            else "",
        ):
            if reason:
                raise ValueError(f"datacenter.privacy: {reason}")

    def check_layout(self, section: DatacenterSection) -> None:
        """Refuse a layout in which the gradients of single examples cannot be had.

        Raises:
            ValueError: with what to change.
        """
        for name, needed, why in _LAYOUT:
            if name == "zero_stage" and self.clipping == "ghost":
                continue
            if getattr(section, name) != needed:
                remedy = f"set {name} = {json.dumps(needed)}"
                if name == "zero_stage":
                    remedy += ', or datacenter.privacy.clipping = "ghost"'
                raise ValueError(
                    f"datacenter.privacy: {name}={getattr(section, name)!r} does not work with it, "
                    f"because {why}; {f'remove {name}' if needed is None else remedy}"
                )
        batch = section.private_batch
        if not batch:
            raise ValueError(
                "datacenter.privacy: the probability with which an example is in a step follows "
                "from the number of ranks; set datacenter.data_parallel to it"
            )
        if batch > self.examples:
            raise ValueError(
                f"datacenter.privacy: a step of {batch} examples (batch_size on all ranks) is more "
                f"than examples={self.examples}; lower batch_size"
            )
        if self.delta >= 1 / self.examples:
            raise ValueError(
                f"datacenter.privacy: delta={self.delta:g} is not below 1 / {self.examples} "
                f"examples: it would allow to publish one of them; use {0.1 / self.examples:.1g}"
            )


_SHARDED = (
    "fully_shard gathers parameters and reduces gradients by hooks for a batch as a whole, so that "
    "no rank ever has the gradient of one example"
)
_LAYOUT: tuple[tuple[str, object, str], ...] = (
    ("layout", "given", "it may choose to shard the model"),
    ("zero_stage", 0, _SHARDED),
    ("tensor_parallel", 1, "no rank has the whole gradient of an example to clip"),
    ("pipeline_parallel", 1, "no rank has the whole gradient of an example to clip"),
    (
        "precision",
        "fp32",
        "the bound on the gradient of an example would not hold with its rounding",
    ),
    ("accumulate", 1, "the examples of a step are already taken in parts"),
    ("compile", False, "torch.compile does not compile per-example gradients"),
    ("checkpoint_activations", False, "per-example gradients cannot recompute activations"),
    ("clip_norm", None, "datacenter.privacy.clip already bounds every example's gradient"),
    ("readers", 0, "they read batches of equal size, and here the size of a step is random"),
)
"""Keys of `[datacenter]`, the one value that is possible, and why others are not."""


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

    def check(self, job: Job) -> None:
        """Refuse a job in which the guarantee would not hold, or a device could not train so.

        Raises:
            ValueError: with what to change.
        """
        federated = job.federated
        for reason in (
            "federated.flower runs code of its own on devices, without clipping and noise; remove "
            "one of them"
            if federated.flower is not None
            and (federated.flower.app is not None or federated.flower.server_app is not None)
            else "",
            f"federated.precision={federated.precision!r} does not work with it, because each "
            "example's gradient is computed in float32; remove precision"
            if federated.precision != "fp32"
            else "",
            "federated.compile=true does not work with it, because torch.compile does not compile "
            "per-example gradients; remove compile"
            if federated.compile
            else "",
            f"federated.accumulate={federated.accumulate} does not work with it, because the "
            "examples of a step are already taken in parts; remove accumulate"
            if federated.accumulate != 1
            else "",
            "federated.clip_norm does not work with it, because federated.privacy.clip already "
            "bounds every example's gradient; remove clip_norm"
            if federated.clip_norm is not None
            else "",
            "federated.compression sums the devices' losses with their updates, and these have no "
            "noise; remove one of them"
            if federated.compression is not None
            else "",
            "federated.normalized_steps divides by a device's steps, which follow from the number "
            "of its examples, and this is protected; remove it"
            if federated.normalized_steps is not None
            else "",
            "federated.local_steps=0 trains nothing; set at least 1"
            if federated.local_steps == 0
            else "",
            "exchange.low_rank trains factors, and the noise would be that of whole matrices; "
            "remove one of them"
            if job.exchange.low_rank is not None
            else "",
            f"evaluation.devices={job.evaluation.devices} would count on devices without noise; "
            "evaluate on eval_data()"
            if job.evaluation.devices
            else "",
            "statistics.collect sums counts without noise; remove one of them"
            if job.statistics.collect
            else "",
            self._about_examples(federated.batch_size),
        ):
            if reason:
                raise ValueError(f"federated.privacy: {reason}")

    def _about_examples(self, batch_size: int) -> str:
        return "" if self.examples is None else self.refusal(self.examples, batch_size, "examples=")

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
