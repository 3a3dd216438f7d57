"""Train a job in simulation, and read what its log says.

The rounds are trained by the simulation, which this package does not import: it is found by an
entry point, as the datacenter's part of a plan is.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Protocol

from isthmus.errors import JobError, UserError
from isthmus.job import Job
from isthmus.job.planned import PLANS
from isthmus.provided import load_provided, provided
from isthmus_server.plan.round_log import RoundLog
from isthmus_server.storage.store import Store
from isthmus_server.strategy.observation import unknown_metric


class TrainTrial(Protocol):
    """The simulation's part of a plan."""

    def __call__(self, job: Job, base: Path, directory: Path, rounds: int) -> None:
        """Train the first rounds of a job in a new run directory."""
        ...


class UnknownTarget(UserError):
    """The job's target is a metric that the task does not have, so no policy can be trained."""


def refuse_private(job: Job, option: str) -> None:
    """Refuse a job whose data may be used only so often.

    Args:
        job: that would be trained.
        option: of the command that would train it.

    Raises:
        JobError: with what to do.
    """
    tables = {
        "[privacy]": job.privacy,
        "[federated.privacy]": job.federated.privacy,
        "[datacenter.privacy]": job.datacenter.privacy,
    }
    for name, table in tables.items():
        if table is not None:
            raise JobError(
                f"{option} trains on the data, and {name} accounts for each training of them; "
                f"leave {option} out, or simulate with data that are nobody's: isthmus simulate "
                "--public-data"
            )


def train_trial(what: str) -> TrainTrial:
    """What the simulation's package has for plans; `what` needs it.

    Raises:
        UserError: the package is not installed.
    """
    if "simulation" not in provided(PLANS):
        raise UserError(f"{what} needs the simulation's package; install isthmus again")
    found: TrainTrial = load_provided(PLANS, "simulation", "the simulation's part of a plan")
    return found


def simulated_log(train: TrainTrial, job: Job, base: Path, scratch: Path, rounds: int) -> RoundLog:
    """The log of the first rounds of a job, trained in a new folder below `scratch`.

    Raises:
        UnknownTarget: the first round does not have the job's target.
        UserError: it cannot be trained.
    """
    directory = Path(tempfile.mkdtemp(prefix="run-", dir=scratch)) / "run"
    try:
        train(job, base, directory, rounds)
    except UserError:
        _check_target(job, directory)
        raise
    return log_in(directory)


def log_in(directory: Path) -> RoundLog:
    """The log of the run in a directory."""
    with contextlib.closing(Store.open(directory)) as store:
        return RoundLog.of(store)


def _check_target(job: Job, directory: Path) -> None:
    """Refuse a target that the rounds in a directory do not have.

    Raises:
        UnknownTarget: with the metrics that they have.
    """
    target = job.strategy.target_metric
    if target is None:
        return
    try:
        rounds = log_in(directory).rounds
    except UserError:  # it had not begun
        return
    known = {name for each in rounds for name in each.record.metrics}
    if known and target.name not in known:
        raise UnknownTarget(unknown_metric(target.name, "strategy.target_metric.name", known))
