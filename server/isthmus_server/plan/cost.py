"""What a job costs by its own prices, if every round is of one regime."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from isthmus.job import Job
from isthmus.job.planned import EXACT, Figure
from isthmus_server.strategy.forecast import planned_price
from isthmus_server.strategy.observation import observe
from isthmus_server.strategy.policy import KINDS, Kind, Plan, Policy
from isthmus_server.strategy.round_spec import evaluates

UNIT_OF_PRICE = "of the job's unit of price"
_OF_A_BUFFER = "at least, of updates that count; devices that are broken off cost too"
"""How the price of rounds of a buffer is obtained."""


def possible_regimes(job: Job, policy: Policy, *, datacenter: bool) -> tuple[Kind, ...]:
    """The regimes that rounds of a job can have.

    Args:
        job: the job.
        policy: of the job; one that names its regimes uses no others, but for `adaptive`.
        datacenter: whether there is one.
    """
    named: Sequence[Kind] = getattr(policy, "regimes", ())
    if named and job.strategy.policy != "adaptive":
        return tuple(kind for kind in KINDS if kind in named)
    return KINDS if datacenter else ("federated",)


def costs(job: Job, regimes: Sequence[Kind], model_bytes: int) -> list[Figure]:
    """The price of the run by regime, and the range between, if all invited devices take part.

    Failed attempts and comparisons that a policy asks for cost more.
    """
    prices = [(kind, _price(job, kind, model_bytes)) for kind in regimes]
    is_buffered = job.federated.mode == "buffered" and any(kind != "datacenter" for kind in regimes)
    how = _OF_A_BUFFER if is_buffered else EXACT
    found = [
        Figure(f"all rounds {kind}", price, UNIT_OF_PRICE, EXACT if kind == "datacenter" else how)
        for kind, price in prices
    ]
    if len(prices) > 1:
        least = min(price for _, price in prices)
        most = max(price for _, price in prices)
        found.append(Figure("any mixture", least, UNIT_OF_PRICE, how, most=most))
    return found


def _price(job: Job, kind: Kind, model_bytes: int) -> float:
    """The price of the run if every round is of one regime."""
    datacenters = () if kind == "federated" else ("datacenter-0",)
    observed = observe(
        job,
        (),
        spent=0.0,
        device_bytes=0,
        state={},
        clients_ready=job.federated.invited,
        datacenters=datacenters,
        model_bytes=model_bytes,
        now=0.0,
        elapsed=0.0,
    )
    plan = Plan(kind, reason="it is planned")
    evaluated = sum(evaluates(job, number) for number in range(1, job.rounds + 1))

    def of_round(evaluation_devices: int) -> float:
        seen = dataclasses.replace(observed, evaluation_devices=evaluation_devices)
        return planned_price(plan, seen)

    others = job.rounds - evaluated
    return evaluated * of_round(job.evaluation.devices) + others * of_round(0)
