"""The job's table `[evaluation]`: when and how the model is evaluated."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from isthmus.job.federated import FederatedSection
from isthmus.job.section import Section


def evaluations_run_id(run_id: str) -> str:
    """The run id of secure sums of evaluations, distinct from that of the run's other sums."""
    return f"{run_id}/evaluations"


class BestModel(Section):
    """Which model of a run is the best."""

    name: str
    """The metric: `loss`, one that the task returns, or one of devices, such as `devices_loss`."""
    mode: Literal["max", "min"]
    """Whether higher or lower values are better."""
    min_change: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """A model is better only if it improves the metric by more than this."""

    def improves(self, value: float, best: float) -> bool:
        """Whether a value is better than the best one before; never for NaN."""
        gain = value - best if self.mode == "max" else best - value
        return gain > self.min_change


class EvaluationSection(Section):
    """Evaluation: central, on held-out data, and on devices, on their own validation data."""

    every: Annotated[int, Field(ge=1)] = 1
    """Rounds between evaluations; the last round is always evaluated."""
    batch_size: Annotated[int, Field(ge=1)] = 512
    """Examples in one batch."""
    devices: Annotated[int, Field(ge=0)] = 0
    """Devices that are asked to evaluate the model on their `validation_data`; 0 for none."""
    quorum: Annotated[int, Field(ge=1)] | None = None
    """Least number of devices in an evaluation. Default: three quarters of `devices`."""
    keep_best: BestModel | None = None
    """Keep the model with the best value of a metric, besides the last one. Policies know it as
    `best`. Rounds of a datacenter that are evaluated then send their model to the server."""
    patience: Annotated[int, Field(ge=1)] | None = None
    """The run ends after this many evaluated rounds in a row without a better model."""
    deliver: Literal["last", "best"] = "last"
    """The model that the run delivers."""

    @model_validator(mode="after")
    def _has_best(self) -> EvaluationSection:
        for name in ("patience", "deliver"):
            if getattr(self, name) not in (None, "last") and self.keep_best is None:
                raise ValueError(
                    f"{name} needs the metric that decides which model is the best, such as "
                    'keep_best = { name = "accuracy", mode = "max" }'
                )
        return self

    def on_devices(self, federated: FederatedSection) -> FederatedSection:
        """The section of the devices, with the cohort and the quorum of an evaluation.

        Raises:
            JobError: they are too few for a secure sum, or the quorum is above their number.
        """
        settings = federated.model_copy(update={"quorum": self.quorum, "over_selection": 1.0})
        return settings.for_cohort(self.devices)
