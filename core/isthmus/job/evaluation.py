"""The job's table `[evaluation]`: when and how the model is evaluated."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from isthmus.job.federated import FederatedSection
from isthmus.job.section import Section


def evaluations_run_id(run_id: str) -> str:
    """The run id of secure sums of evaluations, distinct from that of the run's other sums."""
    return f"{run_id}/evaluations"


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

    def on_devices(self, federated: FederatedSection) -> FederatedSection:
        """The section of the devices, with the cohort and the quorum of an evaluation.

        Raises:
            JobError: they are too few for a secure sum, or the quorum is above their number.
        """
        settings = federated.model_copy(update={"quorum": self.quorum, "over_selection": 1.0})
        return settings.for_cohort(self.devices)
