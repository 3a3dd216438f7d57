"""The trackers that `--track` names: those of Isthmus, and those of other packages.

A package provides a tracker by an entry point of the group `isthmus.trackers`: a name, which users
write as `--track NAME` or `--track NAME=TARGET`, and a function or class that is called with the
target, or None, and returns a `Tracker` of one run. It is called once when the command starts, to
find out whether the tracker can be used, and once for each run. It raises `UserError` if it cannot.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from isthmus.errors import UserError
from isthmus.extras import install_line
from isthmus.job import Job
from isthmus.provided import make_provided
from isthmus_server.observability.sinks import EventSink
from isthmus_server.observability.trackers.mlflow_server import MlflowServer
from isthmus_server.observability.trackers.tensorboard_files import TensorBoardFiles
from isthmus_server.observability.trackers.traces import TraceSink
from isthmus_server.observability.trackers.tracker import Tracker, TrackerSink
from isthmus_server.observability.trackers.weights_and_biases import WeightsAndBiases
from isthmus_server.storage.records import EndedAttempt

TRACKERS = "isthmus.trackers"
"""Entry-point group of trackers."""

TrackedBy = Callable[[Job, str, Path, Callable[[], Iterable[EndedAttempt]]], EventSink]
"""Makes a tracker's sink for a run, from its job, id, directory and earlier attempts."""

_METHODS = ("begin", "log", "end")
"""Methods of a `Tracker`."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Names, which are also those of files."""


class EventTracker(Protocol):
    """A tracker that gets the events of runs themselves, in place of a round's figures."""

    def sink(self, job: Job, run_id: str) -> EventSink:
        """What gets the events of one run."""
        ...


def tracker_of(option: str) -> tuple[str, TrackedBy]:
    """The name of a tracker and what makes its sinks, from `NAME` or `NAME=TARGET`.

    Raises:
        UserError: there is no such tracker, or it cannot be used.
    """
    name, _, target = option.partition("=")
    shown = f"--track {name!r}"

    def made() -> Any:
        return make_provided(TRACKERS, name, shown, target or None)

    tracker = made()
    if not _NAME.fullmatch(name):
        raise UserError(f"{shown} is not a name of letters, digits, dots, dashes and underscores")
    if callable(getattr(tracker, "sink", None)):
        events: EventTracker = tracker
        return name, lambda job, run_id, *_: events.sink(job, run_id)
    if missing := [each for each in _METHODS if not callable(getattr(tracker, each, None))]:
        raise UserError(f"{shown} is not a tracker: it has no {missing[0]}()")
    return name, lambda *run: TrackerSink(name, made(), *run)


# -- the entry points of Isthmus -------------------------------------------------------------------


def tensorboard(target: str | None) -> Tracker:
    """Event files in the run's directory.

    Raises:
        UserError: there is a target, or the package is not installed.
    """
    if target is not None:
        raise UserError("--track tensorboard takes no target: it writes to the run's directory")
    _check_installed("tensorboard", "tensorboard")
    return TensorBoardFiles()


def mlflow(target: str | None) -> Tracker:
    """A run of an MLflow server, by default of the one that its environment names.

    Raises:
        UserError: the package is not installed.
    """
    _check_installed("mlflow", "mlflow")
    return MlflowServer(target)


def wandb(target: str | None) -> Tracker:
    """A run of Weights & Biases, by default of the project with the job's name.

    Raises:
        UserError: the package is not installed.
    """
    _check_installed("wandb", "wandb")
    return WeightsAndBiases(target)


def otel(target: str | None) -> EventTracker:
    """Traces for a collector, by default the one that OpenTelemetry's environment names.

    Raises:
        UserError: the target is no URL, or a package is not installed.
    """
    if target is not None and not target.startswith(("http://", "https://")):
        raise UserError("--track otel=URL takes the http:// or https:// URL of a collector")
    _check_installed("otel", "opentelemetry.exporter.otlp.proto.http")
    return TraceCollector(target)


class TraceCollector:
    """An OpenTelemetry collector, as an `EventTracker`."""

    def __init__(self, url: str | None) -> None:
        """`url` of the collector; None for that of the environment."""
        self._url = url

    def sink(self, job: Job, run_id: str) -> TraceSink:
        """Sends the traces of one run."""
        return TraceSink(job.name, run_id, self._url)


def _check_installed(name: str, module: str) -> None:
    """Refuse a tracker whose package is missing; its extra has the tracker's name.

    Raises:
        UserError: with the line that installs it.
    """
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # of a package that it is in
        found = None
    if found is None:
        raise UserError(
            f"--track {name} needs packages that are not installed; {install_line(name)}"
        )
