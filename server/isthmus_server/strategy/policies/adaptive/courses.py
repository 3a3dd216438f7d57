"""Orders of the rounds that are left in a run, within its limits.

A course is one side to the end, one side for some rounds and then the other, or both in turns. It
has only rounds that the limits allow: each has its price, its bytes, its duration and its epsilon,
and begins within the windows of its side. Where the side that is wanted cannot train any more, or
not at that hour, the other one does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from isthmus.job import Window
from isthmus_server.strategy.forecast import planned_bytes, planned_price, round_seconds
from isthmus_server.strategy.policies.adaptive import budget_plan
from isthmus_server.strategy.policies.adaptive.state import TrainingSide
from isthmus_server.strategy.policy import Kind, Observation, Plan, Side
from isthmus_server.strategy.windows import forecast

REGIMES: Mapping[TrainingSide, tuple[Kind, ...]] = {
    "datacenter": ("datacenter",),
    "devices": ("federated", "hybrid"),
}
OTHER: Mapping[TrainingSide, TrainingSide] = {"datacenter": "devices", "devices": "datacenter"}

FARTHEST = 1000
"""Rounds that are planned at most."""
_PRICE_TOLERANCE = 1e-9
"""In units of price, as in `isthmus_server.strategy.limits`."""


# -- what rounds take, and what the limits allow ---------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundNeeds:
    """What a round of one side takes."""

    seconds: float
    price: float
    device_bytes: float
    """To and from all devices."""

    @classmethod
    def of(cls, side: TrainingSide, observation: Observation) -> RoundNeeds:
        """By the forecast of a round; seconds are those of the other side if none was made."""
        plan = Plan("datacenter" if side == "datacenter" else "federated", "to be forecast")
        seconds = round_seconds(observation, REGIMES[side])
        if seconds is None:
            seconds = round_seconds(observation, REGIMES[OTHER[side]])
        return cls(
            seconds=seconds or 0.0,
            price=planned_price(plan, observation),
            device_bytes=planned_bytes(plan, observation),
        )


@dataclasses.dataclass
class LimitsLeft:
    """What the limits leave; `math.inf` where there is no limit."""

    seconds: float
    price: float
    device_bytes: float
    device_rounds: float
    """Rounds with devices that their privacy budget allows."""

    @classmethod
    def of(cls, observation: Observation) -> LimitsLeft:
        """What the limits leave now."""
        budget = observation.budget_left
        return cls(
            seconds=math.inf if observation.seconds_left is None else observation.seconds_left,
            price=math.inf if budget is None else budget + _PRICE_TOLERANCE,
            device_bytes=math.inf if observation.bytes_left is None else observation.bytes_left,
            device_rounds=budget_plan.rounds_by_epsilon(observation),
        )

    def holds(self, side: TrainingSide, needs: RoundNeeds) -> bool:
        """Whether one more round of a side fits, and ends in time."""
        return (
            needs.seconds <= self.seconds
            and needs.price <= self.price
            and needs.device_bytes <= self.device_bytes
            and (side == "datacenter" or self.device_rounds >= 1)
        )

    def take(self, side: TrainingSide, needs: RoundNeeds) -> None:
        """Make a round."""
        self.seconds -= needs.seconds
        self.price -= needs.price
        self.device_bytes -= needs.device_bytes
        self.device_rounds -= side == "devices"


def holds_round(side: TrainingSide, observation: Observation) -> bool:
    """Whether the limits allow a round of a side now, if it takes what such rounds took before."""
    return LimitsLeft.of(observation).holds(side, RoundNeeds.of(side, observation))


class _Hours:
    """When a side can work, by the job's windows; asked for later and later times."""

    def __init__(self, windows: Sequence[Window], side: TrainingSide, now: float) -> None:
        self._windows = windows
        self._side: Side = "datacenter" if side == "datacenter" else "federated"
        self._now = now
        self._known_until = -math.inf
        self._ready = True

    def closed_for(self, clock: float) -> float:
        """Seconds until it can work, so many seconds from now; 0 if it can, infinity if never."""
        if clock >= self._known_until:
            found = forecast(self._windows, self._side, self._now + clock)
            self._ready = found.ready
            self._known_until = math.inf if found.changes_in is None else clock + found.changes_in
        return 0.0 if self._ready else self._known_until - clock


# -- courses ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wish:
    """An order of rounds, before the limits."""

    first: TrainingSide
    rounds: int | None = None
    """Rounds of the first side before the other one; None: to the end."""
    in_turns: bool = False
    """Whether the sides take turns from then on."""

    def side(self, place: int) -> TrainingSide:
        """The side of the round with this place, from 0."""
        if self.rounds is None or place < self.rounds:
            return self.first
        after = (place - self.rounds) % 2 if self.in_turns else 0
        return self.first if after else OTHER[self.first]

    @property
    def text(self) -> str:
        """In words."""
        first = "the datacenter" if self.first == "datacenter" else "devices"
        other = "devices" if self.first == "datacenter" else "the datacenter"
        if self.rounds is None:
            return f"{first} to the end"
        if self.in_turns:
            return f"{first} and {other} in turns"
        return f"{self.rounds} round{'s' * (self.rounds > 1)} with {first}, then {other}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Course:
    """An order of rounds within the limits."""

    wish: Wish
    sides: Sequence[TrainingSide]
    """The side that trains in each round."""
    takes: Sequence[float]
    """Seconds or price up to the end of each round, from now."""


def courses(
    observation: Observation,
    windows: Sequence[Window],
    objective: Literal["time", "cost"],
    *,
    in_turns: bool,
) -> list[Course]:
    """The orders of the rounds that are left which begin with a side that can train now.

    Args:
        observation: of the round to plan.
        windows: of the job.
        objective: what `Course.takes` counts.
        in_turns: whether the sides may also take turns.
    """
    left = min(observation.rounds - observation.round + 1, FARTHEST)
    found: list[Course] = []
    for first in OTHER:
        wishes = [Wish(first=first)]
        wishes += [Wish(first=first, rounds=rounds) for rounds in _lengths(left)]
        wishes += [Wish(first=first, rounds=1, in_turns=True)] if in_turns else []
        for wish in wishes:
            course = _within_limits(wish, left, observation, windows, objective)
            # Limits may leave several wishes the same rounds, or not even the first.
            is_new = all(course.sides != each.sides for each in found)
            if course.sides and course.sides[0] == first and is_new:
                found.append(course)
    return found


def _lengths(left: int) -> Sequence[int]:
    """Numbers of rounds before the other side's: all small ones, and larger ones in steps."""
    lengths = []
    length = 1
    while length < left:
        lengths.append(length)
        length = max(length + 1, round(length * 1.25))
    return lengths


def _within_limits(
    wish: Wish,
    left: int,
    observation: Observation,
    windows: Sequence[Window],
    objective: Literal["time", "cost"],
) -> Course:
    """What of a wish the limits allow."""
    room = LimitsLeft.of(observation)
    needs = {side: RoundNeeds.of(side, observation) for side in OTHER}
    hours = {side: _Hours(windows, side, observation.now) for side in OTHER}
    sides: list[TrainingSide] = []
    takes: list[float] = []
    clock = 0.0
    spent = 0.0
    while len(sides) < left:
        wanted = wish.side(len(sides))
        fitting = [each for each in (wanted, OTHER[wanted]) if room.holds(each, needs[each])]
        waits = {side: hours[side].closed_for(clock) for side in fitting}
        wait = min(waits.values(), default=math.inf)
        if math.isinf(wait):
            break
        if wait:
            clock += wait
            room.seconds -= wait
            continue
        side = next(each for each in fitting if not waits[each])
        room.take(side, needs[side])
        clock += needs[side].seconds
        spent += needs[side].price
        sides.append(side)
        takes.append(clock if objective == "time" else spent)
    return Course(wish=wish, sides=sides, takes=takes)
