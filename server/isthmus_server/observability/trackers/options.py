"""The trackers that `--track` names."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus_server.observability.sinks import EventSink
from isthmus_server.observability.trackers.mlflow_server import MlflowServer
from isthmus_server.observability.trackers.tensorboard_files import TensorBoardFiles
from isthmus_server.observability.trackers.traces import TraceSink
from isthmus_server.observability.trackers.tracker import Tracker, TrackerSink
from isthmus_server.observability.trackers.weights_and_biases import WeightsAndBiases
from isthmus_server.storage.records import EndedAttempt

_MODULES = {
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "wandb": "wandb",
    "otel": "opentelemetry.exporter.otlp.proto.http",
}
"""A module of the package that each tracker needs; its extra has the tracker's name."""

TrackedBy = Callable[[Job, str, Path, Callable[[], Iterable[EndedAttempt]]], EventSink]
"""Makes a tracker's sink for a run, from its job, id, directory and earlier attempts."""


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package that it is in
        return False


def tracker_of(option: str) -> tuple[str, TrackedBy]:
    """The name of a tracker and what makes its sinks, from `NAME` or `NAME=WHERE`.

    Raises:
        UserError: there is no such tracker, or its package is not installed.
    """
    name, _, where = option.partition("=")
    if name not in _MODULES or (where and name == "tensorboard"):
        raise UserError(
            f"--track {name!r} is none of tensorboard, mlflow, mlflow=URI, wandb, wandb=PROJECT, "
            "otel and otel=URL"
        )
    if name == "otel" and where and not where.startswith(("http://", "https://")):
        raise UserError("--track otel=URL takes the http:// or https:// URL of a collector")
    if not _is_installed(_MODULES[name]):
        raise UserError(
            f"--track {name} needs packages that are not installed; pip install 'isthmus[{name}]'"
        )
    if name == "otel":
        return name, lambda job, run_id, *_: TraceSink(job.name, run_id, where or None)

    def tracker() -> Tracker:
        if name == "tensorboard":
            return TensorBoardFiles()
        return MlflowServer(where or None) if name == "mlflow" else WeightsAndBiases(where or None)

    return name, functools.partial(_tracker_sink, name, tracker)


def _tracker_sink(
    name: str,
    tracker: Callable[[], Tracker],
    job: Job,
    run_id: str,
    directory: Path,
    earlier: Callable[[], Iterable[EndedAttempt]],
) -> TrackerSink:
    return TrackerSink(name, tracker(), job, run_id, directory, earlier)
