"""All tables of a job, and the values that follow from several of them; nothing is checked here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from isthmus.job.datacenter import DatacenterSection
from isthmus.job.exchange import ExchangeSection
from isthmus.job.federated import FederatedSection
from isthmus.job.learning_rate import LearningRateSection
from isthmus.job.measurements import EvaluationSection, StatisticsSection
from isthmus.job.model import ModelSection
from isthmus.job.privacy import PrivacySection
from isthmus.job.section import FREE, PositiveSeconds, Section
from isthmus.job.simulation import SimulationSection
from isthmus.job.strategy import PricesSection, StrategySection


class TaskSection(Section):
    """The task and its data."""

    source: str = ""
    """The task: `path/to/file.py:Name`, relative to the job file, or `package.module:Name`. Only a
    job with `federated.flower.server_app` has none."""
    data: str | None = None
    """Path of this machine's data, relative to the job file; the task reads it as `self.data`."""
    settings: Annotated[dict[str, Any], FREE] = Field(default={})
    """Settings of the task, available as `self.settings`."""
    statistics: str | None = None
    """A file that `isthmus statistics` wrote, relative to the job file. Its contents become part of
    the job; the task reads them as `self.statistics`."""

    def data_in(self, base: Path) -> Path | None:
        """The path of the data, if the job names one; `base` is the job file's directory."""
        return base / self.data if self.data else None


ROUND_SECONDS = 600.0
"""Seconds of a round in a job that does not say, as long as nothing is known of its devices."""
LEAST_RATE = 20_000.0
"""Default of `time.least_rate`, in bytes per second."""


class TimeSection(Section):
    """Time limits."""

    join_seconds: PositiveSeconds = 120.0
    """Wait for participants to connect and be ready: at the start, and when too few are left."""
    cohort_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Longest wait before a round for the rest of its cohort, when the quorum is ready and more
    devices are expected; 0 starts at the quorum. A device is awaited a little longer than it was
    late before. Default: 60 s, and 10 s for devices that are not connected and were never late.
    Devices that `isthmus run` starts are not awaited."""
    round_seconds: PositiveSeconds | None = None
    """One attempt at a round, from the plan to the last result. With secure aggregation: three
    quarters of it are for training; the later steps have the limits below. Time in which a device's
    model or result is on its way does not count, at `least_rate` or more. Default: 600 s, which
    begin again with each step that a datacenter reports; and for devices three times what they took
    before, of two minutes to an hour."""
    least_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = LEAST_RATE
    """Bytes per second of a transfer to or from a participant that no limit in seconds ends."""
    secure_step_seconds: PositiveSeconds | None = None
    """One short step of secure aggregation: sharing keys, signing or unmasking. Default: a minute,
    and more for large cohorts."""
    secure_upload_seconds: PositiveSeconds | None = None
    """Sending all masked updates of a secure round. Default: what is left of `round_seconds`, and
    more if the cohort or the model requires it."""
    lease_seconds: PositiveSeconds = 10.0
    """Silence after which a participant counts as lost; `isthmus server` always uses 10."""

    @model_validator(mode="after")
    def _in_order(self) -> TimeSection:
        if self.lease_seconds >= self.first_round_seconds:
            raise ValueError(
                f"lease_seconds={self.lease_seconds:g} must be below round_seconds="
                f"{self.first_round_seconds:g}, or a lost participant is never detected within its "
                "round"
            )
        return self

    @property
    def first_round_seconds(self) -> float:
        """`round_seconds`, or what a round has of whose participants nothing is known."""
        return ROUND_SECONDS if self.round_seconds is None else self.round_seconds


class JobTables(Section):
    """The keys of a job; `isthmus.job.schema.Job` is one whose tables fit together."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    """Short name; the names of run directories start with it."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of all random numbers: the same seed and the same participants give the same bytes."""
    rounds: Annotated[int, Field(ge=1)] = 10
    """Number of rounds after which the run ends."""
    budget: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """The run also ends before a round that would exceed this cost (in the unit of `prices`)."""
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """The run also ends before a round after this duration; time in which it was stopped does not
    count."""
    device_bytes: Annotated[int, Field(gt=0)] | None = None
    """The run also ends before a round with which the bytes sent and received by devices would
    exceed this."""
    attempts: Annotated[int, Field(ge=1)] = 3
    """Attempts at one round before the run fails."""
    task: TaskSection = TaskSection()
    model: ModelSection = ModelSection()
    strategy: StrategySection = StrategySection()
    exchange: ExchangeSection = ExchangeSection()
    federated: FederatedSection = FederatedSection()
    datacenter: DatacenterSection = DatacenterSection()
    learning_rate: LearningRateSection = LearningRateSection()
    evaluation: EvaluationSection = EvaluationSection()
    statistics: StatisticsSection = StatisticsSection()
    privacy: PrivacySection | None = None
    """Differential privacy of the devices' updates; none by default."""
    time: TimeSection = TimeSection()
    simulation: SimulationSection = SimulationSection()
    prices: PricesSection = PricesSection()

    @property
    def federated_round_steps(self) -> int:
        """Steps by which a round of devices advances the schedules; 0 if the job does not say."""
        return self.learning_rate.federated_round_steps or self.federated.local_steps or 0

    @property
    def schedule_steps(self) -> int | None:
        """The last step of the job's schedule; None if nothing says it."""
        return self.learning_rate.total(
            self.rounds, self.federated_round_steps, self.datacenter.steps, self.strategy
        )

    @property
    def finds_ranges(self) -> bool:
        """Whether secure sums of updates follow one of their ranges.

        With `privacy`, updates are clipped to a norm and all count the same: the range is known.
        """
        return self.federated.finds_ranges and self.privacy is None

    @property
    def devices_add_noise(self) -> bool:
        """Whether devices add the noise of `privacy`, to all that they send.

        No figures go with it then.
        """
        return self.privacy is not None and self.privacy.mechanism == "distributed"

    @property
    def most_measurements(self) -> int:
        """Evaluations and comparisons of one device that the noise of `privacy` is made for."""
        if self.privacy is not None and self.privacy.measurements is not None:
            return self.privacy.measurements
        return -(-self.rounds // self.evaluation.every) if self.evaluation.devices else 0
