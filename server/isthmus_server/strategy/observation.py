"""Build a policy's observation from the job, the round log and the connected participants.

Everything is copied, so a policy that modifies its observation cannot affect the run.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, overload

from isthmus.errors import JobError
from isthmus.job import Job
from isthmus.job.measurements import BestModel
from isthmus.task.measurements.metrics import DEVICES
from isthmus_server.strategy.policy import (
    CURRENT,
    Comparison,
    Observation,
    PastRound,
)
from isthmus_server.strategy.round_spec import evaluates
from isthmus_server.strategy.windows import forecast


def observe(
    job: Job,
    history: Sequence[PastRound],
    *,
    spent: float,
    device_bytes: int,
    state: Mapping[str, Any],
    clients_ready: int,
    datacenters: Collection[str],
    groups: Mapping[str, int] | None = None,
    clients_ineligible: int = 0,
    seconds_until_quorum: float | None = None,
    others_may_come: bool = False,
    model_bytes: int,
    now: float,
    elapsed: float,
    models: Sequence[str] = (CURRENT,),
    comparisons: Sequence[Comparison] = (),
    epsilon_spent: float = 0.0,
) -> Observation:
    """Build the observation for the next round.

    Args:
        job: limits, prices, windows and the default size of a round.
        history: all committed rounds, oldest first.
        spent: price of everything so far, failed attempts included.
        device_bytes: bytes to and from devices so far, failed attempts included.
        state: the state of the policy's last committed plan.
        clients_ready: devices that have opened the run and may be invited.
        clients_ineligible: devices that have opened the run and may not be invited now: outside of
            their hours, or at the participation limit.
        seconds_until_quorum: seconds until enough of both for a quorum may be invited; None if
            never.
        others_may_come: whether there may be a quorum all the same, with devices that are known and
            not connected.
        datacenters: names of the datacenters that have opened the run.
        groups: devices that may be invited, by group.
        model_bytes: size of the encoded model.
        now: seconds since 1970, UTC.
        elapsed: duration of the run in seconds.
        models: names of the models that can be compared and started from.
        comparisons: comparisons made for this round so far.
        epsilon_spent: of the device that was asked most, with `[privacy]`.
    """
    seconds_left = None if job.seconds is None else job.seconds - elapsed
    return Observation(
        round=len(history) + 1,
        rounds=job.rounds,
        # A policy may change what it gets, and must not change the run's own.
        history=_CopiedHistory(history),
        clients_ready=clients_ready,
        clients_ineligible=clients_ineligible,
        seconds_until_quorum=seconds_until_quorum,
        others_may_come=others_may_come,
        datacenter_ready=bool(datacenters),
        datacenters=len(datacenters),
        datacenter_names=sorted(datacenters),
        spent=spent,
        budget=job.budget,
        state=dict(state),
        cohort=job.federated.cohort,
        over_selection=job.federated.over_selection,
        quorum=job.federated.needed,
        datacenter_steps=job.datacenter.steps,
        merge=job.strategy.merge,
        can_measure_gradients=job.federated.mode == "rounds"
        and job.federated.flower is None
        and job.federated.aggregation == "mean"
        and job.federated.robust is None
        and job.federated.codec is None
        and job.federated.control_variates is None
        and job.privacy is None
        and job.federated.privacy is None,
        can_compare=can_compare(job),
        can_sum_by_group=job.federated.groups is not None,
        groups=dict(groups or {}),
        client_price=job.prices.client_update,
        step_price=job.prices.datacenter_step,
        evaluation_devices=job.evaluation.devices if evaluates(job, len(history) + 1) else 0,
        comparison_price=job.prices.client_evaluation,
        client_bytes=_bytes_per_device(history, model_bytes),
        model_bytes=model_bytes,
        now=now,
        elapsed=elapsed,
        seconds_left=seconds_left,
        bytes_left=None if job.device_bytes is None else job.device_bytes - device_bytes,
        forecast={
            "datacenter": forecast(job.strategy.windows, "datacenter", now, seconds_left),
            "federated": forecast(job.strategy.windows, "federated", now, seconds_left),
        },
        target=job.strategy.target_metric,
        keep_best=job.evaluation.keep_best,
        patience=job.evaluation.patience,
        models=tuple(models),
        comparisons=tuple(comparisons),
        epsilon=None if job.privacy is None else job.privacy.epsilon,
        epsilon_spent=epsilon_spent,
    )


def metric_of(past: PastRound, name: str, key: str) -> float:
    """A held-out metric of an evaluated round, which a key of the job names.

    Raises:
        JobError: the task has no such metric.
    """
    if name not in past.metrics:
        raise JobError(unknown_metric(name, key, past.metrics))
    return past.metrics[name]


def best_round(history: Sequence[PastRound], best: BestModel) -> PastRound | None:
    """The evaluated round with the best model, the earliest of equal ones; None before any.

    Raises:
        JobError: the task has no such metric.
    """
    found = None
    for past in history:
        if improves(past.metrics, found, best):
            found = past
    return found


def improves(metrics: Mapping[str, float], previous: PastRound | None, best: BestModel) -> bool:
    """Whether a round with these metrics has a better model than the best one before, if any.

    Not if it was not evaluated, if its evaluation on devices failed, or for NaN.

    Raises:
        JobError: the task has no such metric.
    """
    failed = best.name.startswith(DEVICES) and best.name not in metrics
    if not metrics or failed:
        return False
    if best.name not in metrics:
        raise JobError(unknown_metric(best.name, "evaluation.keep_best.name", metrics))
    value = metrics[best.name]
    return best.improves(value, previous.metrics[best.name]) if previous else not math.isnan(value)


def unknown_metric(name: str, key: str, known: Collection[str]) -> str:
    """The sentence for a key of the job that names a metric which the task does not have."""
    if not known:
        return (
            f"{key}={name!r} follows a metric, and nothing evaluates the model; add eval_data() to "
            "the task, or validation_data() and set evaluation.devices"
        )
    return f"{key}={name!r} is not a held-out metric of the task; it has {', '.join(sorted(known))}"


class _CopiedHistory(Sequence[PastRound]):
    """A history that copies a round on first access, because runs have thousands of them."""

    def __init__(self, history: Sequence[PastRound]) -> None:
        self._history = history
        self._copies: dict[int, PastRound] = {}

    def __len__(self) -> int:
        return len(self._history)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # a policy may change its copies

    @overload
    def __getitem__(self, index: int) -> PastRound: ...

    @overload
    def __getitem__(self, index: slice) -> list[PastRound]: ...

    def __getitem__(self, index: int | slice) -> PastRound | list[PastRound]:
        positions = range(len(self._history))[index]
        if isinstance(positions, range):
            return [self[position] for position in positions]
        if positions not in self._copies:
            self._copies[positions] = _copy_of(self._history[positions])
        return self._copies[positions]


def _copy_of(past: PastRound) -> PastRound:
    return dataclasses.replace(
        past,
        metrics=dict(past.metrics),
        training={name: dict(figures) for name, figures in past.training.items()},
        norms=dict(past.norms),
        gradients=copy.deepcopy(past.gradients),
        groups=dict(past.groups),
        comparisons=copy.deepcopy(past.comparisons),
    )


def _bytes_per_device(history: Sequence[PastRound], model_bytes: int) -> float:
    """Return the recent maximum of bytes per device and round, at least a model and an update.

    Gradients that were measured are not counted: `limits` adds those of the planned round.
    """
    moved = [past.bytes_each - (model_bytes if past.gradients else 0) for past in history[-10:]]
    return float(max([2 * model_bytes, *moved]))


def can_compare(job: Job) -> bool:
    """Whether devices may score models for a policy: not without noise where a job promises it."""
    if job.federated.privacy is not None:
        return False
    return job.privacy is None or bool(job.privacy.measurements)
