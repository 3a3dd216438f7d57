"""Plan from the declared target and budget, and test each step that could harm the model.

The share of the target that lives on the devices (`strategy.target_edge_share`, pi) selects the
regime. Measurements on devices and on held-out public data decide what the declaration leaves
open::

    pi = 0        datacenter rounds
    0 < pi < 1    hybrid rounds by one-way gradient transfer (Augenstein et al. 2022). The weight
                  follows from pi and is bounded by the ratio of both sides' gradients at one
                  model. If public data prove to differ from the devices', every other round trains
                  in parallel, and every round does if devices also forget what others taught
    pi = 1        federated rounds, after a warm start in the datacenter if it replaces none:

    start --slack, or devices closed--> warm --beats the initial model--> warm on --limit--> edge
      |                                  +--does not: initial model, datacenter excluded------^
      +--neither------------------------------------------------------------------------------^

    edge, probation       after some rounds the served model must not lose to the warm one. If it
                          does, training returns to the warm model with zero momentum and half
                          steps; after the second time quarter steps, and no further tests
    edge, gradient used   once what devices learn also holds for public data, or devices forget
                          what others taught, they apply the datacenter's gradient if a race shows
                          that it does no harm (`race.py`); in the second case with half steps
    edge, devices closed  the round waits for their window

Greedy gain per cost is not a criterion (docs/strategy.md says why). Phases only move forward, so
the policy cannot oscillate.
"""

from __future__ import annotations

import dataclasses
import math

from isthmus.job import StrategySection
from isthmus_server.strategy.policies.adaptive import estimates, race
from isthmus_server.strategy.policies.adaptive.datacenter_role import DatacenterRole, RoleChooser
from isthmus_server.strategy.policies.adaptive.state import AdaptiveSettings, AdaptiveState
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


class Adaptive:
    """The policy that the module's docstring describes."""

    def __init__(self, strategy: StrategySection) -> None:
        self.settings = settings_of(strategy, AdaptiveSettings)
        self.edge_share = strategy.target_edge_share
        self._roles = RoleChooser(self.settings, strategy)

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
        if state.race.branch:
            return self._race(observation, state)
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
        datacenter_available = _datacenter_available(observation, state)
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
                answered = not isinstance(result, str)
                outcome = result if isinstance(result, str) else _in_words(result, CURRENT, INITIAL)
                cold = dataclasses.replace(
                    state, phase="edge", datacenter_excluded=answered, pending_comparison=""
                )
                why = f"after {state.warm_rounds} warm rounds {outcome}: it begins cold"
                why += ", and without the datacenter" if answered else ""
                return self._edge(observation, cold, why, start=INITIAL)
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
        self,
        observation: Observation,
        state: AdaptiveState,
        why: str = "",
        start: str = CURRENT,
        keep: str = "",
        role: DatacenterRole | None = None,
    ) -> Plan:
        """Plan a round with devices, by the declared target or with a given role."""
        state = dataclasses.replace(state, pending_comparison="")
        if role is not None:
            pass
        elif not _datacenter_available(observation, state):
            role = DatacenterRole(", and no datacenter is available")
        elif self.edge_share < 1:
            role = self._roles.by_share(observation, state)
        else:
            state, role = self._roles.if_useful(observation, state)
        reason = f"the devices hold {self.edge_share:.0%} of the target{role.reason}"
        if state.race.branch == "fork":
            keep = race.FORK
        settings, transfer = self.settings, role.transfer_weight > 0
        cost_share = settings.parallel_share if role.trains else settings.transfer_share
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
            datacenter_weights=role.datacenter_weights if transfer else {},
            datacenter_steps=(
                estimates.affordable_steps(observation, cost_share)
                if hybrid or role.measures
                else None
            ),
            start=start,
            reset_optimizer=start in (WARM, INITIAL, race.FORK, race.WITH),
            step_scale=scale,
            measure_gradients=role.measures,
            keep={keep: CURRENT} if keep else {},
        )

    # -- the race ----------------------------------------------------------------------------------

    def _race(self, observation: Observation, state: AdaptiveState) -> Answer:
        """Train a branch with the gradient and one without it, and have devices compare them."""
        branch, rounds, length = state.race.branch, state.race.rounds, self.settings.race_rounds
        if branch == "with" and rounds == length:
            branch, rounds = "without", 0
        if branch == "fork":
            branch = "with"
        if branch == "with" and not _datacenter_available(observation, state):
            return self._edge(observation, self._race_later(state), "the test has no datacenter")
        if rounds == length:
            return self._judge(observation, state)
        start = race.FORK if not rounds else CURRENT
        state = dataclasses.replace(state, race=race.Race(branch, rounds + 1))
        why = f"round {rounds + 1} of {length} of the test {branch} the datacenter's gradient"
        if branch == "without":
            return self._edge(observation, state, why, start, role=DatacenterRole(""))
        keep = race.WITH if rounds + 1 == length else ""
        role = self._roles.rehearsal(observation, state)
        return self._edge(observation, state, why, start, keep, role)

    def _judge(self, observation: Observation, state: AdaptiveState) -> Answer:
        settings = self.settings
        result = self._compare(observation, state, "race", (CURRENT, race.WITH))
        if isinstance(result, Compare):
            return result
        if isinstance(result, str):
            return self._edge(observation, self._race_later(state), result)
        outcome = _in_words(result, race.WITH, CURRENT)
        verdict = race.verdict(result, margin=settings.race_margin, error=settings.race_error)
        if verdict == "open":
            outcome += ", which decides nothing: it is tested again later"
            return self._edge(observation, self._race_later(state), outcome)
        harmless = verdict == "harmless"
        used = set(observation.datacenter_names) - set(state.excluded)
        worst = estimates.most_opposed(observation, used)
        if not harmless and len(used) > 1 and worst is not None:
            left = dataclasses.replace(state, excluded=(*state.excluded, worst))
            outcome += f": the gradient of {worst}, the most opposed one, is not used"
            return self._edge(observation, self._race_later(left), outcome)
        state = dataclasses.replace(
            state, race=race.Race(vetoed=not harmless), uses_gradient=harmless
        )
        if harmless:
            return self._edge(observation, state, outcome, start=race.WITH)
        return self._edge(observation, state, f"{outcome}: its gradient is not used")

    def _race_later(self, state: AdaptiveState) -> AdaptiveState:
        """Ask again after as many rounds with devices as there were."""
        later = race.Race(not_before=2 * max(state.edge_rounds, 1))
        return dataclasses.replace(state, race=later)

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
            race=race.Race(vetoed=state.race.vetoed),
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
            "race": "whether the datacenter's gradient does harm",
        }
        state = dataclasses.replace(state, pending_comparison=purpose)
        devices = self._comparison_devices(observation)
        return Compare(models, devices, reasons[purpose], state.to_json())

    def _comparison_devices(self, observation: Observation) -> int:
        wanted = observation.invited(self.settings.devices)
        return min(wanted, max(observation.clients_ready, 2))

    def _comparison_price(self, observation: Observation) -> float:
        """Return the price of comparing two models."""
        return 2 * self._comparison_devices(observation) * observation.comparison_price


def _datacenter_available(observation: Observation, state: AdaptiveState) -> bool:
    names = observation.datacenter_names
    used = not names or not set(names) <= set(state.excluded)
    return used and observation.datacenter_ready and observation.open("datacenter")


def _in_words(comparison: Comparison, model: str, reference: str) -> str:
    names = {
        CURRENT: "the new model",
        INITIAL: "the initial model",
        SERVED: "the served model",
        WARM: "the warm model",
        race.WITH: "the model with the gradient",
    }
    difference, error = comparison.difference[model], comparison.standard_error[model]
    than = "better" if difference < 0 else "worse"
    return (
        f"{comparison.devices} devices found {names[model]} {abs(difference):.4f} "
        f"{than} than {names[reference]} (standard error {error:.4f})"
    )
