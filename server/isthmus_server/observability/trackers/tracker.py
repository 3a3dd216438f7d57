"""What a tracker receives of a run, whatever its library."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from isthmus.job import Job
from isthmus_server.observability.run_figures import OUTCOMES, merged
from isthmus_server.observability.sinks import EventSink
from isthmus_server.storage.events import Event, RoundCommitted, RunFailed, RunFinished
from isthmus_server.storage.records import EndedAttempt, RoundRecord, StepFigures

REGIMES = ("datacenter", "federated", "hybrid")
"""The figure `regime` is the position in this list."""

_FOLDER = "tracking"


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """A run, as trackers know it."""

    run_id: str
    name: str
    """The job's name: the experiment or group of its runs."""
    parameters: Mapping[str, str | int | float | bool]
    """The job's keys, such as `federated.cohort`."""
    folder: Path
    """Where the tracker may write, if it makes the folder; it belongs to the run."""
    earlier: str
    """What `begin` returned when the run was tracked before; empty for the first time."""


class Tracker(Protocol):
    """One tracker's side of one run; all calls come from one thread."""

    def begin(self, run: TrackedRun) -> str:
        """Begin, or continue; returns the tracker's id of the run."""
        ...

    def log(self, round_: int, figures: Mapping[str, float]) -> None:
        """Log the figures of a committed round, or of the final model."""
        ...

    # A tracker may also have `log_step(step, figures)`, for figures of single optimizer steps of a
    # datacenter; it is called before `log` for the round that they belong to.

    def end(self, failed: bool) -> None:
        """Write everything out. It is not known of an interrupted run whether it goes on."""
        ...


class TrackerSink(EventSink):
    """Passes the committed rounds of one run to a tracker.

    Guarantees:
      * a round is logged once, also if the run is interrupted and continued: the run's folder
        `tracking` has the tracker's id and the last round;
      * rounds that were committed before the run was tracked are logged too.
    """

    hang_seconds = 300.0
    close_seconds = 30.0

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        job: Job,
        run_id: str,
        directory: Path,
        earlier: Callable[[], Iterable[EndedAttempt]] = tuple,
    ) -> None:
        """Prepare; the tracker begins with the first event, in the sink's thread.

        Args:
            name: of the tracker.
            tracker: the tracker.
            job: the job.
            run_id: the run.
            directory: the run's directory.
            earlier: reads the attempts that ended before.
        """
        self.name = name
        self._tracker = tracker
        self._job = job
        self._run_id = run_id
        self._folder = directory / _FOLDER
        self._state = self._folder / f"{name}.json"
        self._earlier: Callable[[], Iterable[EndedAttempt]] | None = earlier
        self._id = ""
        self._logged = 0
        self._spent = 0.0
        self._failed = False

    def __call__(self, event: Event) -> None:
        """Log a committed round."""
        if self._earlier is not None:
            earlier = self._earlier
            self._earlier = None
            self._begin(earlier())
        match event:
            case RoundCommitted():
                self._log(event.record)
            case RunFinished(final=final) if final is not None and final.metrics:
                figures = {f"final/{name}": value for name, value in final.metrics.items()}
                self._tracker.log(max(self._logged, 1), figures)
            case RunFailed():
                self._failed = True

    def close(self) -> None:
        """Write everything out."""
        if self._earlier is None:
            self._tracker.end(self._failed)

    def _begin(self, earlier: Iterable[EndedAttempt]) -> None:
        self._folder.mkdir(exist_ok=True)
        state: dict[str, Any] = {}
        if self._state.exists():
            state = json.loads(self._state.read_text(encoding="utf-8"))
        run = TrackedRun(
            run_id=self._run_id,
            name=self._job.name,
            parameters=dict(parameters_of(self._job)),
            folder=self._folder / self.name,
            earlier=state.get("id", ""),
        )
        self._id = self._tracker.begin(run)
        last = state.get("round", 0)
        self._save(last)
        for record in earlier:
            if isinstance(record, RoundRecord):
                if record.round > last:
                    self._log(record)
                else:
                    self._spent += record.cost.price

    def _log(self, record: RoundRecord) -> None:
        if record.round <= self._logged:
            return
        self._spent += record.cost.price
        log_step = getattr(self._tracker, "log_step", None)
        if log_step is not None:
            for prefix, steps in _prefixed(record.step_figures):
                for each in steps:
                    log_step(each.step, step_figures_of(prefix, each))
        self._tracker.log(record.round, figures_of(record, self._spent))
        self._save(record.round)

    def _save(self, round_: int) -> None:
        self._logged = round_
        state = json.dumps({"id": self._id, "round": round_})
        temporary = self._state.with_suffix(".tmp")
        temporary.write_text(state, encoding="utf-8")
        temporary.replace(self._state)


def figures_of(record: RoundRecord, spent: float) -> dict[str, float]:
    """The figures of a committed round by name; `spent` is the cost of all rounds so far."""
    outcomes = [receipt.outcome for receipt in record.receipts]
    figures = {
        **{f"metrics/{name}": value for name, value in record.metrics.items()},
        **{
            f"training/{regime}/{name}": value
            for regime, training in record.training.items()
            for name, value in training.items()
        },
        **{f"datacenter/{name}": value for name, value in merged(record.profile.values()).items()},
        **{f"participants/{outcome}": float(outcomes.count(outcome)) for outcome in OUTCOMES},
        "regime": float(REGIMES.index(record.regime)),
        "seconds": record.seconds,
        "cost/round": record.cost.price,
        "cost/spent": spent,
        "bytes/up": float(record.cost.bytes_up),
        "bytes/down": float(record.cost.bytes_down),
    }
    if record.epsilon is not None:
        figures["epsilon"] = record.epsilon
    return figures


def _prefixed(
    step_figures: Mapping[str, Sequence[StepFigures]],
) -> Iterator[tuple[str, Sequence[StepFigures]]]:
    """The figures of each datacenter, which is not named: several are numbered."""
    for number, name in enumerate(sorted(step_figures), 1):
        yield "steps" if len(step_figures) == 1 else f"steps/{number}", step_figures[name]


def step_figures_of(prefix: str, step: StepFigures) -> dict[str, float]:
    """The figures of a step of a datacenter, by name."""
    figures = {
        "loss": step.loss,
        "gradient_norm": step.gradient_norm,
        "units_per_second": step.units_per_second,
    }
    if step.learning_rate is not None:
        figures["learning_rate"] = step.learning_rate
    return {f"{prefix}/{figure}": value for figure, value in figures.items()}


def parameters_of(job: Job) -> Iterator[tuple[str, str | int | float | bool]]:
    """The job's keys and values that are set, with dots between tables; lists are JSON.

    The settings of the task are among them, as they are in the job.
    """

    def flat(prefix: str, value: Any) -> Iterator[tuple[str, str | int | float | bool]]:
        if isinstance(value, dict):
            for key, each in value.items():
                yield from flat(f"{prefix}.{key}" if prefix else key, each)
        elif isinstance(value, list):
            yield prefix, json.dumps(value)
        elif value is not None:
            yield prefix, value

    yield from flat("", job.model_dump(mode="json"))
