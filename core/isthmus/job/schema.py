"""The schema of job files: what to learn, how, and where, in one TOML file.

>>> job = parse_job('''
... name = "digits"
... [task]
... source = "task.py:Digits"
... ''', overrides=["federated.cohort=4", "federated.quorum=3"])
>>> job.federated.cohort, job.strategy.policy
(4, 'alternate')

The docstring of a field gives its meaning and unit; ``isthmus job schema`` prints them. Unknown
keys are errors, so that a misspelt key is never silently replaced by a default.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import Field, ValidationError, model_validator

from isthmus.errors import JobError
from isthmus.job.datacenter import DatacenterSection
from isthmus.job.exchange import ExchangeSection
from isthmus.job.federated import FederatedSection
from isthmus.job.flower import add_project_config
from isthmus.job.learning_rate import LearningRateSection
from isthmus.job.measurements import EvaluationSection, StatisticsSection, add_statistics
from isthmus.job.privacy import PrivacySection
from isthmus.job.section import FREE, PositiveSeconds, S, Section, sentences
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


class TimeSection(Section):
    """Time limits."""

    join_seconds: PositiveSeconds = 120.0
    """Wait for participants to connect and be ready: at the start, and when too few are left."""
    cohort_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 5.0
    """Wait before a round for the rest of its cohort, when the quorum is ready and more devices are
    expected; 0 starts at the quorum. Devices that `isthmus run` starts are not awaited."""
    round_seconds: PositiveSeconds = 600.0
    """One attempt at a round, from the plan to the last result. With secure aggregation: three
    quarters of it are for training; the later steps have the limits below."""
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
        if self.lease_seconds >= self.round_seconds:
            raise ValueError(
                f"lease_seconds={self.lease_seconds:g} must be below round_seconds="
                f"{self.round_seconds:g}, or a lost participant is never detected within its round"
            )
        return self


UNUSED_BY_A_SERVER_APP = (
    "rounds",
    "budget",
    "seconds",
    "device_bytes",
    "attempts",
    "task",
    "strategy",
    "exchange",
    "learning_rate",
    "datacenter",
    "evaluation",
    "statistics",
    "prices",
)
"""Keys of a job that a Flower ServerApp replaces."""


class Job(Section):
    """A task and all settings of its training."""

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

    @model_validator(mode="after")
    def _schedule_fits(self) -> Job:
        app = self.federated.flower is not None and self.federated.flower.app is not None
        self.learning_rate.check(
            self.schedule_steps, self.federated_round_steps, self.strategy, app=app
        )
        return self

    @model_validator(mode="after")
    def _has_a_task_or_a_server_app(self) -> Job:
        flower = self.federated.flower
        server_app = None if flower is None else flower.server_app
        if server_app is None:
            if not self.task.source:
                raise ValueError("task.source is missing")
            return self
        fields = type(self).model_fields
        for name in UNUSED_BY_A_SERVER_APP:
            if getattr(self, name) != fields[name].default:
                raise ValueError(
                    f"{name} has no effect on federated.flower.server_app={server_app!r}, which "
                    "directs the run by itself; remove it, and set what the apps read in "
                    "federated.flower.config"
                )
        return self

    @model_validator(mode="after")
    def _app_cannot_transfer(self) -> Job:
        flower = self.federated.flower
        if self.strategy.merge == "transfer" and flower is not None and flower.app is not None:
            raise ValueError(
                'strategy.merge="transfer" has devices add the datacenter\'s gradient to their '
                f"steps, and federated.flower.app={flower.app!r} makes its own steps; use "
                '"weighted" or "projected"'
            )
        return self

    @model_validator(mode="after")
    def _devices_can_keep_a_state(self) -> Job:
        flower = self.federated.flower
        if flower is not None and flower.app is not None and self.exchange != ExchangeSection():
            raise ValueError(
                "[exchange] divides the model of a task, and "
                f"federated.flower.app={flower.app!r} has its own; remove it"
            )
        if (
            self.exchange.buffers == "recompute"
            and self.federated.clients
            and not self.datacenter.ranks
        ):
            raise ValueError(
                "exchange.buffers='recompute' computes running statistics on a datacenter's data, "
                "and `isthmus run` starts none; set datacenter.ranks, or use buffers = 'average'"
            )
        if self.exchange.buffers == "recompute" and self.strategy.served_average:
            raise ValueError(
                f"strategy.served_average={self.strategy.served_average:g} would need running "
                "statistics of its own, which exchange.buffers='recompute' does not compute; "
                "remove one of them"
            )
        turn = self.federated.personal_steps
        steps = self.federated.local_steps
        if turn and not self.exchange.has_personal:
            raise ValueError(
                f"federated.personal_steps={turn} train personal parameters, and there are none; "
                "set exchange.personal"
            )
        if turn and steps is not None and turn >= steps:
            raise ValueError(
                f"federated.personal_steps={turn} leaves none of local_steps={steps} to train what "
                "is exchanged; lower it"
            )
        if not self.exchange.has_personal:
            return self
        if self.federated.mode == "buffered":
            raise ValueError(
                "exchange.personal and buffers='local' keep one state for each round of a device, "
                "which mode='buffered' does not have; use federated.mode='rounds'"
            )
        if self.exchange.buffers == "local" and self.datacenter.ranks:
            raise ValueError(
                f"exchange.buffers='local' keeps running statistics on devices, and datacenter."
                f"ranks={self.datacenter.ranks} would train without them; set ranks = 0, or "
                "buffers = 'average'"
            )
        return self

    @model_validator(mode="after")
    def _devices_can_evaluate(self) -> Job:
        if not self.evaluation.devices:
            if steps := self.federated.fine_tune_steps:
                raise ValueError(
                    f"federated.fine_tune_steps={steps} are made before devices evaluate a model, "
                    "and none does; set evaluation.devices"
                )
            return self
        flower = self.federated.flower
        if flower is not None and flower.app is not None:
            raise ValueError(
                f"evaluation.devices={self.evaluation.devices} evaluates the task on devices, and "
                f"federated.flower.app={flower.app!r} is not a task; remove one of them"
            )
        try:
            self.evaluation.check(self.federated, self.simulation.clients or 0)
        except JobError as error:
            raise ValueError(f"evaluation.devices: {error}") from None
        return self

    @model_validator(mode="after")
    def _devices_can_be_counted(self) -> Job:
        self.statistics.check(self.federated)
        return self

    @model_validator(mode="after")
    def _promises_hold(self) -> Job:
        for part in (
            self.privacy,
            self.federated.privacy,
            self.datacenter.privacy,
            self.datacenter.compression,
        ):
            if part is not None:
                part.check(self)
        return self


def load_job(path: Path, overrides: Iterable[str] = ()) -> Job:
    """Read and validate a job file; `overrides` are `key.sub=value` with TOML values.

    Raises:
        JobError: one sentence naming the file, the key, the value and what is allowed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise JobError(f"there is no job file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"{path} cannot be read: {error}") from error
    return parse_job(text, overrides, origin=str(path), folder=path.parent)


def parse_job(
    text: str,
    overrides: Iterable[str] = (),
    *,
    origin: str = "job",
    folder: Path | None = None,
) -> Job:
    """Validate the text of a job file; see `load_job`.

    `folder`: where a `pyproject.toml` may have the configuration of the job's Flower app.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise JobError(f"{origin} is not valid TOML: {error}") from error
    for override in overrides:
        apply_override(table, override)
    if folder is not None:
        add_project_config(table, folder)
        add_statistics(table, folder)
    try:
        return Job.model_validate(table)
    except ValidationError as error:
        raise JobError(f"{origin}: {'; '.join(sentences(error, Job))}") from None


def write_job(job: Job) -> str:
    """Encode a job for the link, as JSON with only the values that are not defaults.

    A participant of the previous version, which lacks a new key, can thus read a job that does not
    use that key. Defaults are therefore part of the format: change one only together with the
    version of the link.
    """
    return job.model_dump_json(exclude_defaults=True)


def read_job(text: str) -> Job:
    """Read a job that `write_job` wrote.

    Raises:
        JobError: this version cannot read it.
    """
    try:
        return Job.model_validate_json(text)
    except ValidationError as error:
        first, *_ = sentences(error, Job)
        raise JobError(
            f"this version of Isthmus cannot read the job, which may be from a newer one: {first}"
        ) from None


def apply_override(table: dict[str, Any], override: str) -> None:
    """Put `a.b=value` into the table; a value that is not TOML is taken as a string.

    Raises:
        JobError: it has another form, or a part of its key is a value in the table.
    """
    key, separator, value = override.partition("=")
    path = key.strip().split(".")
    if not separator or not all(path):
        raise JobError(f"--set {override!r} is not of the form key.sub=value")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    for part in path[:-1]:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise JobError(f"--set {override!r}: {part!r} is a value, not a table")
        table = inner
    table[path[-1]] = parsed


def parse_settings(kind: type[S], table: Mapping[str, Any], where: str) -> S:
    """Validate the settings of a part that brings its own, as `where.key` of the job.

    Raises:
        JobError: one sentence naming the key, the value and what is allowed.
    """
    try:
        return kind.model_validate(dict(table))
    except ValidationError as error:
        raise JobError("; ".join(sentences(error, kind, f"{where}."))) from None


def job_schema() -> dict[str, Any]:
    """The JSON schema of a job file."""
    return Job.model_json_schema()


def with_changes(job: Job, changes: Mapping[str, Any]) -> Job:
    """A validated copy with some keys changed: `{"strategy.policy": "federated"}`.

    Raises:
        JobError: the result is no valid job.
    """
    table = job.model_dump()
    for key, value in changes.items():
        *path, last = key.split(".")
        inner = table
        for part in path:
            inner[part] = {} if inner.get(part) is None else inner[part]
            inner = inner[part]
            if not isinstance(inner, dict):
                raise JobError(f"{key}: {part!r} is a value, not a table")
        inner[last] = copy.deepcopy(value)  # a later key may change a part of it
    try:
        return Job.model_validate(table)
    except pydantic.ValidationError as error:
        raise JobError("; ".join(sentences(error, Job))) from None
