"""What the datacenter contributes to a round with devices, for the adaptive policy.

The weight of its gradient follows from the declared target, and is bounded by the norms of both
sides' gradients at one model. That ratio has no units: neither learning rates and numbers of steps
nor the scale of the loss change it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

from isthmus.job import StrategySection
from isthmus_server.strategy.policies.adaptive import budget_plan, evidence
from isthmus_server.strategy.policies.adaptive.state import (
    AdaptiveSettings,
    AdaptiveState,
    RaceState,
)
from isthmus_server.strategy.policies.adaptive.step_size import StepSize
from isthmus_server.strategy.policy import Observation


@dataclasses.dataclass(frozen=True)
class DatacenterRole:
    """What the datacenter contributes to a round with devices."""

    reason: str
    transfer_weight: float = 0.0
    """Weight with which devices apply its gradient; 0: they do not."""
    datacenter_weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Transfer weight of each of several datacenters, by its name."""
    trains: bool = False
    """Whether it trains in parallel with the devices instead."""
    measures: bool = False
    """Whether both sides' gradients are measured in the round."""


class RoleChooser:
    """Chooses the datacenter's role from the target, the losses and the gradients."""

    def __init__(
        self, settings: AdaptiveSettings, steps: StepSize, strategy: StrategySection
    ) -> None:
        self._settings = settings
        self._steps = steps
        self._edge_share = strategy.target_edge_share
        self._unmeasured_weight = strategy.transfer_weight
        """The weight where gradients cannot be measured: in buffered mode, and with Flower."""

    def by_share(self, observation: Observation, state: AdaptiveState) -> DatacenterRole:
        """Choose the datacenter's role where part of the target is only in the public data.

        The weight follows from the target and from the norm of the datacenter's gradient relative
        to the devices', as one task's gradient relative to another's (Chen et al. 2018). One
        gradient per round does not teach data that differ from the devices'. Whether more training
        on them helps the target cannot be observed, so parallel training takes every other round;
        devices that undo each other's work need it in every round.
        """
        settings = self._settings
        ratios = evidence.gradient_ratios(observation)
        weight = settings.transfer_part * (1 - self._edge_share) / self._edge_share
        # The weight follows from the ratio of both gradients. Where it can be measured, the first
        # round measures it before anything is transferred.
        if not ratios:
            if observation.can_measure_gradients and not state.edge_rounds:
                return DatacenterRole("", measures=True)
            weight = min(weight, self._unmeasured_weight)
            reason = f", and take {weight:.3g} of the datacenter's gradient for the rest"
            return DatacenterRole(reason, weight, measures=observation.can_measure_gradients)
        # By the first ratio: later gradients are those of a model that the transfer has changed.
        divergence = evidence.gradient_divergence(observation, ratios[0])
        loss_ratio = evidence.peak_device_loss_ratio(observation)
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
        overshoots = evidence.overshoots(observation, settings.overshoot)
        weight /= 2**overshoots
        limit = weight
        weight = min(weight, settings.gradient_pull / ratios[0])
        reason = (
            f", and take {weight:.3g} of the datacenter's gradient for the rest (it was "
            f"{ratios[0]:.3g} times as long as theirs"
            + (f", and carried them too far in {overshoots} rounds)" if overshoots else ")")
        )
        role = DatacenterRole(reason, weight)
        return self._of_several(
            role, observation, state, limit, settings.gradient_pull, itemgetter(0)
        )

    def if_useful(
        self, observation: Observation, state: AdaptiveState
    ) -> tuple[AdaptiveState, DatacenterRole]:
        """Choose the datacenter's role where the whole target is the devices'.

        They apply its gradient if the public data resemble theirs. If they forget what others
        taught, public data may remind them: their gradient does if a race shows that it does no
        harm. Devices that come at different hours cannot race, so the datacenter trains in
        parallel, which harms less than its gradient if the public data are wrong.
        """
        measures = self._measurement_due(observation, state)
        if state.uses_gradient:
            since = f" since round {state.gradient_since}" if state.gradient_since else ""
            why = f"; public data have been found useful for them{since}"
            return state, self.rehearsal(observation, state, why, measures=measures)
        alike, forgotten = self._why_useful(observation, state)
        if not alike and not forgotten:
            return state, DatacenterRole("", measures=measures)
        # A race needs the same devices for both branches.
        if not alike and self._come_and_go(observation):
            reason = f"{forgotten}, so the datacenter trains in parallel"
            return state, DatacenterRole(reason, trains=True)
        if not alike and self._settings.race_rounds:
            return self._test_or_not(observation, state, forgotten)
        # For good: phases only move forward, so that the policy cannot oscillate.
        state = dataclasses.replace(state, uses_gradient=True, gradient_since=observation.round)
        # A datacenter that came late was in no round in which the gradients were measured.
        unmeasured = observation.can_measure_gradients and not evidence.gradient_ratios(observation)
        measures = measures or unmeasured
        return state, self.rehearsal(observation, state, alike or forgotten, measures=measures)

    def _test_or_not(
        self, observation: Observation, state: AdaptiveState, why: str
    ) -> tuple[AdaptiveState, DatacenterRole]:
        """Begin a race if enough rounds are left for it."""
        possible = budget_plan.rounds_with_devices(observation)[1]
        if 2 * self._settings.race_rounds > self._settings.race_share * possible:
            reason = f"{why}, and {possible:.0f} rounds leave no room to test its gradient"
            return state, DatacenterRole(reason)
        state = dataclasses.replace(state, race=RaceState("fork"))
        return state, DatacenterRole(f"{why}: its gradient is tested next", measures=True)

    def _why_useful(self, observation: Observation, state: AdaptiveState) -> tuple[str, str]:
        """Return what speaks for the datacenter's gradient: likeness and forgetting, or "".

        After a warm start that devices found useful, the public loss is compared with its value
        before, and later: training on other labels would have undone it by then.
        """
        settings = self._settings
        if state.race.vetoed:
            return "", ""
        rounds = settings.alike_rounds * (3 if state.warm_accepted else 1)
        public_ratio = evidence.public_loss_ratio(observation, state.warm_accepted)
        alike = forgotten = ""
        # The datacenter's own training lowers the public loss too: later on it is no evidence.
        in_parallel = sum(past.regime == "hybrid" for past in observation.history)
        tested = not self._come_and_go(observation) or in_parallel <= 2 * settings.alike_rounds
        if tested and state.edge_rounds >= rounds and public_ratio < settings.alike:
            alike = (
                f"; public data are like theirs (the public loss fell to {public_ratio:.2g} of the "
                f"first, the threshold is {settings.alike:g})"
            )
        device_ratio = evidence.peak_device_loss_ratio(observation)
        if device_ratio > settings.forgotten and state.edge_rounds >= state.race.not_before:
            forgotten = (
                f"; they forget what other devices taught (their loss rose to {device_ratio:.2g} "
                f"times the first, the threshold is {settings.forgotten:g})"
            )
        return alike, forgotten

    def _come_and_go(self, observation: Observation) -> bool:
        """Whether other devices may be there at other times, so that they cannot race."""
        return self._steps.in_turns or budget_plan.has_device_hours(observation)

    def rehearsal(
        self,
        observation: Observation,
        state: AdaptiveState,
        why: str = "",
        *,
        measures: bool = False,
    ) -> DatacenterRole:
        """Return the role in which devices take the gradient though the whole target is theirs.

        With whole steps the server's momentum can carry what it adds to each round too far.
        """
        pull = self._settings.rehearsal_pull
        ratios = evidence.gradient_ratios(observation)
        weight = pull / max(ratios) if ratios else self._unmeasured_weight
        if not self._steps.is_short(observation, state):
            weight /= 2 ** evidence.overshoots(observation, self._settings.overshoot)
            if self._steps.in_turns:
                weight /= 2
        bound = f"at most {pull:g} times as long as theirs"
        taken = f", so they take {weight:.3g} of the datacenter's gradient ({bound})"
        reason = f"{why}{taken}" if why else ""
        role = DatacenterRole(reason, weight, measures=measures)
        return self._of_several(role, observation, state, math.inf, pull, max)

    def _of_several(
        self,
        role: DatacenterRole,
        observation: Observation,
        state: AdaptiveState,
        limit: float,
        pull: float,
        ratio_of: Callable[[Sequence[float]], float],
    ) -> DatacenterRole:
        """Return the role with a weight for each datacenter, by the rule of a single one.

        The gradient of each is then at most `pull` times as long as the devices', and so is their
        mean. One whose gradient was not measured yet has the weight of all until it is.

        Args:
            role: with the weight of all.
            observation: with the names of the datacenters.
            state: with those that are excluded.
            limit: largest weight.
            pull: see above.
            ratio_of: chooses among the measured ratios of a datacenter.
        """
        if len(observation.datacenter_names) < 2:
            return role
        ratios = evidence.ratios_by_datacenter(observation)
        bounds = {name: ratio_of(measured or [0.0]) for name, measured in ratios.items()}
        weights = {
            name: min(limit, pull / ratio) if ratio else role.transfer_weight
            for name, ratio in bounds.items()
        }
        # Excluded ones have the weight 0 and are still measured, where others are.
        weights |= dict.fromkeys(weights.keys() & set(state.excluded), 0.0)
        unknown = any(weights[name] and not measured for name, measured in ratios.items())
        listed = ", ".join(f"{name} {weight:.3g}" for name, weight in weights.items())
        return dataclasses.replace(
            role,
            reason=f"{role.reason}; by datacenter: {listed}",
            datacenter_weights=weights,
            measures=role.measures or (unknown and observation.can_measure_gradients),
        )

    def _measurement_due(self, observation: Observation, state: AdaptiveState) -> bool:
        """Return whether to measure the gradients: in rounds 1, 2, 4, 8, ... with devices."""
        round_ = state.edge_rounds + 1
        vetoed = state.race.vetoed
        return observation.can_measure_gradients and not vetoed and not round_ & (round_ - 1)
