"""The job's table `[federated.flower]`, and the configuration in a Flower project next to the job.

Flower reads the defaults of an app's run config from the `pyproject.toml` of its project. A job
next to such a file has them too, if the file names the job's app.

The table stays here, and not in the package that runs the apps: every participant reads the whole
job, and refuses keys that it does not know, also where Flower is not installed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from isthmus.errors import JobError, cause_of
from isthmus.job.section import FREE, Section

APP = "federated.flower.app"
SERVER_APP = "federated.flower.server_app"
MAX_BYTES = "federated.flower.max_bytes"


class FlowerStrategy(Section):
    """A strategy of Flower, or one written for it."""

    name: str
    """Class name in `flwr.serverapp.strategy`, or `module:Name` of your own class."""
    options: Annotated[dict[str, Any], FREE] = Field(default={})
    """Keyword arguments of the class."""
    inner: FlowerStrategy | None = None
    """For one that wraps another, such as those for differential privacy: its `strategy`."""


class FlowerSection(Section):
    """Flower strategies and apps. The server, and devices for an `app`, need the extra `flower`."""

    strategy: FlowerStrategy = FlowerStrategy(name="FedAvg")
    """Computes the next model from a round's updates, instead of their weighted mean."""
    app: str | None = None
    """A ClientApp that trains on the devices instead of the task: `path/to/file.py:app`, relative
    to the job file, or `package.module:app`. The folder of the job file can be imported from."""
    server_app: str | None = None
    """A ServerApp that directs the whole run instead of Isthmus's rounds, named like `app`. Its
    `main` needs no task; it has neither a policy nor limits nor committed rounds."""
    config: Annotated[dict[str, bool | int | float | str], FREE] = Field(default={})
    """The apps' `context.run_config`, and each message's `content["config"]`. The defaults are in
    `[tool.flwr.app.config]` of a pyproject.toml next to the job file that names the same app."""
    max_bytes: Annotated[int, Field(ge=1)] = 4 << 30
    """Most bytes of a round's updates, cohort x model, which are all in the server's memory."""
    max_examples: Annotated[int, Field(ge=1)] = 1_000_000
    """Most examples that a device may claim: with an app, updates with more are refused. The weight
    of an update is the number that the device claims: a tight bound limits the weight of a
    dishonest device."""

    @model_validator(mode="after")
    def _apps_fit(self) -> FlowerSection:
        if self.app is None and evaluates(self):
            raise ValueError(
                "strategy.options.fraction_evaluate needs the devices' ClientApp, whose function "
                "under @app.evaluate() it calls; name it in app, or remove fraction_evaluate"
            )
        if self.server_app is None:
            return self
        if self.app is None:
            raise ValueError(
                f"server_app={self.server_app!r} sends messages to a ClientApp; name it in app"
            )
        fields = type(self).model_fields
        for name in ("strategy", "max_examples"):
            if getattr(self, name) != fields[name].default:
                raise ValueError(
                    f"{name} has no effect on server_app={self.server_app!r}, which has its own "
                    "strategy; remove one of them"
                )
        return self

    def named_code(self) -> Iterator[tuple[str, str]]:
        """Yield the keys and values `module:Name` of strategies that are not Flower's own."""
        strategy: FlowerStrategy | None = self.strategy
        key = "federated.flower.strategy"
        while strategy is not None:
            if ":" in strategy.name:
                yield f"{key}.name", strategy.name
            strategy = strategy.inner
            key = f"{key}.inner"


def evaluates(flower: FlowerSection) -> bool:
    """Whether the job asks its strategy for an evaluation on devices, by `fraction_evaluate`."""
    strategy: FlowerStrategy | None = flower.strategy
    while strategy is not None:
        if strategy.options.get("fraction_evaluate"):
            return True
        strategy = strategy.inner
    return False


def add_project_config(table: dict[str, Any], folder: Path) -> None:
    """Complete `federated.flower.config` of a job by the defaults of its app's project.

    Nested tables become keys with dots, in the project and in the job, as in Flower.

    Args:
        table: the job before it is validated; a value that it has stays.
        folder: the directory of the job file.

    Raises:
        JobError: `pyproject.toml` cannot be read, or a value is not true, false, a number or text.
    """
    federated = table.get("federated")
    flower = federated.get("flower") if isinstance(federated, dict) else None
    if not isinstance(flower, dict) or not isinstance(flower.get("app"), str):
        return
    own = flower.get("config", {})
    if not isinstance(own, dict):
        return  # refused with the other mistakes of the job
    path = folder / "pyproject.toml"
    defaults = dict(
        flattened(_project_config(path, flower["app"]), f"{path}, tool.flwr.app.config")
    )
    own = dict(flattened(own, "federated.flower.config"))
    if defaults or own:
        flower["config"] = {**defaults, **own}


def flattened(table: Mapping[str, Any], where: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables by their keys joined with dots.

    >>> dict(flattened({"lr": 0.1, "model": {"layers": 2}}, "config"))
    {'lr': 0.1, 'model.layers': 2}

    Raises:
        JobError: a value is not true, false, a number or text.
    """
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flattened(value, where, f"{prefix}{key}.")
        elif isinstance(value, bool | int | float | str):
            yield prefix + key, value
        else:
            raise JobError(
                f"{where}.{prefix}{key}={value!r}: must be true, false, a number or text, which is "
                "what a Flower app can be given"
            )


def _project_config(path: Path, app: str) -> Mapping[str, Any]:
    """`[tool.flwr.app.config]` of a project, empty if there is none or it is of another app."""
    try:
        project = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise JobError(f"{path} cannot be read: {cause_of(error)}") from None
    described: Any = project
    for key in ("tool", "flwr", "app"):
        described = described.get(key, {}) if isinstance(described, dict) else {}
    components = described.get("components", {}) if isinstance(described, dict) else {}
    component = components.get("clientapp", "") if isinstance(components, dict) else ""
    if not isinstance(component, str) or not is_same_app(app, component):
        return {}
    config = described.get("config", {})
    if not isinstance(config, dict):
        raise JobError(f"{path}, tool.flwr.app.config={config!r}: must be a table")
    return config


def is_same_app(source: str, component: str) -> bool:
    """Whether a job's app is the one that a project names.

    >>> is_same_app("quickstart/flowerapp/client.py:app", "flowerapp.client:app")
    True
    """
    where, _, name = source.rpartition(":")
    module, _, attribute = component.rpartition(":")
    dotted = where.removesuffix(".py").replace("/", ".") if where.endswith(".py") else where
    return name == attribute and f".{dotted}".endswith(f".{module}")
