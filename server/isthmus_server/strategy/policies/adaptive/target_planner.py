"""Reach a target metric in the shortest time or at the lowest price.

The run begins in the datacenter and goes on with devices; the question is when. Each side has a
rate: the part of what is missing to the target that a round closes, per second or per price. Rates
change during training, so only rates that were measured directly after each other are compared:

    begin    in the datacenter, for a few evaluated rounds (`trial_rounds`). With devices if there
             is no datacenter yet, or if it has left. Once it has come training goes on there, on
             trial if the devices have made `trial_rounds`
    trial    of the devices, for as many: directly after these. Later, when the datacenter has made
             `trial_rounds` x 2^(trials so far) rounds since the last one, and a trial would take at
             most `trial_share` of what they took or the target is out of reach at their rate
    compare  after the trial: if the devices' rate is higher, they train until the end; otherwise
             the datacenter goes on

So the datacenter never trains after the devices have proved faster: what a served average of rounds
with devices still gains would be taken for its progress.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

from isthmus_server.strategy.forecast import (
    LATEST,
    progress_by_round,
    round_seconds,
    rounds_to_target,
)
from isthmus_server.strategy.policies.adaptive import budget_plan
from isthmus_server.strategy.policies.adaptive.state import (
    AdaptiveSettings,
    AdaptiveState,
    TargetState,
    TrainingSide,
)
from isthmus_server.strategy.policy import Kind, Observation

REGIMES: Mapping[TrainingSide, tuple[Kind, ...]] = {
    "datacenter": ("datacenter",),
    "devices": ("federated", "hybrid"),
}
OTHER: Mapping[TrainingSide, TrainingSide] = {"datacenter": "devices", "devices": "datacenter"}


class TargetPlanner:
    """Chooses the side that trains next, by the rates at which both approach the target."""

    def __init__(self, settings: AdaptiveSettings, objective: Literal["time", "cost"]) -> None:
        self._settings = settings
        self._objective = objective

    def choose(self, observation: Observation, state: AdaptiveState) -> tuple[TargetState, str]:
        """Return the side of the next round with the planner's new state, and why."""
        now = state.target
        last = observation.round - 1
        if now is None:
            if _can_train("datacenter", observation):
                return TargetState("datacenter", last), "training on no device is tried first"
            return TargetState("devices", last, untried=True), "no datacenter can train now"
        # They had been found faster, and only stood aside.
        if now.instead and _can_train("devices", observation):
            return TargetState("devices", last, trials=now.trials), "the devices can train again"
        other = OTHER[now.side]
        if not _can_train(other, observation):
            return now, f"the {other} cannot train now"
        if not _can_train(now.side, observation):
            instead = now.side == "devices" and not now.trial and not now.untried
            # Devices that stand in for a datacenter have not proved to be faster.
            untried = now.side == "datacenter"
            moved = TargetState(other, last, trials=now.trials, instead=instead, untried=untried)
            return moved, f"the {now.side} cannot train now"
        if now.side == "devices" and not now.trial and not now.untried:
            return now, "a trial found that they approach the target no slower than the datacenter"
        measured = progress_by_round(observation, REGIMES[now.side], now.since)[-LATEST:]
        if len(measured) < self._settings.trial_rounds and now.untried:
            # As at the start: devices, which cost the most, would be measured for a comparison that
            # the datacenter may make needless.
            began = TargetState(other, last, trials=now.trials)
            return began, "it has come, and training on no device is tried first"
        if len(measured) < self._settings.trial_rounds:
            return now, f"the progress of the {now.side} is being measured"
        progress = statistics.fmean(measured)
        if now.trial:
            return self._judge(observation, now, progress)
        if now.untried:
            why = "it has come after the devices began"
        else:
            why = self._why_trial(observation, now, measured)
        if not why:
            return now, f"a round with the {now.side} closes {progress:.2%} of what is missing"
        trial = TargetState(other, last, trial=True, trials=now.trials + 1, progress=progress)
        return trial, f"a trial of the {other}: {why}"

    def _judge(
        self, observation: Observation, trial: TargetState, progress: float
    ) -> tuple[TargetState, str]:
        """Compare the side that was tried with the one before it."""
        before = OTHER[trial.side]
        rates = {
            trial.side: progress / self._each(observation, trial.side),
            before: trial.progress / self._each(observation, before),
        }
        # Where neither comes closer, the devices go on: the target is theirs, or a part of it.
        best = max(rates, key=lambda side: (max(rates[side], 0.0), side == "devices"))
        unit = "second" if self._objective == "time" else "unit of price"
        why = ", ".join(f"the {side} closed {rates[side]:.2%}" for side in sorted(rates))
        since = trial.since if best == trial.side else observation.round - 1
        decided = TargetState(best, since, trials=trial.trials)
        return decided, f"{why} of what was missing per {unit}"

    def _why_trial(
        self, observation: Observation, now: TargetState, measured: Sequence[float]
    ) -> str:
        """Return why to try the other side now; empty if it is not time to.

        Progress that is not larger than its standard error counts as none.
        """
        settings = self._settings
        here = self._each(observation, now.side)
        other = OTHER[now.side]
        rounds = observation.round - 1 - now.since
        # Each trial costs rounds, so that they become rarer with each one that changed nothing.
        if rounds < settings.trial_rounds * 2**now.trials:
            return ""
        if not now.trials:
            return "its progress is not known yet"
        # Less a standard error: noise alone looks like progress in half of all cases.
        error = statistics.stdev(measured) / math.sqrt(len(measured)) if len(measured) > 1 else 0.0
        needed = rounds_to_target(statistics.fmean(measured) - error)
        if math.isinf(needed):
            return f"the {now.side} came no closer to the target"
        if needed > self._rounds_left(observation, now.side):
            return f"the {now.side} would need {needed:.0f} more rounds, and the limits allow fewer"
        trial = (settings.trial_rounds + 1) * self._each(observation, other)
        if trial > settings.trial_share * rounds * here:
            return ""
        return f"after {rounds} rounds this costs little"

    def _each(self, observation: Observation, side: TrainingSide) -> float:
        """Return what a round of this side takes: seconds or a price; never 0.

        If the side has not trained so far, its seconds are those of the other one.
        """
        if self._objective == "cost":
            kind: Kind = "datacenter" if side == "datacenter" else "federated"
            return max(observation.price(kind), 1e-9)
        seconds = round_seconds(observation, REGIMES[side])
        other = round_seconds(observation, REGIMES[OTHER[side]])
        return max(seconds or other or 0.0, 1e-9)

    def _rounds_left(self, observation: Observation, side: TrainingSide) -> float:
        """Return how many more rounds with this side the job's limits allow."""
        left = float(observation.rounds - observation.round + 1)
        if observation.seconds_left is not None:
            seconds = round_seconds(observation, REGIMES[side]) or 0.0
            left = min(left, observation.seconds_left / max(seconds, 1e-9))
        if observation.budget_left is not None:
            kind: Kind = "datacenter" if side == "datacenter" else "federated"
            left = min(left, observation.budget_left / max(observation.price(kind), 1e-9))
        return left


def _can_train(side: TrainingSide, observation: Observation) -> bool:
    """Return whether a side is connected and within its window now."""
    if side == "datacenter":
        return budget_plan.datacenter_available(observation)
    return observation.open("federated") and observation.clients_ready >= observation.quorum
