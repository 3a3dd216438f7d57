"""The job's table `[learning_rate]`: how the task's learning rate changes during the run."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from isthmus.job.section import Section
from isthmus.job.strategy import StrategySection


class RoundPosition(NamedTuple):
    """Where a round is in the schedules of its run."""

    start: int = 0
    """Optimizer steps of the run before the round."""
    steps: int = 0
    """Steps by which the round advances the position; 0 if the job does not say."""
    cohort: int = 0
    """Devices whose updates a federated round averages; 0 in a round without devices."""

    def of_step(self, index: int, count: int) -> int:
        """The position of step `index` (from 0) of a participant that makes `count` steps.

        >>> [RoundPosition(start=100, steps=10).of_step(index, 4) for index in range(4)]
        [100, 102, 105, 107]
        """
        return self.start + index * self.steps // count


FIRST_POSITION = RoundPosition()


class LearningRateSection(Section):
    """The learning rate of all participants, by the position of the run in optimizer steps.

    A datacenter's round advances the position by its steps, a federated round by the length of a
    federated round. The rate that the task's `optimizer()` chooses is multiplied; without this
    table it stays as it is, or follows the task's own `LRScheduler`.
    """

    schedule: Literal["constant", "linear", "cosine", "step", "inverse_sqrt"] = "constant"
    """The rate after the warm-up: `constant`; `linear` or `cosine`, down to `end_factor` at
    `total_steps`; `step`, times `factor` every `step_size` steps; `inverse_sqrt`, with the inverse
    square root of the position (Vaswani et al. 2017)."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which the rate rises linearly to its full value."""
    total_steps: Annotated[int, Field(ge=1)] | None = None
    """Steps, the warm-up included, after which a `linear` or `cosine` schedule keeps its last
    value. Default: all steps of the job's `rounds`, if these follow from the job."""
    end_factor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The last value of a `linear` or `cosine` schedule, as a share of the full rate."""
    step_size: Annotated[int, Field(ge=1)] | None = None
    """For `step`: steps between two changes."""
    factor: Annotated[float, Field(gt=0, le=1)] = 0.1
    """For `step`: the factor of each change."""
    scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the full rate follows the effective batch, relative to `reference_batch`. The effective
    batch is that of all participants of one step: the datacenter's replicas x batch_size, or the
    federated cohort x batch_size."""
    reference_batch: Annotated[int, Field(ge=1)] | None = None
    """For `scaling`: the effective batch, in examples, for which the task's rate was chosen."""
    federated_round_steps: Annotated[int, Field(ge=1)] | None = None
    """Steps by which a round without a datacenter's training advances the position. Default:
    federated.local_steps. Devices that make more or fewer steps pass through the same positions."""

    @model_validator(mode="after")
    def _fits(self) -> LearningRateSection:
        if self.schedule == "step" and self.step_size is None:
            raise ValueError("schedule='step' needs step_size, the steps between two changes")
        if self.scaling != "none" and self.reference_batch is None:
            raise ValueError(
                f"scaling={self.scaling!r} needs reference_batch, the effective batch for which "
                "the task's learning rate was chosen"
            )
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"total_steps={self.total_steps} must be above warmup_steps={self.warmup_steps}"
            )
        return self

    @property
    def is_used(self) -> bool:
        """Whether the job changes the task's rate."""
        return self.varies or self.scaling != "none"

    @property
    def varies(self) -> bool:
        """Whether the rate depends on the position."""
        return self.schedule != "constant" or self.warmup_steps > 0

    @property
    def needs_total(self) -> bool:
        """Whether the schedule ends."""
        return self.schedule in ("linear", "cosine")

    def total(
        self, rounds: int, federated: int, datacenter: int, strategy: StrategySection
    ) -> int | None:
        """The last step of the schedule; None if nothing says it.

        Args:
            rounds: of the job.
            federated: steps of a round in which no datacenter trains; 0 if unknown.
            datacenter: steps of another round.
            strategy: says which rounds there are.
        """
        if self.total_steps is not None:
            return self.total_steps
        lengths = {"federated": federated, "datacenter": datacenter}
        lengths["hybrid"] = federated if strategy.merge == "transfer" else datacenter
        length = lengths.get(strategy.policy, federated if federated == datacenter else 0)
        return rounds * length or None

    def scale(self, batch: int) -> float:
        """Factor of the task's rate for an effective batch, in examples.

        >>> LearningRateSection(scaling="sqrt", reference_batch=32).scale(128)
        2.0
        """
        if self.scaling == "none" or self.reference_batch is None:
            return 1.0
        ratio = batch / self.reference_batch
        return ratio if self.scaling == "linear" else float(ratio**0.5)
