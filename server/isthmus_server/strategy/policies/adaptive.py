"""Plan from the declared target and budget, and test each step that could harm the model.

The share of the target that lives on the devices (`strategy.target_edge_share`, pi) selects the
regime. Measurements on devices and on held-out public data decide what the declaration leaves
open::

    pi = 0        datacenter rounds
    0 < pi < 1    hybrid rounds by one-way gradient transfer (Augenstein et al. 2022). The weight
                  follows from pi and is bounded by the norm of the devices' own first step. If
                  public data prove to differ from the devices', every other round trains in
                  parallel, and every round does if devices also forget what others taught
    pi = 1        federated rounds, after a warm start in the datacenter if it replaces none:

    start --slack, or devices closed--> warm --beats the initial model--> warm on --limit--> edge
      |                                  +--does not: initial model, datacenter excluded------^
      +--neither------------------------------------------------------------------------------^

    edge, probation       after some rounds the served model must not lose to the warm one. If it
                          does, training returns to the warm model with zero momentum and half
                          steps; after the second time quarter steps, and no further tests
    edge, gradient used   once what devices learn also holds for public data, or devices forget
                          what others taught, they apply the datacenter's gradient; in the second
                          case with half steps
    edge, devices closed  the round waits for their window

Greedy gain per cost is not a criterion (docs/strategy.md says why). Phases only move forward, so
the policy cannot oscillate.
"""

from __future__ import annotations

import dataclasses
import math

from isthmus.job import StrategySection
from isthmus_server.strategy.policies import estimates
from isthmus_server.strategy.policies.adaptive_state import AdaptiveSettings, AdaptiveState
from isthmus_server.strategy.policy import (
    CURRENT,
    INITIAL,
    SERVED,
    Answer,
    Compare,
    Comparison,
    Observation,
    Plan,
    settings_of,
)

WARM = "warm"
"""Name under which the model at the end of a warm start is kept."""
TRANSFER_STABILITY = 1.2
"""Upper limit of `strategy.transfer_weight` times the devices' learning rate and steps."""


@dataclasses.dataclass(frozen=True)
class DatacenterRole:
    """What the datacenter contributes to a round with devices."""

    reason: str
    transfer_weight: float = 0.0
    """Weight with which devices apply its gradient; 0: they do not."""
    trains: bool = False
    """Whether it trains in parallel with the devices instead."""


class Adaptive:
    """The policy that the module's docstring describes."""

    def __init__(self, strategy: StrategySection) -> None:
        self.settings = settings_of(strategy, AdaptiveSettings)
        self.edge_share = strategy.target_edge_share
        self.max_transfer_weight = strategy.transfer_weight

    def plan(self, observation: Observation) -> Answer:
        """Make one step of the state machine in the module's docstring."""
        state = AdaptiveState.from_json(observation.state)
        if self.edge_share == 0:
            reason = "none of the target lives on the devices"
            return Plan("datacenter", reason, state.to_json())
        if state.phase == "start":
            return self._start(observation, state)
        if state.phase == "warm":
            return self._warm(observation, state)
        if not observation.open("federated"):
            return self._wait_for_devices(observation, state)
        if state.edge_rounds >= self.settings.probation and not state.probation_over:
            return self._probation(observation, state)
        return self._edge(observation, state)

    # -- the warm start ----------------------------------------------------------------------------

    def _start(self, observation: Observation, state: AdaptiveState) -> Answer:
        """Decide whether a warm start fits: into spare rounds, or before the devices' window."""
        edge = dataclasses.replace(state, phase="edge")
        devices_open = observation.open("federated")
        if self.edge_share < 1:
            if devices_open:
                return self._edge(observation, edge)
            return self._wait_for_devices(observation, edge)
        possible, affordable = estimates.rounds_with_devices(observation)
        rounds_left = observation.rounds - observation.round + 1
        slack = (possible if devices_open else rounds_left) - affordable
        warm_budget = self.settings.warm_share * (observation.budget_left or 0)
        warm_budget -= self._comparison_price(observation)
        warm_affordable = warm_budget / max(observation.price("datacenter"), 1e-9)
        limit = int(min(slack, warm_affordable, self.settings.warm_length * affordable))
        datacenter_available = observation.datacenter_ready and observation.open("datacenter")
        if limit >= self.settings.warm_test and datacenter_available:
            warm = dataclasses.replace(
                state,
                phase="warm",
                max_warm_rounds=limit,
                min_warm_rounds=int(slack / 2) if devices_open else 0,
                before_devices=not devices_open,
            )
            return self._warm(observation, warm)
        if not devices_open:
            return self._wait_for_devices(observation, edge)
        reason = (
            f"the budget fills {affordable:.0f} of the {possible:.0f} rounds in which devices can "
            "work, which leaves no room for a warm start worth its test"
            if datacenter_available
            else "no datacenter is available for a warm start"
        )
        return self._edge(observation, edge, reason)

    def _warm(self, observation: Observation, state: AdaptiveState) -> Answer:
        """Plan a datacenter round, and compare with the initial model early on."""
        settings = self.settings
        devices_open = observation.open("federated")
        test_due = state.before_devices or state.warm_rounds >= settings.warm_test
        if not state.warm_accepted and devices_open and test_due:
            result = self._compare(observation, state, "warm", (INITIAL, CURRENT))
            if isinstance(result, Compare):
                return result
            if isinstance(result, str) or not result.beats(CURRENT, settings.z):
                outcome = result if isinstance(result, str) else _in_words(result, CURRENT, INITIAL)
                cold = dataclasses.replace(
                    state, phase="edge", datacenter_excluded=True, pending_comparison=""
                )
                return self._edge(
                    observation,
                    cold,
                    f"after {state.warm_rounds} warm rounds {outcome}: it begins cold, and without "
                    "the datacenter",
                    start=INITIAL,
                )
            state = dataclasses.replace(state, warm_accepted=True, pending_comparison="")
        flat = estimates.flat_rounds(observation)
        plateau = flat >= settings.plateau and state.warm_rounds >= state.min_warm_rounds
        warm_is_kept = WARM in observation.models
        if devices_open and (
            state.before_devices or warm_is_kept or not observation.datacenter_ready
        ):
            reason = f"the warm start ends after {state.warm_rounds} rounds"
            return self._edge(observation, dataclasses.replace(state, phase="edge"), reason)
        limit_reached = state.warm_rounds >= state.max_warm_rounds
        if not devices_open and (limit_reached or (state.before_devices and plateau)):
            return self._wait_for_devices(observation, state)
        round_ = state.warm_rounds + 1
        last = state.warm_accepted and (plateau or round_ >= state.max_warm_rounds)
        why = (
            "outside of the devices' hours"
            if state.before_devices
            else "which take nothing from the devices"
        )
        return Plan(
            "datacenter",
            f"warm round {round_} of at most {state.max_warm_rounds}, {why}"
            + (f"; the held-out loss has been flat for {flat} rounds" if plateau else ""),
            dataclasses.replace(state, warm_rounds=round_).to_json(),
            keep={WARM: CURRENT} if last else {},
        )

    # -- rounds with devices -----------------------------------------------------------------------

    def _edge(
        self, observation: Observation, state: AdaptiveState, why: str = "", start: str = CURRENT
    ) -> Plan:
        """Plan a round with devices, by the declared target."""
        state = dataclasses.replace(state, pending_comparison="")
        if not (observation.datacenter_ready and observation.open("datacenter")):
            role = DatacenterRole(", and no datacenter is available")
        elif self.edge_share < 1:
            role = self._role_by_share(observation, state)
        else:
            state, role = self._role_if_useful(observation, state)
        reason = f"the devices hold {self.edge_share:.0%} of the target{role.reason}"
        settings, transfer = self.settings, role.transfer_weight > 0
        cost_share = settings.transfer_share if transfer else settings.parallel_share
        scale = state.step_scale
        loss_ratio = estimates.peak_device_loss_ratio(observation)
        if loss_ratio > settings.forgotten:
            scale *= settings.damped
            reason += f"; their loss rose to {loss_ratio:.2g} times the first: steps x {scale:g}"
        hybrid = transfer or role.trains
        return Plan(
            "hybrid" if hybrid else "federated",
            f"{why}; {reason}" if why else reason,
            dataclasses.replace(state, edge_rounds=state.edge_rounds + 1).to_json(),
            merge="transfer" if transfer else "weighted" if role.trains else None,
            transfer_weight=role.transfer_weight if transfer else None,
            datacenter_steps=(
                estimates.affordable_steps(observation, cost_share) if hybrid else None
            ),
            start=start,
            reset_optimizer=start in (WARM, INITIAL),
            step_scale=scale,
        )

    def _role_by_share(self, observation: Observation, state: AdaptiveState) -> DatacenterRole:
        """Choose the datacenter's role where part of the target is only in the public data.

        The weight follows from the target and from the norm of the datacenter's gradient relative
        to the devices' own step, as one task's gradient relative to another's (Chen et al. 2018).
        One gradient per round does not teach data that differ from the devices'. Whether more
        training on them helps the target cannot be observed, so parallel training takes every other
        round; devices that undo each other's work need it in every round.
        """
        settings, limit = self.settings, self.max_transfer_weight
        weight = min(settings.transfer_part * (1 - self.edge_share) / self.edge_share, limit)
        first_weight = min(weight, limit / 2)  # until both norms are known
        gradient, step = estimates.first_norms(observation, first_weight)
        if not gradient or not step:
            reason = f", and take {first_weight:.3g} of the datacenter's gradient for the rest"
            return DatacenterRole(reason, first_weight)
        divergence = estimates.gradient_divergence(
            observation, gradient / step, 1 - self.edge_share
        )
        loss_ratio = estimates.peak_device_loss_ratio(observation)
        undone = loss_ratio > settings.undone
        if divergence > settings.apart and (undone or state.edge_rounds % 2):
            reason = (
                ", and the datacenter trains in parallel: public data differ from theirs "
                f"({divergence:.2g})"
            )
            if undone:
                reason += (
                    ", and devices undo what other devices taught "
                    f"({loss_ratio:.2g} times the first loss)"
                )
            return DatacenterRole(reason, trains=True)
        bound = settings.transfer_pull * step / gradient * limit / TRANSFER_STABILITY
        weight = min(weight, bound)
        reason = (
            f", and take {weight:.3g} of the datacenter's gradient for the rest (its first norm "
            f"was {gradient:.3g}, that of their own step {step:.3g})"
        )
        return DatacenterRole(reason, weight)

    def _role_if_useful(
        self, observation: Observation, state: AdaptiveState
    ) -> tuple[AdaptiveState, DatacenterRole]:
        """Choose the datacenter's role where the whole target is the devices'.

        They apply its gradient if the public data resemble theirs, or as rehearsal.
        """
        reason = "; it was found useful for them"
        if not state.uses_gradient and not state.datacenter_excluded:
            settings = self.settings
            rounds = settings.alike_rounds * (3 if state.warm_rounds else 1)
            enough = state.edge_rounds >= rounds
            public_ratio = estimates.public_loss_ratio(observation) if enough else math.inf
            device_ratio = estimates.peak_device_loss_ratio(observation)
            similar, forgotten = public_ratio < settings.alike, device_ratio > settings.forgotten
            if similar:
                reason = (
                    f"; public data are like theirs (the held-out loss fell to {public_ratio:.2g} "
                    f"of the first, the threshold is {settings.alike:g})"
                )
            elif forgotten:
                reason = (
                    f"; they forget what other devices taught (their loss rose to "
                    f"{device_ratio:.2g} times the first, the threshold is {settings.forgotten:g})"
                )
            state = dataclasses.replace(state, uses_gradient=similar or forgotten)
        if not state.uses_gradient:
            return state, DatacenterRole("")
        weight = self.max_transfer_weight
        return state, DatacenterRole(f"{reason}, so they take {weight:.3g} of its gradient", weight)

    def _probation(self, observation: Observation, state: AdaptiveState) -> Answer:
        """Check that the served model is not worse than the warm one, and continue or go back.

        The check is left out where devices have hours: the devices of now may not be those that
        trained, and a model of other devices' classes would lose without a reason. Work with
        devices never ends here, because they hold the target.
        """
        done = dataclasses.replace(state, probation_over=True)
        max_price = self.settings.probation_share * (observation.budget_left or math.inf)
        too_expensive = self._comparison_price(observation) > max_price
        if (
            too_expensive
            or WARM not in observation.models
            or estimates.has_device_hours(observation)
        ):
            return self._edge(observation, done)
        result = self._compare(observation, state, "probation", (WARM, SERVED))
        if isinstance(result, Compare):
            return result
        if isinstance(result, str):
            return self._edge(observation, done, result)
        outcome = _in_words(result, SERVED, WARM)
        if not result.loses(SERVED, self.settings.z):
            return self._edge(observation, done, f"probation is over: {outcome}")
        failures, scale = state.failed_probations + 1, state.step_scale / 2
        failed = dataclasses.replace(
            state,
            edge_rounds=0,
            failed_probations=failures,
            step_scale=scale,
            probation_over=failures >= 2,
        )
        reason = f"probation is lost: {outcome}; back to it, with steps {scale:g} times as long"
        return self._edge(observation, failed, reason, start=WARM)

    def _wait_for_devices(self, observation: Observation, state: AdaptiveState) -> Plan:
        """Plan a round with devices; the limits delay it until their window opens."""
        return self._edge(observation, state, "it is outside of the devices' hours")

    # -- comparisons -------------------------------------------------------------------------------

    def _compare(
        self, observation: Observation, state: AdaptiveState, purpose: str, models: tuple[str, ...]
    ) -> Compare | Comparison | str:
        """Return the comparison if it was made, why it was not, or the request for it."""
        if observation.refused:
            return f"no comparison could be made ({observation.refused[-1]})"
        if state.pending_comparison == purpose and observation.comparisons:
            return observation.comparisons[-1]
        reasons = {
            "warm": "whether the warm model is better for the devices than the initial one",
            "probation": "whether rounds with devices have made the served model worse",
        }
        state = dataclasses.replace(state, pending_comparison=purpose)
        devices = self._comparison_devices(observation)
        return Compare(models, devices, reasons[purpose], state.to_json())

    def _comparison_devices(self, observation: Observation) -> int:
        return min(self.settings.devices or observation.cohort, max(observation.clients_ready, 2))

    def _comparison_price(self, observation: Observation) -> float:
        """Return the price of comparing two models."""
        return 2 * self._comparison_devices(observation) * observation.comparison_price


def _in_words(comparison: Comparison, model: str, reference: str) -> str:
    names = {
        CURRENT: "the new model",
        INITIAL: "the initial model",
        SERVED: "the served model",
        WARM: "the warm model",
    }
    difference, error = comparison.difference[model], comparison.standard_error[model]
    than = "better" if difference < 0 else "worse"
    return (
        f"{comparison.devices} devices found {names[model]} {abs(difference):.4f} "
        f"{than} than {names[reference]} (standard error {error:.4f})"
    )
