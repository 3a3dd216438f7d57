"""The tables `[evaluation]` and `[statistics]` of a job, and a file of statistics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from isthmus.errors import JobError, cause_of
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
    same_devices: bool = False
    """All evaluations of the run are on the devices of its first one, and have no such metrics
    where one of them is missing or its task fails. With other devices each time, the counts of each
    device follow from the sums. Owners can demand it, see docs/edge.md. Needs secure aggregation.
    """
    per_device: bool = False
    """Record the evaluation of each device too, by its name. Not with secure aggregation, where a
    device's figures do not leave it, nor with `[privacy]`."""
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


LARGEST_FILE = 1 << 20
"""Bytes of a file of statistics, which is part of the job that all participants receive."""


class StatisticsSection(Section):
    """Statistics of the devices' data, by secure sums over devices."""

    collect: bool = False
    """The run computes statistics and trains nothing; `isthmus statistics` sets it."""
    devices: Annotated[int, Field(ge=1)] | None = None
    """Devices that are asked. Default: `federated.cohort`."""
    quorum: Annotated[int, Field(ge=2)] | None = None
    """Least number of devices in the sum. Default: three quarters of `devices`."""
    minimum: Annotated[int, Field(ge=1)] = 5
    """Least number of values in a count that is shown."""

    @model_validator(mode="after")
    def _quorum_fits(self) -> StatisticsSection:
        if self.devices is not None and self.quorum is not None and self.quorum > self.devices:
            raise ValueError(f"quorum={self.quorum} is above devices={self.devices}; lower it")
        return self

    def on_devices(self, federated: FederatedSection) -> FederatedSection:
        """The section of the devices, with the cohort and the quorum of the statistics.

        Raises:
            JobError: they are too few for a secure sum.
        """
        settings = federated.model_copy(update={"quorum": self.quorum, "over_selection": 1.0})
        return settings.for_cohort(self.devices or federated.cohort)


def add_statistics(table: dict[str, Any], folder: Path) -> None:
    """Put the contents of the file `task.statistics` into the settings of the task.

    So every participant has them with the job. A job that computes the statistics needs no file.

    Raises:
        JobError: the file cannot be read, is too large or has no JSON object.
    """
    task = table.get("task")
    if not isinstance(task, dict) or not isinstance(task.get("statistics"), str):
        return
    path = folder / task["statistics"]
    section = table.get("statistics")
    if isinstance(section, dict) and section.get("collect"):
        return
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise JobError(f"task.statistics: {path} is larger than {LARGEST_FILE} bytes")
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise JobError(
            f"task.statistics: {path} cannot be read: {cause_of(error)}; `isthmus statistics JOB "
            "--output FILE` writes such a file"
        ) from None
    if not isinstance(contents, dict):
        raise JobError(f"task.statistics: {path} has no JSON object")
    settings = task.setdefault("settings", {})
    if not isinstance(settings, dict):
        return
    if "statistics" in settings:
        raise JobError("task.statistics and task.settings.statistics are both set; remove one")
    settings["statistics"] = contents
