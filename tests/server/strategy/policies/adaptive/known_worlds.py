"""Worlds in which it is known what a round of each side does, and the best that can be reached."""

import dataclasses
import functools
import json

import numpy as np
from tests.server.strategy.observations import observe, strategy_of

from isthmus.job import TargetMetric
from isthmus_server.strategy import Plan, load_policy
from isthmus_server.strategy.answer_checks import checked_answer
from isthmus_server.strategy.limits import enforce_limits
from isthmus_server.strategy.policy import PastRound

STARTS = 0.1
DEVICES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds:
    """What rounds of one side do to the accuracy, and take."""

    speed: float
    """Part of the distance to the end that a round closes."""
    end: float
    seconds: float
    price: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """Both sides, the target and the limits."""

    datacenter: Rounds
    devices: Rounds
    objective: str
    target: float
    rounds: int
    budget: float | None = None
    seconds: float | None = None
    noise: float = 0.0
    devices_from: int = 1
    """The first round in which devices are there."""

    def side(self, regime):
        return self.datacenter if regime == "datacenter" else self.devices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a run."""

    regimes: str
    """Initials of the regimes."""
    reached: bool
    takes: float
    """Seconds or price until the end of the run."""
    value: float
    reasons: tuple[str, ...] = ()
    states: tuple[dict, ...] = ()
    ended: str = ""

    @property
    def loss(self):
        """Lower is better: what it takes, and misses come after all that reach the target."""
        return self.takes if self.reached else 1e6 - self.value


@functools.cache
def followed(world, sure, seed=0):
    """Train by the policy `adaptive`; `sure` is its setting, 1 for trials alone."""
    settings = {"sure": sure}
    target = TargetMetric(name="accuracy", at_least=world.target)
    strategy = strategy_of("adaptive", settings, objective=world.objective, target_metric=target)
    draw = np.random.default_rng(seed)
    history = []
    state = {}
    reasons = []
    states = []
    value = STARTS
    seen = STARTS
    elapsed = 0.0
    spent = 0.0
    while len(history) < world.rounds:
        observation = observe(
            len(history) + 1,
            history,
            rounds=world.rounds,
            state=json.loads(json.dumps(state)),
            target=target,
            budget=world.budget,
            clients_ready=DEVICES if len(history) + 1 >= world.devices_from else 0,
            spent=spent,
            elapsed=elapsed,
            seconds_left=None if world.seconds is None else world.seconds - elapsed,
            client_price=world.devices.price / DEVICES,
            step_price=world.datacenter.price / 50,
        )
        answer = checked_answer(load_policy(strategy), "adaptive", observation)
        answer = enforce_limits(answer, observation).answer
        if not isinstance(answer, Plan):
            break
        state = answer.state
        states.append(state)
        reasons.append(answer.reason)
        side = world.side(answer.regime)
        value += side.speed * (side.end - value)
        seen = value + world.noise * draw.standard_normal()
        elapsed += side.seconds
        spent += side.price
        history.append(
            PastRound(
                round=len(history) + 1,
                regime=answer.regime,
                metrics={"accuracy": float(seen)},
                seconds=side.seconds,
                price=side.price,
                accepted=1,
                elapsed=elapsed,
            )
        )
        if world.seconds is not None and elapsed > world.seconds:
            seen = -1.0  # too late
    reached = seen >= world.target
    return Outcome(
        regimes="".join(past.regime[0] for past in history),
        reached=reached,
        takes=elapsed if world.objective == "time" else spent,
        value=seen,
        reasons=tuple(reasons),
        states=tuple(states),
        ended="" if isinstance(answer, Plan) else answer.reason,
    )


def best_of_all(world, begins=""):
    """The best of all orders of rounds that begin so, without noise."""
    best = None
    orders = [("", STARTS, 0.0, 0.0)]
    while orders:
        order, value, elapsed, spent = orders.pop()
        takes = elapsed if world.objective == "time" else spent
        reached = value >= world.target
        found = Outcome(regimes=order, reached=reached, takes=takes, value=value)
        if best is None or found.loss < best.loss:
            best = found
        if reached or len(order) == world.rounds:
            continue
        for initial in "df" if len(order) >= len(begins) else begins[len(order)]:
            side = world.datacenter if initial == "d" else world.devices
            after = (
                order + initial,
                value + side.speed * (side.end - value),
                elapsed + side.seconds,
                spent + side.price,
            )
            in_time = world.seconds is None or after[2] <= world.seconds
            if in_time and (world.budget is None or after[3] <= world.budget):
                orders.append(after)
    return best
