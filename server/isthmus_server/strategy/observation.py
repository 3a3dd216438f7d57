"""What a policy is shown, from the job, the round log and whoever is here; nothing else goes in.

Everything is copied: a policy that changes what it was given changes nothing.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, overload

from isthmus.job import Job
from isthmus_server.strategy.policy import (
    CURRENT,
    Comparison,
    Forecast,
    Observation,
    PastRound,
)
from isthmus_server.strategy.windows import forecast


def observe(
    job: Job,
    history: Sequence[PastRound],
    *,
    spent: float,
    device_bytes: int,
    state: Mapping[str, Any],
    clients_ready: int,
    datacenters: int,
    clients_resting: int = 0,
    enough_in: float | None = None,
    model_bytes: int,
    now: float,
    elapsed: float,
    models: Sequence[str] = (CURRENT,),
    comparisons: Sequence[Comparison] = (),
) -> Observation:
    """The observation for the next round.

    Args:
        job: limits, prices, windows and what a round is made of.
        history: all committed rounds, oldest first.
        spent: price of everything so far, failed attempts included.
        device_bytes: bytes to and from devices so far, failed attempts included.
        state: what the policy's last committed plan had.
        clients_ready: devices that have opened the run and may be asked.
        clients_resting: devices that have, and may not: outside of their hours, or asked enough.
        enough_in: seconds until the quorum of both may be asked; None if that is never.
        datacenters: how many datacenters have.
        model_bytes: size of the encoded model.
        now: seconds since 1970, UTC.
        elapsed: seconds that the run has gone on for.
        models: names of what may be compared and started from.
        comparisons: made for this round so far.
    """
    left = None if job.seconds is None else job.seconds - elapsed
    return Observation(
        round=len(history) + 1,
        rounds=job.rounds,
        history=_Copied(history),
        clients_ready=clients_ready,
        clients_resting=clients_resting,
        enough_in=enough_in,
        datacenter_ready=datacenters > 0,
        datacenters=datacenters,
        spent=spent,
        budget=job.budget,
        state=dict(state),
        cohort=job.federated.cohort,
        over_selection=job.federated.over_selection,
        needed=job.federated.needed,
        datacenter_steps=job.datacenter.steps,
        client_price=job.prices.client_update,
        step_price=job.prices.datacenter_step,
        visit_price=job.prices.client_evaluation,
        client_bytes=_bytes_of_a_device(history, model_bytes),
        model_bytes=model_bytes,
        now=now,
        elapsed=elapsed,
        seconds_left=left,
        bytes_left=None if job.device_bytes is None else job.device_bytes - device_bytes,
        forecast={
            "datacenter": forecast(job.strategy.windows, "datacenter", now, left),
            "federated": forecast(job.strategy.windows, "federated", now, left),
        },
        models=tuple(models),
        comparisons=tuple(comparisons),
    )


def restored(seen: Mapping[str, Any]) -> Observation:
    """An observation from the log, where its history is not kept with it."""
    names = {field.name for field in dataclasses.fields(Observation)}
    known = {name: value for name, value in seen.items() if name in names}
    known["history"] = ()
    known["forecast"] = {side: Forecast(**one) for side, one in seen["forecast"].items()}
    known["comparisons"] = tuple(Comparison(**one) for one in seen["comparisons"])
    return Observation(**known)


def past_round(row: Mapping[str, Any]) -> PastRound:
    """A committed round, from its row in the log."""
    cost = row["cost"]
    devices = [receipt for receipt in row["receipts"] if receipt["regime"] == "federated"]
    return PastRound(
        round=row["round"],
        regime=row["regime"],
        metrics=dict(row["metrics"]),
        seconds=row["seconds"],
        price=cost["price"],
        accepted=row["participants"]["accepted"],
        bytes_up=cost["bytes_up"],
        bytes_down=cost["bytes_down"],
        bytes_each=max((one["bytes_in"] + one["bytes_out"] for one in devices), default=0),
        device_seconds=cost["device_seconds"],
        datacenter_seconds=cost["datacenter_seconds"],
        datacenter_steps=sum(r["steps"] for r in row["receipts"] if r["regime"] == "datacenter"),
        training={name: dict(figures) for name, figures in row.get("training", {}).items()},
        norms=dict(row.get("norms", {})),
        cosine=row.get("cosine"),
        comparisons=[Comparison(**one) for one in row.get("comparisons", ())],
        elapsed=row.get("elapsed", 0.0),
    )


class _Copied(Sequence[PastRound]):
    """A history of which a round is copied when it is first looked at: runs have thousands."""

    def __init__(self, history: Sequence[PastRound]) -> None:
        self._history = history
        self._copies: dict[int, PastRound] = {}

    def __len__(self) -> int:
        return len(self._history)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # a policy may change its copies

    @overload
    def __getitem__(self, at: int) -> PastRound: ...

    @overload
    def __getitem__(self, at: slice) -> list[PastRound]: ...

    def __getitem__(self, at: int | slice) -> PastRound | list[PastRound]:
        which = range(len(self._history))[at]
        if isinstance(which, range):
            return [self[one] for one in which]
        if which not in self._copies:
            self._copies[which] = _copy_of(self._history[which])
        return self._copies[which]


def _copy_of(past: PastRound) -> PastRound:
    return dataclasses.replace(
        past,
        metrics=dict(past.metrics),
        training={name: dict(figures) for name, figures in past.training.items()},
        norms=dict(past.norms),
        comparisons=copy.deepcopy(past.comparisons),
    )


def _bytes_of_a_device(history: Sequence[PastRound], model_bytes: int) -> float:
    """The most that one has moved in a round, and at least a model down and an update up."""
    return float(max([2 * model_bytes, *(past.bytes_each for past in history[-10:])]))
