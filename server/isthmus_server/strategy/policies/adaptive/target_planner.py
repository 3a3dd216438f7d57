"""Reach a target metric in the shortest time or at the lowest price.

The run begins in the datacenter and goes on with devices; the question is when. Once both sides
have trained, the rest of the run is planned to its end, by forecasts (`rest_of_run`). Where these
do not say surely which side is to train next, trials do, which look one round ahead.

In trials each side has a rate: the part of what is missing to the target that a round closes, per
second or per price. Rates change during training, so only rates that were measured directly after
each other are compared:

    begin    in the datacenter, for a few evaluated rounds (`trial_rounds`). With devices if there
             is no datacenter yet, or if it has left. Once it has come training goes on there, on
             trial if the devices have made `trial_rounds`
    trial    of the devices, for as many: directly after these. Later, when the datacenter has made
             `trial_rounds` x 2^(trials so far) rounds since the last one, and a trial would take at
             most `trial_share` of what they took or the target is out of reach at their rate
    compare  after the trial: if the devices' rate is higher, they train until the end; otherwise
             the datacenter goes on

So by trials the datacenter never trains after the devices have proved faster: what a served average
of rounds with devices still gains would be taken for its progress. A plan may go back to it, since
forecasts know of that average.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from isthmus.job import StrategySection
from isthmus_server.strategy.forecast import (
    LATEST,
    progress_by_round,
    round_seconds,
    rounds_to_target,
)
from isthmus_server.strategy.policies.adaptive import budget_plan
from isthmus_server.strategy.policies.adaptive.courses import OTHER, REGIMES, holds_round
from isthmus_server.strategy.policies.adaptive.rest_of_run import RestOfRun
from isthmus_server.strategy.policies.adaptive.state import (
    AdaptiveSettings,
    AdaptiveState,
    TargetState,
    TrainingSide,
)
from isthmus_server.strategy.policy import Kind, Observation

PLANNED_AGAIN = 10
"""A plan is made again when one in so many of the rounds so far has passed: it takes a second."""


class TargetPlanner:
    """Chooses the side that trains next, by a plan to the end of the run or by measured rates."""

    def __init__(self, settings: AdaptiveSettings, strategy: StrategySection) -> None:
        self._settings = settings
        self._objective = strategy.objective
        self._rest = RestOfRun(strategy)

    def choose(self, observation: Observation, state: AdaptiveState) -> tuple[TargetState, str]:
        """Return the side of the next round with the planner's new state, and why."""
        now = state.target
        last = observation.round - 1
        if now is None:
            decided, why = self._by_trials(observation, None)
            return dataclasses.replace(decided, seen=observation.round), why
        if now.seen < last:  # a race came between
            first = now.before_others or now.seen
            now = dataclasses.replace(now, before_others=first, last_other=last)
        if observation.round <= now.until and _can_train(now.side, observation):
            return dataclasses.replace(now, seen=observation.round), f"as planned: {now.planned}"
        decided, why = self._by_trials(observation, now)
        decided, why = self._by_plan(observation, now, decided, why)
        kept = dataclasses.replace(
            decided,
            seen=observation.round,
            before_others=now.before_others,
            last_other=now.last_other,
        )
        return kept, why

    def _by_plan(
        self, observation: Observation, now: TargetState, proposed: TargetState, why: str
    ) -> tuple[TargetState, str]:
        """Return what the plan for the rest of the run says, or what was proposed if it is unsure.

        Args:
            observation: of the round to plan.
            now: the state before it.
            proposed: what trials say.
            why: the reason for that.
        """
        settings = self._settings
        round_ = observation.round
        unplanned = dataclasses.replace(proposed, planned="", until=0, checked=now.checked)
        is_due = round_ - now.checked >= _rounds_held(round_) or proposed.side != now.side
        if settings.sure == 1 or not is_due or not _can_both_train(observation):
            return unplanned, why
        broken = (now.before_others, now.last_other) if now.last_other else None
        preference = self._rest.preference(observation, broken)
        if preference is None:
            return unplanned, why
        unplanned = dataclasses.replace(unplanned, checked=round_)
        side = proposed.side
        if preference.surely(OTHER[side], settings.sure):
            side = OTHER[side]
        elif not preference.surely(side, settings.sure):
            return unplanned, why
        text = preference.text(side)
        if side == now.side:
            # What is planned is no trial, and does not only stand in for the other side.
            decided = TargetState(side, now.since, trials=now.trials)
        else:
            decided = TargetState(side, round_ - 1, trials=proposed.trials)
        held = _rounds_held(round_)
        change = preference.best[side].course.wish.rounds
        until = round_ - 1 + (held if change is None else min(held, change))
        planned = dataclasses.replace(decided, planned=text, until=until, checked=round_)
        return planned, f"planned to the end of the run: {text}"

    def _by_trials(
        self, observation: Observation, now: TargetState | None
    ) -> tuple[TargetState, str]:
        """Return the side of the next round by the rates of both, and why."""
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
            return now, "they were found to approach the target no slower than the datacenter"
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


def _rounds_held(round_: int) -> int:
    """How many rounds a plan that is made for this round is followed before it is made again."""
    return 1 + (round_ - 1) // PLANNED_AGAIN


def _can_train(side: TrainingSide, observation: Observation) -> bool:
    """Return whether a side is connected, within its window, and within the limits now."""
    if side == "datacenter":
        is_there = budget_plan.datacenter_available(observation)
    else:
        is_there = observation.open("federated") and observation.clients_ready >= observation.quorum
    return is_there and holds_round(side, observation)


def _can_both_train(observation: Observation) -> bool:
    return all(_can_train(side, observation) for side in OTHER)
