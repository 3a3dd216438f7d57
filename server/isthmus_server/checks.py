"""The server's part of `isthmus job check`: find errors in a job before it is run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from isthmus.errors import JobError
from isthmus.job import Job
from isthmus.task import Task
from isthmus.task.held_out import HeldOut
from isthmus.task.measurements.bounded_means import evaluation_vector
from isthmus.task.measurements.evaluation import EvaluationVector, check_evaluates_on_devices
from isthmus.task.not_finite import not_finite_in_words
from isthmus.task.scoring import build_start_model, evaluate
from isthmus.task.scoring.pairs import pairs_in_words
from isthmus.tensors.division import divide
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.tensors.structure import Structure
from isthmus_privacy.compression.codecs import check_codecs
from isthmus_privacy.compression.sum_codecs import check_sums
from isthmus_server.budgets.run_budgets import check_budgets
from isthmus_server.model.optimizers import check_round_length, make_optimizer
from isthmus_server.regimes.run_aggregation import aggregation_of
from isthmus_server.regimes.secure_sums.robust_rule import check_robust
from isthmus_server.rounds.measurements.followed_metrics import (
    check_apart,
    check_followed_metrics,
    followed_metrics,
    quantiles_beyond,
)
from isthmus_server.strategy.loading import check_participants, load_policy
from isthmus_server.strategy.observation import unknown_metric
from isthmus_server.strategy.policy import Policy
from isthmus_server.strategy.selection import CheckedSelection

if TYPE_CHECKING:
    from torch.utils.data import Dataset


def check(job: Job, task: Task, base: Path) -> str:
    """Build the policy, model, optimizer and aggregation of a job, and evaluate one batch.

    Returns what was tried.

    Raises:
        UserError: one of them cannot be used, with the reason.
    """
    policy = check_settings(job)
    model = build_start_model(task, job, base)
    division = divide(model, job.exchange)
    make_optimizer(job.strategy.server_optimizer, list(model.parameters()))
    check_round_length(job, task, lambda: model)
    robust = check_exchanged(job, division.exchanged)
    vector = check_measured(job, task, policy)
    on_devices = [] if vector is None else vector.figure_names
    batch = job.evaluation.batch_size
    structure = Structure.of(model)
    pairs = ""

    def measure(data: Dataset[Any], count: int) -> dict[str, float]:
        nonlocal pairs
        averages = evaluate(task, model, data, range(min(count, batch)), batch, torch.device("cpu"))
        pairs = pairs or pairs_in_words(task, model, data, count)
        return averages.result()

    metrics = HeldOut(task).measure(measure)
    structure.check(model)
    if vector is not None:
        check_apart(metrics, vector)
    for key, name in followed_metrics(job, policy).items():
        if name not in {*metrics, *on_devices}:
            raise JobError(unknown_metric(name, key, [*metrics, *on_devices]))
    tried = []
    if metrics:
        batch_tried = f"one batch of held-out data ({', '.join(sorted(metrics))})"
        if division.personal.size:
            batch_tried += ", with the initial values of what is personal"
        tried.append(batch_tried + not_finite_in_words(metrics) + pairs)
    if vector is not None:
        tried.append(_on_devices(job, vector))
    if not tried:
        tried.append("no evaluation: eval_data() returns None and evaluation.devices is 0")
    return "; ".join([*tried, *_limits_of_updates(job), *robust])


def check_settings(job: Job, ranks: int | None = None) -> Policy:
    """Refuse settings that cannot be used, whatever the model; returns the job's policy.

    `ranks` is the number of ranks of the datacenter, by default `datacenter.ranks`.

    Raises:
        UserError: with the reason.
    """
    policy = load_policy(job.strategy)
    _check_population(job)
    check_participants(job, policy, _devices(job), ranks)
    CheckedSelection(job.federated)
    if 0 < job.federated.clients < job.federated.cohort:
        raise JobError(
            f"federated.cohort={job.federated.cohort} is above federated.clients="
            f"{job.federated.clients}, the devices that `isthmus run` starts; lower one or raise "
            "the other"
        )
    return policy


def check_exchanged(job: Job, layout: TensorLayout) -> list[str]:
    """Refuse sums, codecs, rules and budgets that cannot be used for an exchange set.

    Returns what is to be known of a robust rule.

    Raises:
        UserError: with the reason.
    """
    check_sums(job, layout)
    aggregation_of(job.federated, layout)
    robust = check_robust(job.federated)
    check_codecs(job)
    check_budgets(job)
    return robust


def _on_devices(job: Job, vector: EvaluationVector) -> str:
    """What devices will measure, and what of it no round can have."""
    asked = job.evaluation.devices
    started = max(job.federated.clients, job.simulation.clients or 0)
    present = min(asked, started) if job.federated.clients else asked
    beyond = quantiles_beyond(present, vector)
    measured = [name for name in vector.figure_names if name not in beyond]
    said = f"{asked} devices will evaluate ({', '.join(measured)})"
    if vector.left_out:
        said += f", but not {', '.join(vector.left_out)}, which have no bounds ([privacy])"
    for least in sorted(set(beyond.values())):
        names = [name for name, needed in beyond.items() if needed == least]
        said += f"; no round will have {', '.join(names)}: {least} devices have to evaluate"
    if beyond and present < asked:
        said += f", and there are {present}"
    return said


def _limits_of_updates(job: Job) -> list[str]:
    """How the job makes the sum of devices' updates another than that of what they trained."""
    federated = job.federated
    if job.privacy is not None:
        return []
    limits = []
    if federated.secure_aggregation and federated.clip is not None:
        limits.append(
            f"elements of updates outside of -{federated.clip:g} to {federated.clip:g} will be "
            f"clipped (federated.clip), and the run ends where more than "
            f"{federated.max_clipped:.2%} were"
        )
    same = federated.privacy is not None or federated.control_variates is not None
    if federated.max_examples is not None and not same:
        limits.append(
            f"devices with more than {federated.max_examples} examples will count as if they had "
            "so many (federated.max_examples)"
        )
    return limits


def _devices(job: Job) -> int:
    """The number of devices of a run on this machine, or of a simulation."""
    count = job.federated.clients or job.simulation.clients or 0
    if not count and job.datacenter.ranks and "simulation" in job.model_fields_set:
        return job.federated.cohort  # a simulation gets at least so many with --clients
    return count


def _check_population(job: Job) -> None:
    """Refuse a population that `isthmus simulate` refuses, in a job with a table for it.

    Raises:
        JobError: it is too small for a cohort, or too few of it are connected.
    """
    simulation = job.simulation
    federated = job.federated
    if "simulation" not in job.model_fields_set:
        return
    if simulation.clients is not None or federated.clients >= federated.cohort:
        simulation.connections(simulation.population(federated), federated.invited)


def check_measured(job: Job, task: Task, policy: Policy) -> EvaluationVector | None:
    """Refuse evaluations that the task has not, and a policy that follows what nobody measures.

    Returns what devices will measure, if they do.

    Raises:
        UserError: with the reason.
    """
    vector = _device_metrics(job, task)
    check_followed_metrics(job, task, policy, vector)
    return vector


def _device_metrics(job: Job, task: Task) -> EvaluationVector | None:
    """What devices will measure, if they do.

    Raises:
        UserError: the task has no validation data, or its `device_metrics` cannot be used.
    """
    if not job.evaluation.devices:
        return None
    check_evaluates_on_devices(job, task)
    return evaluation_vector(job, task)
