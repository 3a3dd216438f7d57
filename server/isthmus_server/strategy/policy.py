"""What a policy sees and what it answers.

A policy is a pure function: `plan(observation) -> Plan`. It keeps nothing; what it wants to
remember it puts into `Plan.state` and finds again in the next `Observation.state`, after a crash
and a resume as well.

A policy of your own, named in a job as ``policy = "my_module:Greedy"``::

    class Greedy:
        def __init__(self, strategy):           # the job's [strategy] table
            pass

        def plan(self, observation):
            better = observation.last_gain("federated") > observation.last_gain("datacenter")
            return Plan("federated" if better else "datacenter", reason="it gained more last time")
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from isthmus.errors import JobError
from isthmus.job import StrategySection

Kind = Literal["datacenter", "federated", "hybrid"]
KINDS: tuple[Kind, ...] = ("datacenter", "federated", "hybrid")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PastRound:
    """What a committed round came to."""

    round: int
    regime: Kind
    metrics: Mapping[str, float]
    """Central held-out figures; empty where the round was not evaluated."""
    seconds: float
    """Wall time."""
    price: float
    """Cost in the job's unit of price."""
    accepted: int
    """Updates that went into the model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """Everything a policy may know when it plans a round: only what was honestly measured."""

    round: int
    """The round to plan, from 1."""
    rounds: int
    """The job's limit."""
    history: Sequence[PastRound]
    """Committed rounds, oldest first."""
    clients_ready: int
    """Edge devices that are here and have opened the run."""
    datacenter_ready: bool
    """A datacenter is here and has opened the run."""
    spent: float
    """Price of everything so far, failed attempts included."""
    budget: float | None
    """The job's limit on it."""
    state: Mapping[str, Any]
    """What the policy put into its last committed plan."""

    def last_gain(self, regime: Kind, metric: str = "loss") -> float:
        """By how much `metric` fell over the last evaluated round of a regime; 0 if unknown."""
        evaluated = [past for past in self.history if metric in past.metrics]
        for before, after in zip(reversed(evaluated[:-1]), reversed(evaluated[1:]), strict=True):
            if after.regime == regime:
                return before.metrics[metric] - after.metrics[metric]
        return 0.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """Who trains the next round, and why."""

    regime: Kind
    reason: str
    """One clause for a person, completing "because ..."."""
    state: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """For the policy's next decision; JSON data."""


class Policy(Protocol):
    """Decides, round by round."""

    def plan(self, observation: Observation) -> Plan:
        """Answer with a plan; the same observation always gets the same plan."""
        ...


def load_policy(strategy: StrategySection) -> Policy:
    """The policy a job names.

    Raises:
        JobError: there is none of that name, or its constructor raised.
    """
    from isthmus_server.strategy.policies import BUILT_IN

    factory: Any = BUILT_IN.get(strategy.policy)
    if factory is None:
        module, separator, name = strategy.policy.partition(":")
        if not separator:
            raise JobError(
                f"strategy.policy={strategy.policy!r} is not known; there are "
                f"{', '.join(sorted(BUILT_IN))}, or module:Name for one of your own"
            )
    try:
        if factory is None:
            factory = getattr(importlib.import_module(module), name)
        policy: Policy = factory(strategy)
    except Exception as error:  # it may be anybody's code
        raise JobError(
            f"strategy.policy={strategy.policy!r} cannot be made: {type(error).__name__}: {error}"
        ) from error
    return policy


def checked_plan(policy: Policy, name: str, observation: Observation) -> Plan:
    """Ask a policy, and hold it to its contract.

    Its state comes back as it will be read after a crash, so that a resumed run sees no other.

    Raises:
        JobError: it raised, or answered something that is not a plan; says which policy.
    """
    try:
        plan = policy.plan(observation)
    except Exception as error:  # it may be anybody's code
        raise JobError(
            f"the policy {name!r} failed in round {observation.round}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(plan, Plan) or plan.regime not in KINDS or not plan.reason:
        raise JobError(
            f"the policy {name!r} answered {plan!r} in round {observation.round}, which is not a "
            f"Plan with one of the regimes {', '.join(KINDS)} and a reason"
        )
    try:
        return dataclasses.replace(plan, state=json.loads(json.dumps(dict(plan.state))))
    except (TypeError, ValueError) as error:
        raise JobError(
            f"the policy {name!r} answered with the state {plan.state!r} in round "
            f"{observation.round}, which is not a JSON object: {error}"
        ) from error
