"""Metrics that decide something: the best model, the end of a run, or a plan.

A job that follows one which no round can have is refused before it is trained, as far as the task's
class shows it; `isthmus job check` also computes the metrics on central data, by their names.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from isthmus.errors import JobError, TaskError
from isthmus.job import Job
from isthmus.task import Task
from isthmus.task.definition import PUBLIC, defines
from isthmus.task.measurements.evaluation import EvaluationVector
from isthmus.task.measurements.metrics import CLIPPED, DEVICES, FEWEST, SPREAD
from isthmus_server.strategy.observation import unknown_metric
from isthmus_server.strategy.policies.adaptive import Adaptive
from isthmus_server.strategy.policy import Policy


def followed_metrics(job: Job, policy: Policy) -> dict[str, str]:
    """The names of these metrics, by the keys of the job that name them."""
    target = job.strategy.target_metric
    best = job.evaluation.keep_best
    named = {
        "strategy.settings.metric": getattr(policy, "metric", None),
        "strategy.target_metric.name": None if target is None else target.name,
        "evaluation.keep_best.name": None if best is None else best.name,
    }
    return {key: name for key, name in named.items() if name is not None}


def known_metrics(task: Task, vector: EvaluationVector | None) -> list[str] | None:
    """Names of all metrics that a round can have; None if central data decide.

    `vector` is what devices measure, if they do.
    """
    if defines(task, "eval_data") or defines(task, "public_eval"):
        return None
    return [] if vector is None else vector.figure_names


def check_apart(central: Collection[str], vector: EvaluationVector) -> None:
    """Refuse a central metric with the name of one of devices, which would take its place.

    Raises:
        TaskError: with the name.
    """
    for name in vector.figure_names:
        if name in central:
            raise TaskError(
                f"metrics() has a figure {name!r}, which is the name of a metric that devices "
                "measure; rename it"
            )


def quantiles_beyond(devices: int, vector: EvaluationVector) -> dict[str, int]:
    """Quantiles that no evaluation by so many devices has, and how many devices each needs."""
    known = set(vector.figure_names)
    needed = {
        f"{DEVICES}{metric}_{suffix}": math.ceil(FEWEST / min(share, 1 - share) - 1e-9)
        for metric in vector.metrics
        for suffix, share in SPREAD.items()
    }
    return {name: least for name, least in needed.items() if name in known and devices < least}


def check_followed_metrics(
    job: Job, task: Task, policy: Policy, vector: EvaluationVector | None
) -> None:
    """Refuse a policy, or a target, that follows a metric which no round will have.

    Raises:
        JobError: with the key to change.
    """
    known = known_metrics(task, vector)
    name_of_task = type(task).__name__
    if known is not None and job.strategy.target_metric is None and isinstance(policy, Adaptive):
        raise JobError(
            'strategy.policy="adaptive" follows the loss on eval_data(), which '
            f"{name_of_task} does not have; add it, or choose another policy"
        )
    for key, name in followed_metrics(job, policy).items():
        if known is not None:
            if name not in known:
                raise JobError(unknown_metric(name, key, known))
            _check_always_there(name, key, job, vector)
        elif name.startswith(DEVICES):
            _check_device_metric(name, key, vector)
            _check_always_there(name, key, job, vector)
        elif not defines(task, "eval_data") and not name.startswith(PUBLIC):
            raise JobError(
                f"{key}={name!r} is a metric on eval_data(), which {name_of_task} does not have; "
                f"add it, or name one of public_eval(), such as {PUBLIC}loss"
            )


def _check_device_metric(name: str, key: str, vector: EvaluationVector | None) -> None:
    """Refuse a metric that devices do not measure, where a round has central ones.

    Raises:
        JobError: with the key to change.
    """
    if vector is None:
        raise JobError(
            f"{key}={name!r} is measured on devices, and evaluation.devices is 0; set it"
        )
    if name not in vector.figure_names:
        raise JobError(unknown_metric(name, key, vector.figure_names))


def _check_always_there(name: str, key: str, job: Job, vector: EvaluationVector | None) -> None:
    """Refuse a figure that no round has with so few devices, or only rounds that clipped values.

    Raises:
        JobError: with the key to change.
    """
    if vector is None:
        return
    for metric in vector.metrics:
        if name == f"{DEVICES}{metric}{CLIPPED}":
            raise JobError(
                f"{key}={name!r} is only there in rounds in which values were clipped; name "
                f"{DEVICES}{metric}, and widen its bounds"
            )
    asked = job.evaluation.devices
    needed = quantiles_beyond(asked, vector).get(name)
    if needed is not None:
        raise JobError(
            f"{key}={name!r} needs {needed} devices that evaluate, {FEWEST} of them beyond it, and "
            f"evaluation.devices={asked}; raise it, or name {name.rpartition('_')[0]}"
        )
