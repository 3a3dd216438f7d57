"""A job: one TOML file that says what to learn, how, and where.

>>> job = parse_job('''
... name = "digits"
... [task]
... source = "task.py:Digits"
... ''', overrides=["federated.cohort=4", "federated.quorum=3"])
>>> job.federated.cohort, job.strategy.policy
(4, 'alternate')

Every field says what it means and in which unit; ``isthmus job schema`` prints them.
Unknown keys are errors, so a typing mistake never silently falls back to a default.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field, ValidationError, model_validator

from isthmus.errors import JobError
from isthmus.job.datacenter import DatacenterSection
from isthmus.job.federated import FederatedSection
from isthmus.job.section import Hours, PositiveSeconds, Price, S, Section, sentences

RegimeName = Literal["datacenter", "federated", "hybrid"]


class TaskSection(Section):
    """What is learned."""

    source: str
    """The task: `path/to/file.py:Name`, relative to the job file, or `package.module:Name`."""
    data: str | None = None
    """Where this machine's data is, relative to the job file; the task reads it as `self.data`."""
    settings: dict[str, Any] = Field(default={})
    """Handed to the task as `self.settings`."""

    def data_in(self, base: Path) -> Path | None:
        """The path of the data, if the job names one; `base` is the job file's directory."""
        return base / self.data if self.data else None


class ServerOptimizer(Section):
    """Any optimizer of `torch.optim`, applied to the merged pseudo-gradient (Reddi et al. 2021).

    SGD with lr=1 is FedAvg; momentum makes it FedAvgM, Nesterov DiLoCo's outer step, Adam FedAdam.
    """

    name: str = "SGD"
    """Class name in `torch.optim`."""
    options: dict[str, Any] = Field(default={"lr": 1.0})
    """Its keyword arguments."""


class Window(Hours):
    """Hours in which one side can work."""

    side: Literal["datacenter", "federated"]
    """Whose hours these are. A side without any window can always work."""


class Phase(Section):
    """A stretch of rounds in one regime."""

    regime: RegimeName
    """Who trains."""
    rounds: Annotated[int, Field(ge=1)] | None = None
    """For how many rounds; without a number it goes on to the end of the run."""
    hours: tuple[Hours, ...] = ()
    """Only in these; outside of them later phases have their turn."""


class StrategySection(Section):
    """Which regime each round uses, and how results become the next model."""

    policy: str = "alternate"
    """`adaptive`, `rule`, `datacenter`, `federated`, `hybrid`, `alternate`, `schedule`, `plateau`,
    `budget`, `availability`, `bandit`, one that a package provides, or your own `module:Name`."""
    schedule: tuple[Phase, ...] = ()
    """For the policy `schedule`: the first phase that has rounds left and whose hours it is; after
    all of them the last one goes on."""
    settings: dict[str, Any] = Field(default={})
    """Of the policy; each has its own (docs/strategy.md)."""
    target_edge_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the target distribution that lives on the devices; the rest is the datacenter's."""
    windows: tuple[Window, ...] = ()
    """When the fleet or the datacenter can be counted on: no round of theirs begins outside."""
    merge: Literal["weighted", "projected", "transfer"] = "weighted"
    """How a hybrid round joins both sides: their weighted mean; the mean after taking out what
    points against the fleet (Yu et al. 2020); or the fleet alone, whose devices add the
    datacenter's gradient to each of their steps (one-way transfer, Augenstein et al. 2022)."""
    datacenter_weight: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Share of the datacenter's pseudo-gradient in a hybrid round; the fleet has the rest."""
    transfer_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    """For merge = "transfer": what the datacenter's gradient is multiplied with."""
    served_average: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The model that is evaluated and handed out averages the rounds' models: so much of it stays
    each round; 0 serves the last one."""
    server_optimizer: ServerOptimizer = ServerOptimizer()
    """What turns a merged pseudo-gradient into the next model."""

    @model_validator(mode="after")
    def _schedule_fits(self) -> StrategySection:
        if self.policy == "schedule" and not self.schedule:
            raise ValueError("policy='schedule' needs at least one phase in strategy.schedule")
        for number, phase in enumerate(self.schedule[:-1], 1):
            if phase.rounds is None and not phase.hours:
                raise ValueError(
                    f"phase {number} of strategy.schedule never ends, and others follow it; "
                    "give it rounds or hours"
                )
        return self


class EvaluationSection(Section):
    """Central evaluation on held-out data."""

    every: Annotated[int, Field(ge=1)] = 1
    """Evaluate after every so many rounds, and after the last."""
    batch_size: Annotated[int, Field(ge=1)] = 512
    """Examples at a time."""


class TimeSection(Section):
    """The three bounds on every wait."""

    join_seconds: PositiveSeconds = 120.0
    """For participants to arrive and be ready: at the start, and when too few are left."""
    round_seconds: PositiveSeconds = 600.0
    """For one attempt at a round, from the plan to the last result; with secure aggregation three
    quarters of it for training."""
    lease_seconds: PositiveSeconds = 10.0
    """Silence after which a participant counts as gone; 10 on a server that others join."""

    @model_validator(mode="after")
    def _in_order(self) -> TimeSection:
        if self.lease_seconds >= self.round_seconds:
            raise ValueError(
                f"lease_seconds={self.lease_seconds:g} must be below round_seconds="
                f"{self.round_seconds:g}, or a lost participant is never noticed within its round"
            )
        return self


class PricesSection(Section):
    """What work costs, in one unit of your choice; `budget` and the report count in it."""

    client_update: Price = 1.0
    """One device taking part in one round."""
    datacenter_step: Price = 0.01
    """One optimizer step of the whole datacenter."""
    client_evaluation: Price = 0.02
    """One device scoring one model."""


class Job(Section):
    """A task plus everything that says how to train it."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    """Short name; run directories start with it."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """The same seed and the same participants give the same bytes."""
    rounds: Annotated[int, Field(ge=1)] = 10
    """The run ends after so many rounds."""
    budget: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """The run also ends before a round that would bring its cost above this (unit: prices)."""
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """The run also ends before a round once it has gone on for so long; the time in which it was
    stopped does not count."""
    device_bytes: Annotated[int, Field(gt=0)] | None = None
    """The run also ends before a round that would bring what devices send and are sent above
    this."""
    attempts: Annotated[int, Field(ge=1)] = 3
    """Tries at one round before the run gives up."""
    task: TaskSection
    strategy: StrategySection = StrategySection()
    federated: FederatedSection = FederatedSection()
    datacenter: DatacenterSection = DatacenterSection()
    evaluation: EvaluationSection = EvaluationSection()
    time: TimeSection = TimeSection()
    prices: PricesSection = PricesSection()

    @model_validator(mode="after")
    def _an_app_takes_no_gradient(self) -> Job:
        flower = self.federated.flower
        if self.strategy.merge == "transfer" and flower is not None and flower.app is not None:
            raise ValueError(
                'strategy.merge="transfer" has devices add the datacenter\'s gradient to their '
                f"steps, and federated.flower.app={flower.app!r} makes steps of its own; use "
                '"weighted" or "projected"'
            )
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
    return parse_job(text, overrides, origin=str(path))


def parse_job(text: str, overrides: Iterable[str] = (), *, origin: str = "job") -> Job:
    """Validate the text of a job file; see `load_job`."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise JobError(f"{origin} is not valid TOML: {error}") from error
    for override in overrides:
        _apply(table, override)
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
            f"the job cannot be read here, maybe it is of a newer version: {first}"
        ) from None


def _apply(table: dict[str, Any], override: str) -> None:
    """Put `a.b=value` into the table; a value that is not TOML is taken as a string."""
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
    """A validated copy with some keys changed: `{"strategy.policy": "federated"}`."""
    table = job.model_dump()
    for key, value in changes.items():
        *path, last = key.split(".")
        inner = table
        for part in path:
            inner = inner[part]
        inner[last] = value
    try:
        return Job.model_validate(table)
    except pydantic.ValidationError as error:
        raise JobError("; ".join(sentences(error, Job))) from None
