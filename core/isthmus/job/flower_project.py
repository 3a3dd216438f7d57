"""The configuration of a Flower app in the `pyproject.toml` of its project.

Flower reads the defaults of an app's run config from there. A job next to such a file has them too,
if the file names the job's app.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from isthmus.errors import JobError


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
        project = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise JobError(f"{path} cannot be read: {error}") from None
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
