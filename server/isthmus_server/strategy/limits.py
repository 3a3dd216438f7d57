"""Enforce the job's limits on every policy answer: budget, time, bytes, windows, quorum.

A run has one `RunLimits`, and nothing else enforces limits: answers of the policy pass it when they
are given, and plans again before each attempt, because time has passed and money was spent since.

`enforce_limits` checks an answer before it takes effect. An answer within the limits is returned
unchanged. Otherwise the smallest correction is applied: a round waits until a window opens, a
cohort below the quorum is raised to it, a comparison is refused, and if none of these is possible
the run ends. The run also ends at `strategy.target_metric`, and after `evaluation.patience`.
Limits are never relaxed, and no limit creates a plan.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

from isthmus_server.strategy.forecast import planned_bytes, planned_price
from isthmus_server.strategy.observation import best_round, metric_of
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

PRICE_TOLERANCE = 1e-9
"""In units of price: prices are sums of decimal fractions, which floats only approximate."""


@dataclasses.dataclass(frozen=True)
class LimitRefusal:
    """A comparison that a limit rules out; the policy is called again with the reason."""

    reason: str


@dataclasses.dataclass(frozen=True)
class ConstrainedAnswer:
    """A policy's answer after the limits were applied."""

    answer: Answer | LimitRefusal
    adjustments: tuple[str, ...] = ()
    """What was changed and why, one sentence each; empty if nothing was."""


Observe = Callable[[], Observation]
"""Takes a new observation, with the comparisons made for this round and their price, and the
policy's state."""
Pause = Callable[[Wait], Awaitable[None]]
"""Publishes that the run waits, and waits."""


class RunLimits:
    """The limits of one run, on what its policy answers and on what it still carries out."""

    def __init__(
        self,
        observe: Observe,
        pause: Pause,
        refused_for_privacy: Callable[[Plan], str] = lambda plan: "",
    ) -> None:
        """Prepare.

        Args:
            observe: see `Observe`.
            pause: see `Pause`.
            refused_for_privacy: why a plan may not use the datacenters' examples again; empty if
                it may. It is called in a thread of its own.
        """
        self.observe = observe
        self.pause = pause
        self._refused_for_privacy = refused_for_privacy

    def enforce(self, answer: Answer, observation: Observation) -> ConstrainedAnswer:
        """See `enforce_limits`."""
        return enforce_limits(answer, observation)

    def allow(self, plan: Plan) -> bool:
        """Whether a plan is within the limits now, and needs no correction."""
        return enforce_limits(plan, self.observe()).answer == plan

    async def wait_for(self, plan: Plan) -> Stop | None:
        """Enforce the limits of this moment on a plan that was made earlier.

        The plan does not change: it waits until the limits allow it. Returns the stop of a limit
        that ends the run, or None when the plan may be carried out.
        """
        while True:
            answer = enforce_limits(plan, self.observe()).answer
            if isinstance(answer, Stop):
                return answer
            # Also before a wait, which would be for nothing.
            if used_up := await asyncio.to_thread(self._refused_for_privacy, plan):
                return Stop(used_up)
            if not isinstance(answer, Wait):
                return None
            await self.pause(answer)


def enforce_limits(answer: Answer, observation: Observation) -> ConstrainedAnswer:
    """Apply the job's limits to a policy's answer.

    Args:
        answer: a valid answer (see `answer_checks`).
        observation: what the policy answered to.
    """
    if isinstance(answer, Stop):
        return ConstrainedAnswer(answer)
    # What ends the run comes before what delays it: nobody waits for a round that is not needed.
    reached = _reached_target(observation)
    if reached:
        return _stop(reached)
    stagnant = _without_improvement(observation)
    if stagnant:
        return _stop(stagnant)
    if observation.seconds_left is not None and observation.seconds_left <= 0:
        return _stop(f"the run has gone on for {observation.elapsed:.0f} s, its limit")
    if isinstance(answer, Wait):
        bounded = _bounded_wait(answer, observation)
        return ConstrainedAnswer(answer) if bounded.answer == answer else bounded
    if isinstance(answer, Compare):
        refusal = _refusal_of_comparison(answer, observation)
        if refusal:
            return ConstrainedAnswer(LimitRefusal(refusal), (refusal,))
        return ConstrainedAnswer(answer)
    return _constrained_plan(answer, observation)


def _constrained_plan(plan: Plan, observation: Observation) -> ConstrainedAnswer:
    # First of all, since a larger cohort costs more than what was planned.
    plan, adjustments = _raised_to_quorum(plan, observation)
    unmeasurable = _reason_not_to_measure(plan, observation)
    if unmeasurable:
        plan = dataclasses.replace(plan, measure_gradients=False)
        adjustments = (*adjustments, f"gradients are not measured: {unmeasurable}")
    exceeded = _exceeded_limit(plan, observation)
    if exceeded:
        return ConstrainedAnswer(Stop(exceeded), (*adjustments, exceeded))
    # After the budget: a run that cannot pay for the round need not wait for its window.
    for side in _sides(plan):
        if not observation.open(side):
            wait = _bounded_wait(_wait_for_window(side, observation), observation)
            return ConstrainedAnswer(wait.answer, (*adjustments, *wait.adjustments))
    if plan.regime != "datacenter" and observation.clients_ready < observation.quorum:
        quorum_wait = _wait_for_quorum(observation)
        if quorum_wait is not None:
            return ConstrainedAnswer(quorum_wait.answer, (*adjustments, *quorum_wait.adjustments))
    return ConstrainedAnswer(plan, adjustments)


def _sides(plan: Plan) -> tuple[Side, ...]:
    if plan.regime == "hybrid":
        return ("datacenter", "federated")
    return (plan.regime,)


def _stop(reason: str) -> ConstrainedAnswer:
    return ConstrainedAnswer(Stop(reason), (reason,))


def _reached_target(observation: Observation) -> str:
    """Return that the last evaluated round reached the target; empty if it did not.

    Raises:
        JobError: the target is a metric that the task does not have.
    """
    target = observation.target
    if target is None:
        return ""
    evaluated = next((past for past in reversed(observation.history) if past.metrics), None)
    if evaluated is None:
        return ""
    value = metric_of(evaluated, target.name, "strategy.target_metric.name")
    if not target.missing(value) <= 0:  # also for a value that is not a number
        return ""
    return f"round {evaluated.round} reached the target, {target}: {target.name} {value:.4g}"


def _without_improvement(observation: Observation) -> str:
    """Return that the best model is too old, by `evaluation.patience`; empty if it is not.

    Raises:
        JobError: the metric is one that the task does not have.
    """
    metric = observation.keep_best
    patience = observation.patience
    best = None if metric is None else best_round(observation.history, metric)
    if metric is None or patience is None:
        return ""
    since = 0 if best is None else best.round
    evaluated = sum(past.round > since for past in observation.history if past.metrics)
    if evaluated < patience:
        return ""
    if best is None:
        return f"none of {evaluated} evaluated rounds had a value of {metric.name}"
    return (
        f"{evaluated} evaluated rounds in a row did not improve {metric.name}, which was best in "
        f"round {best.round} ({best.metrics[metric.name]:.4g})"
    )


# -- limits that end the run or refuse a comparison ------------------------------------------------


def _exceeded_limit(plan: Plan, observation: Observation) -> str:
    """Return which limit a round would exceed; empty if none."""
    price = planned_price(plan, observation)
    if observation.budget_left is not None and price > observation.budget_left + PRICE_TOLERANCE:
        return (
            f"the budget of {observation.budget:g} is used up: {observation.spent:g} is spent and "
            f"a {plan.regime} round costs {price:g}"
        )
    transferred = planned_bytes(plan, observation)
    if observation.bytes_left is not None and transferred > observation.bytes_left:
        return (
            f"a {plan.regime} round moves about {transferred / 1e6:.3g} MB to and from devices, "
            f"and {max(observation.bytes_left, 0) / 1e6:.3g} MB are left (device_bytes)"
        )
    return ""


def _refusal_of_comparison(compare: Compare, observation: Observation) -> str:
    """Return why a comparison cannot be made now; empty if it can."""
    devices = compare.devices
    price = devices * len(compare.models) * observation.comparison_price
    vectors = len({part for name in compare.models for part in name.split("+")})
    transferred = devices * vectors * observation.model_bytes
    if not observation.can_compare:
        return (
            "devices of this job score no models: with [privacy] they do if privacy.measurements "
            "says how many times, and with [federated.privacy] never"
        )
    if not observation.open("federated"):
        return "devices cannot be asked outside of their window"
    if observation.clients_ready < devices:
        return f"{devices} devices are to be asked and {observation.clients_ready} are ready"
    if observation.budget_left is not None and price > observation.budget_left + PRICE_TOLERANCE:
        return f"asking {devices} devices costs {price:g} and {observation.budget_left:g} is left"
    if observation.bytes_left is not None and transferred > observation.bytes_left:
        return (
            f"asking {devices} devices moves {transferred / 1e6:.3g} MB and "
            f"{max(observation.bytes_left, 0) / 1e6:.3g} MB are left (device_bytes)"
        )
    return ""


# -- limits that change or delay a plan ------------------------------------------------------------


def _reason_not_to_measure(plan: Plan, observation: Observation) -> str:
    """Return why a round is possible only without its measurement of gradients; empty if not."""
    if not plan.measure_gradients:
        return ""
    if (
        plan.regime == "federated"
        and observation.datacenters
        and not observation.open("datacenter")
    ):
        return "the datacenter side is outside of its window"
    exceeded = _exceeded_limit(plan, observation)
    unmeasured = dataclasses.replace(plan, measure_gradients=False)
    return "" if _exceeded_limit(unmeasured, observation) else exceeded


def _raised_to_quorum(plan: Plan, observation: Observation) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan with a cohort of at least the quorum, and what was changed."""
    quorum = observation.quorum
    if plan.cohort is None or plan.regime == "datacenter" or plan.cohort >= quorum:
        return plan, ()
    adjustment = f"a cohort of {plan.cohort} became {quorum}, which is the quorum"
    return dataclasses.replace(plan, cohort=quorum), (adjustment,)


def _wait_for_window(side: Side, observation: Observation) -> Wait | Stop:
    forecast = observation.forecast.get(side, Forecast())
    if forecast.changes_in is None:
        return Stop(f"the window of the {side} side never opens")
    return Wait(forecast.changes_in, f"the {side} side is outside of its window")


def _wait_for_quorum(observation: Observation) -> ConstrainedAnswer | None:
    """Wait until connected devices may be invited again; None if too few are connected."""
    ready = observation.clients_ready
    ineligible = observation.clients_ineligible
    # Nothing to wait for by the clock: the round waits until others have connected.
    if ready + ineligible < observation.quorum:
        return None
    if observation.seconds_until_quorum is None and observation.others_may_come:
        return None
    reason = (
        f"{ready} devices may be invited and the quorum is {observation.quorum}; {ineligible} are "
        "outside of their hours or at their limit (federated.hours, federated.participation, "
        "federated.privacy)"
    )
    if observation.epsilon is not None:
        reason += (
            f", or have no privacy budget left: epsilon {observation.epsilon_spent:.3g} of "
            f"{observation.epsilon:g} is spent"
        )
    if observation.seconds_until_quorum is None:
        return _stop(f"{reason} for good")
    return _bounded_wait(Wait(max(observation.seconds_until_quorum, 1.0), reason), observation)


def _bounded_wait(answer: Wait | Stop, observation: Observation) -> ConstrainedAnswer:
    """Return the wait if it ends within the run's time limit, and a stop otherwise."""
    if isinstance(answer, Stop):
        return _stop(answer.reason)
    seconds_left = observation.seconds_left
    if seconds_left is not None and answer.seconds >= seconds_left:
        return _stop(
            f"{answer.reason}; it would have to wait for {answer.seconds:.0f} s and the run ends "
            f"in {seconds_left:.0f} s"
        )
    return ConstrainedAnswer(answer, (f"{answer.reason}: it waits for {answer.seconds:.0f} s",))
