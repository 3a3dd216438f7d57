"""Scenarios: the distribution of data, the devices' hours, prices, and the goal of a run.

A scenario is a TOML file; this is its schema. Every key but `name` has a default; unknown keys are
errors. One tick is one round, or one hour without work.

>>> small = Scenario(name="small", run=Run(ticks=10, budget=4))
>>> small.split.clients, small.federated.cohort
(80, 10)
"""

from __future__ import annotations

import math
import random
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from regime_simulation.data_sets import DATA_SETS, edge_share

from isthmus.errors import JobError
from isthmus.job import Job

Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]

HOURS = 24
ROWS_PER_CLASS = 600
"""Approximate rows of a class in the training set; they are between 587 and 650."""
HOUR = 3600.0
"""Length of a tick, in seconds."""


class Section(BaseModel):
    """A table of a scenario."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Split(Section):
    """The distribution of the training set over the datacenter and the devices."""

    clients: Annotated[int, Field(ge=1, le=1000)] = 80
    """Number of devices."""
    dirichlet: Positive = 0.2
    """Concentration of each class's shares on devices; small is uneven (Hsu et al. 2019)."""
    zones: Annotated[int, Field(ge=1, le=4)] = 1
    """Groups of devices; each class occurs in one of them."""
    native: bool = False
    """Each device has rows of one source (speaker, hospital), and not of several classes."""
    public_classes: Count = 13
    """Number of classes, sources or ranges of the datacenter's rows, chosen at random."""
    public_rows: Annotated[int, Field(ge=20, le=100_000)] = 3000
    """Upper bound of the datacenter's rows; a tenth of them is its held-out set."""
    exclusive: bool = False
    """The datacenter's classes do not exist on the devices."""
    shift: Annotated[float, Field(ge=0, le=4)] = 0.0
    """Strength of a fixed affine map on the public features, x + shift (M x + b)."""
    label_noise: Fraction = 0.0
    """Share of public labels replaced by a random public class, or a random public target."""
    shuffled: bool = False
    """The devices exchange their names, which choose the cohorts."""
    renamed: bool = False
    """The classes exchange their numbers, and the outputs of the initial model with them."""
    swapped_classes: Fraction = 0.0
    """Share of the public classes whose labels are swapped with each other; in a regression the
    share of targets with the opposite sign."""


class Model(Section):
    """The data set's model (`data_sets.py`)."""

    hidden: Annotated[tuple[Count, ...], Field(min_length=1)] = (96,)
    """Widths of its hidden layers, or channels of its convolutions."""


class Federated(Section):
    """The work of devices in a round, and the server's step."""

    cohort: Count = 10
    """Number of updates in a round."""
    steps: Count = 20
    """Steps of SGD."""
    batch_size: Count = 20
    """Examples in a step."""
    lr: Positive = 0.6
    """Learning rate of SGD."""
    outer_lr: Positive = 0.7
    """Learning rate of the server's SGD with Nesterov momentum."""
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of that SGD, for policies that do not set another one."""
    served_average: Annotated[float, Field(ge=0, lt=1)] = 0.85
    """See the job's `strategy.served_average`."""
    loss_scale: Positive = 1.0
    """Factor on the loss; the devices' learning rate is divided by it."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the requests to devices that they do not answer."""
    over_selection: Annotated[float, Field(ge=1, le=10)] = 1.0
    """See the job's `federated.over_selection`."""


class Datacenter(Section):
    """The datacenter's work in a tick."""

    steps: Count = 25
    """Steps of AdamW."""
    batch_size: Count = 64
    """Examples in a step."""
    lr: Positive = 3e-3
    """Learning rate of AdamW."""


class Zone(Section):
    """Hours of the day in which one zone's devices are available."""

    opens: Annotated[int, Field(ge=0, lt=HOURS)]
    closes: Annotated[int, Field(gt=0, le=HOURS)]

    @model_validator(mode="after")
    def _in_order(self) -> Zone:
        if self.closes <= self.opens:
            raise ValueError(f"a window closes after it opens, not {self.opens} to {self.closes}")
        return self


class Costs(Section):
    """Prices in cost units; by convention a federated round of a whole cohort costs one."""

    federated_round: Positive = 1.0
    datacenter_tick: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    client_evaluation: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.02
    """One device scoring one model."""


class Run(Section):
    """Length, budget and target of a run."""

    ticks: Count = 120
    """Length in hours."""
    budget: Positive = 50.0
    """Largest total cost, in cost units."""
    target_edge_share: Fraction | Literal["measured"] = 1.0
    """Share of the test distribution that is on the devices; "measured": as the split has it."""


class Scenario(Section):
    """A scenario."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]{0,47}$")]
    """Part of the figures' keys."""
    title: str = ""
    """Title in tables and charts."""
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = (1, 2, 3, 4, 5)
    """Seeds of data and training; every policy runs once with each."""
    data: Literal["letters", "mnist", "shakespeare", "heart", "diabetes", "languages"] = "letters"
    """The data set, see `data_sets.py`."""
    eval_data: Literal["public", "target"] = "public"
    """What the task's `eval_data()` returns: public rows, or rows that resemble the target."""
    split: Split = Split()
    model: Model = Model()
    federated: Federated = Federated()
    datacenter: Datacenter = Datacenter()
    windows: tuple[Zone, ...] = ()
    """Hours of each zone, in the zones' order; empty: all devices are always available."""
    costs: Costs = Costs()
    run: Run = Run()

    @model_validator(mode="after")
    def _split_fits_data(self) -> Scenario:
        kinds, split = DATA_SETS[self.data].kinds, self.split
        if split.public_classes > (kinds - split.zones if split.exclusive else kinds):
            raise ValueError(
                f"split.public_classes={split.public_classes} is more than the {kinds} of the data "
                f"set {self.data!r}"
                + (f", or leaves the devices of {split.zones} zone(s) too few" * split.exclusive)
            )
        if split.shift and self.data in ("mnist", "shakespeare"):
            raise ValueError(f"split.shift is for tables, not for {self.data!r}")
        if split.native and (split.zones > 1 or split.clients < kinds):
            raise ValueError(
                f"split.native needs one zone and at least {kinds} devices, one for each source"
            )
        return self

    @model_validator(mode="after")
    def _windows_fit(self) -> Scenario:
        if self.windows and len(self.windows) != self.split.zones:
            raise ValueError(
                f"{len(self.windows)} windows are given for {self.split.zones} zones; "
                "give one for each zone, or none"
            )
        smallest = self.split.clients // self.split.zones
        if self.federated.cohort > smallest:
            raise ValueError(
                f"federated.cohort={self.federated.cohort} is more than the {smallest} devices of "
                f"a zone (split.clients={self.split.clients}, zones={self.split.zones})"
            )
        return self

    def zones_at(self, tick: int) -> list[int]:
        """The zones whose devices are available in a tick."""
        if not self.windows:
            return list(range(self.split.zones))
        hour = tick % HOURS
        return [i for i, zone in enumerate(self.windows) if zone.opens <= hour < zone.closes]


def load(path: Path) -> Scenario:
    """Read a scenario file.

    Raises:
        JobError: one sentence naming the file, the key, and what is allowed.
    """
    return validated(read_table(path), path)


def read_table(path: Path) -> dict[str, Any]:
    """Parse a TOML file.

    Raises:
        JobError: it cannot be read.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise JobError(f"there is no scenario file {path}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise JobError(f"{path} cannot be read as TOML: {error}") from None


def validated(table: Mapping[str, Any], path: Path) -> Scenario:
    """The scenario of a table that was read from `path`.

    Raises:
        JobError: one sentence naming the file, the key, and what is allowed.
    """
    try:
        return Scenario.model_validate(table)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the scenario"
        message = first["msg"].removeprefix("Value error, ")
        more = error.error_count() - 1
        rest = f" ({more} more)" if more else ""
        raise JobError(f"{path}: {where}: {message[0].lower()}{message[1:]}{rest}") from None


def random_scenario(number: int, seeds: tuple[int, ...]) -> Scenario:
    """Scenario `number` of the random family.

    Each has one to three properties that make the public data useful or misleading, and a budget
    that may end before its time.
    """
    draw = random.Random(f"isthmus/regimes/{number}")
    complementary = draw.random() < 0.3
    night = draw.random() < 0.3
    zones = draw.choice((1, 2)) if night else 1
    public_classes = draw.randint(3, 10) if complementary else draw.choice((8, 13, 18, 26, 26))
    ticks = draw.choice((48, 72, 96, 144) if not night else (96, 144))
    up = draw.choice((6, 8, 12))
    begins = draw.randrange(0, HOURS - up + 1)
    step = up // zones
    clients = draw.randint(60, 120)
    dirichlet = round(math.exp(draw.uniform(math.log(0.1), math.log(0.5))), 3)
    rows = 16_000 if complementary else draw.choice((800, 1500, 3000, 5000))
    # The public rows then contain every row of these classes.
    exclusive = rows > public_classes * ROWS_PER_CLASS
    share = (26 - public_classes) / 26 if exclusive else 1.0
    return Scenario(
        name=f"random-{number}",
        seeds=seeds,
        split=Split(
            clients=clients,
            dirichlet=dirichlet,
            zones=zones,
            public_classes=public_classes,
            public_rows=rows,
            exclusive=exclusive,
            shift=draw.choice((0.0, 0.0, 0.3, 0.6, 1.0)),
            label_noise=draw.choice((0.0, 0.0, 0.1, 0.3)),
            swapped_classes=draw.choice((0.0, 0.0, 0.0, 0.3)) if not complementary else 0.0,
        ),
        windows=tuple(
            Zone(opens=begins + z * step, closes=begins + (z + 1) * step) for z in range(zones)
        )
        if night
        else (),
        costs=Costs(datacenter_tick=draw.choice((0.03, 0.1, 0.3))),
        run=Run(
            ticks=ticks,
            budget=round(ticks * draw.choice((0.3, 0.5, 0.8, 1.1)), 1),
            target_edge_share=round(share, 4),
        ),
    )


def max_transfer_weight(federated: Federated) -> float:
    """The job's `strategy.transfer_weight`: larger weights do not converge (docs/strategy.md)."""
    return 1.2 / (federated.lr * federated.steps)


def job_for(scenario: Scenario, seed: int, folder: Path, changes: dict[str, Any]) -> Job:
    """The job that trains in a scenario; `changes` are keys of its `strategy` that a policy sets.

    They may include `outer_lr` and `outer_momentum` of the server optimizer. `folder` has the files
    of the data set.

    Raises:
        TaskError: the data set cannot be read.
        JobError: a change is not a valid key of the job.
    """
    federated, datacenter, costs = scenario.federated, scenario.datacenter, scenario.costs
    options = {
        "lr": changes.get("outer_lr", federated.outer_lr),
        "momentum": changes.get("outer_momentum", federated.outer_momentum),
        "nesterov": changes.get("outer_momentum", federated.outer_momentum) > 0,
    }
    share = scenario.run.target_edge_share
    if share == "measured":
        share = edge_share(scenario.data, folder.resolve(), scenario.split.model_dump(), seed)
    strategy = {k: v for k, v in changes.items() if not k.startswith("outer_")}
    table = {
        "name": scenario.name,
        "seed": seed,
        "rounds": scenario.run.ticks,
        "seconds": scenario.run.ticks * HOUR,
        "budget": scenario.run.budget,
        "task": {
            "source": "regime_simulation.data_sets:Simulated",
            "data": str(folder.resolve()),
            "settings": {
                "data": scenario.data,
                "eval_data": scenario.eval_data,
                "hidden": list(scenario.model.hidden),
                "client_lr": federated.lr / federated.loss_scale,
                "loss_scale": federated.loss_scale,
                "datacenter_lr": datacenter.lr,
                "split": scenario.split.model_dump(),
                "split_seed": seed,
            },
        },
        "strategy": {
            "target_edge_share": share,
            "served_average": federated.served_average,
            "transfer_weight": max_transfer_weight(federated),
            "server_optimizer": {"name": "SGD", "options": options},
            "windows": [
                {
                    "side": "federated",
                    "opens": f"{zone.opens:02d}:00",
                    "closes": f"{zone.closes % HOURS:02d}:00",
                }
                for zone in scenario.windows
            ],
            **strategy,
        },
        "federated": {
            "cohort": federated.cohort,
            "local_steps": federated.steps,
            "batch_size": federated.batch_size,
            "over_selection": federated.over_selection,
            "secure_aggregation": False,
        },
        "datacenter": {"steps": datacenter.steps, "batch_size": datacenter.batch_size},
        "time": {"join_seconds": 5.0},  # real time, in which no device can join
        "prices": {
            "client_update": costs.federated_round / federated.cohort,
            "datacenter_step": costs.datacenter_tick / datacenter.steps,
            "client_evaluation": costs.client_evaluation,
        },
    }
    try:
        return Job.model_validate(table)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise JobError(f"scenario {scenario.name!r}: {where}: {first['msg']}") from None
