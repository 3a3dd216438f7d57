"""The job's limits, which win over every policy: budget, time, bytes, privacy, windows, quorum.

What a policy answers passes through `hold` before anything is done. An answer within the limits
comes out as it is. One outside of them is held back: it waits for a window to open, a cohort below
the quorum is raised to it, a visit is refused, and where nothing of that helps the run ends. No
limit is ever loosened, and none makes a plan of its own.
"""

from __future__ import annotations

import dataclasses

from isthmus_server.strategy.policy import (
    Answer,
    Compare,
    Forecast,
    Observation,
    Plan,
    Side,
    Stop,
    Wait,
)

_SLACK = 1e-9
"""Of a unit of price: prices are sums of decimal fractions."""


@dataclasses.dataclass(frozen=True)
class LimitRefusal:
    """A visit that cannot be made; the policy is asked again and told why."""

    reason: str


@dataclasses.dataclass(frozen=True)
class ConstrainedAnswer:
    """What became of an answer."""

    answer: Answer | LimitRefusal
    adjustments: tuple[str, ...] = ()
    """What was changed and why, one sentence each; empty if nothing was."""


def hold(answer: Answer, seen: Observation) -> ConstrainedAnswer:
    """What a policy wants after what it saw, within the job's limits."""
    if isinstance(answer, Stop):
        return ConstrainedAnswer(answer)
    if seen.seconds_left is not None and seen.seconds_left <= 0:
        return _stopped(f"the run has gone on for {seen.elapsed:.0f} s, its limit")
    if isinstance(answer, Wait):
        held = _wait(answer, seen)
        return ConstrainedAnswer(answer) if held.answer == answer else held
    if isinstance(answer, Compare):
        refusal = _no_visit(answer, seen)
        return (
            ConstrainedAnswer(LimitRefusal(refusal), (refusal,))
            if refusal
            else ConstrainedAnswer(answer)
        )
    plan, adjustments = _with_quorum(answer, seen)
    ending = _too_much(plan, seen)
    if ending:
        return ConstrainedAnswer(Stop(ending), (*adjustments, ending))
    for side in _sides(plan):
        if not seen.open(side):
            held = _wait(_until_open(side, seen), seen)
            return ConstrainedAnswer(held.answer, (*adjustments, *held.adjustments))
    if plan.regime != "datacenter" and seen.clients_ready < seen.needed:
        rest = _until_rested(seen)
        if rest is not None:
            return ConstrainedAnswer(rest.answer, (*adjustments, *rest.adjustments))
    return ConstrainedAnswer(plan, adjustments)


def _sides(plan: Plan) -> tuple[Side, ...]:
    if plan.regime == "hybrid":
        return ("datacenter", "federated")
    return (plan.regime,)


def _stopped(reason: str) -> ConstrainedAnswer:
    return ConstrainedAnswer(Stop(reason), (reason,))


# -- what can be afforded --------------------------------------------------------------------------


def _too_much(plan: Plan, seen: Observation) -> str:
    """Which limit a round would go over; empty if none."""
    price = seen.price(plan.regime, plan.cohort, plan.datacenter_steps)
    if seen.left is not None and price > seen.left + _SLACK:
        return (
            f"the budget of {seen.budget:g} is used up: {seen.spent:g} is spent and a "
            f"{plan.regime} round costs {price:g}"
        )
    if plan.regime == "datacenter":
        return ""
    if seen.epsilon_left is not None and seen.epsilon_left <= 0:
        return f"the privacy budget is spent, and a {plan.regime} round would ask devices"
    moved = seen.invited(plan.cohort) * seen.client_bytes
    if seen.bytes_left is not None and moved > seen.bytes_left:
        return (
            f"a {plan.regime} round moves about {moved / 1e6:.3g} MB to and from devices, and "
            f"{max(seen.bytes_left, 0) / 1e6:.3g} MB are left (device_bytes)"
        )
    return ""


def _no_visit(asked: Compare, seen: Observation) -> str:
    """Why devices cannot be asked to score models; empty if they can."""
    price = asked.devices * len(asked.models) * seen.visit_price
    vectors = len({part for name in asked.models for part in name.split("+")})
    moved = asked.devices * vectors * seen.model_bytes
    if not seen.open("federated"):
        return "devices cannot be asked outside of their window"
    if seen.clients_ready < asked.devices:
        return f"{asked.devices} devices are to be asked and {seen.clients_ready} are ready"
    if seen.left is not None and price > seen.left + _SLACK:
        return f"asking {asked.devices} devices costs {price:g} and {seen.left:g} is left"
    if seen.epsilon_left is not None and seen.epsilon_left <= 0:
        return "the privacy budget is spent, and devices cannot be asked"
    if seen.bytes_left is not None and moved > seen.bytes_left:
        return (
            f"asking {asked.devices} devices moves {moved / 1e6:.3g} MB and "
            f"{max(seen.bytes_left, 0) / 1e6:.3g} MB are left (device_bytes)"
        )
    return ""


# -- what is changed -------------------------------------------------------------------------------


def _with_quorum(plan: Plan, seen: Observation) -> tuple[Plan, tuple[str, ...]]:
    """A cohort that is not below the quorum."""
    if plan.cohort is None or plan.regime == "datacenter" or plan.cohort >= seen.needed:
        return plan, ()
    sentence = f"a cohort of {plan.cohort} became {seen.needed}, which is the quorum"
    return dataclasses.replace(plan, cohort=seen.needed), (sentence,)


def _until_open(side: Side, seen: Observation) -> Wait | Stop:
    forecast = seen.forecast.get(side, Forecast())
    if forecast.changes_in is None:
        return Stop(f"the window of the {side} side never opens")
    return Wait(forecast.changes_in, f"the {side} side is outside of its window")


def _until_rested(seen: Observation) -> ConstrainedAnswer | None:
    """Until devices that are here may be asked again; None where others have to come."""
    if seen.clients_ready + seen.clients_resting < seen.needed:
        return None
    why = (
        f"{seen.clients_ready} devices may be asked and the quorum is {seen.needed}; "
        f"{seen.clients_resting} rest (federated.hours, federated.participation)"
    )
    if seen.enough_in is None:
        return _stopped(f"{why} for good")
    return _wait(Wait(max(seen.enough_in, 1.0), why), seen)


def _wait(answer: Wait | Stop, seen: Observation) -> ConstrainedAnswer:
    """A wait that ends within the run's time."""
    if isinstance(answer, Stop):
        return _stopped(answer.reason)
    if seen.seconds_left is not None and answer.seconds >= seen.seconds_left:
        return _stopped(
            f"{answer.reason}; it would have to wait for {answer.seconds:.0f} s and the run ends "
            f"in {seen.seconds_left:.0f} s"
        )
    return ConstrainedAnswer(answer, (f"{answer.reason}: it waits for {answer.seconds:.0f} s",))
