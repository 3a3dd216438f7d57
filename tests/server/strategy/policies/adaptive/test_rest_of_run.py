"""The rest of a run is planned to its end, within the limits, against all orders of its rounds."""

import dataclasses
import itertools
import random
import statistics

import pytest
from tests.server.strategy.observations import observe, past_round, strategy_of
from tests.server.strategy.policies.adaptive.known_worlds import (
    Rounds,
    World,
    best_of_all,
    followed,
)

from isthmus.job import TargetMetric, Window
from isthmus_server.strategy import load_policy
from isthmus_server.strategy.loading import state_in_words
from isthmus_server.strategy.policies.adaptive import budget_plan
from isthmus_server.strategy.policies.adaptive.courses import Wish, courses

DATACENTER_PRICE = 0.5
DEVICES_PRICE = 8.0
HISTORY = [
    dataclasses.replace(past_round(1, "datacenter", accuracy=0.2), seconds=20.0),
    dataclasses.replace(past_round(2, "federated", accuracy=0.3), seconds=50.0),
]


def courses_within(objective="cost", windows=(), **limits):
    """The courses of a run with two rounds; a datacenter round takes 20 s, one with devices 50."""
    values = {"rounds": 14, "client_bytes": 10.0, **limits}
    observation = observe(3, HISTORY, **values)
    return courses(observation, windows, objective, in_turns=True)


def of_wish(found, wish):
    return next(course for course in found if course.wish == wish)


# -- limits ----------------------------------------------------------------------------------------


def test_no_course_exceeds_a_limit():
    draw = random.Random(7)
    for _ in range(40):
        budget = draw.uniform(1, 90)
        seconds = draw.uniform(20, 600)
        moved = draw.uniform(10, 900)
        limits = {"budget": budget, "seconds_left": seconds, "bytes_left": moved}
        by_price = courses_within("cost", **limits)
        by_time = courses_within("time", **limits)
        assert by_price, limits
        for course in by_price:
            devices = course.sides.count("devices")
            assert len(course.sides) <= 12
            assert course.takes[-1] <= budget + 1e-6
            assert devices * 80 <= moved
        for course in by_time:
            assert course.takes[-1] <= seconds
            assert len(course.takes) == len(course.sides)


def test_what_a_side_cannot_pay_any_more_the_other_one_trains():
    found = courses_within(budget=20.0)
    devices = of_wish(found, Wish(first="devices"))
    assert devices.sides == ["devices"] * 2 + ["datacenter"] * 8
    assert devices.takes[-1] == 2 * DEVICES_PRICE + 8 * DATACENTER_PRICE
    kept = of_wish(found, Wish(first="datacenter", rounds=8))
    assert kept.sides == ["datacenter"] * 8 + ["devices"] * 2 + ["datacenter"] * 0
    assert courses_within(budget=0.4) == []


def test_courses_have_each_order_once():
    found = courses_within()
    assert len({tuple(course.sides) for course in found}) == len(found)
    turns = of_wish(found, Wish(first="datacenter", rounds=1, in_turns=True))
    assert set(itertools.pairwise(turns.sides)) == {
        ("datacenter", "devices"),
        ("devices", "datacenter"),
    }


def test_no_round_of_a_course_begins_outside_of_its_window():
    """Devices can work for two minutes from now, and from an hour later on."""
    windows = [
        Window(side="federated", opens="00:00", closes="00:02"),
        Window(side="federated", opens="01:00", closes="23:59"),
    ]
    found = courses_within("time", windows, now=0.0, datacenter_ready=True)
    devices = of_wish(found, Wish(first="devices"))
    began = [0.0, *devices.takes[:-1]]
    for begins, side in zip(began, devices.sides, strict=True):
        assert side == "datacenter" or begins < 120 or begins >= 3600
    assert devices.sides == ["devices"] * 3 + ["datacenter"] * 9
    shut = [*windows, Window(side="datacenter", opens="02:00", closes="03:00")]
    waiting = of_wish(courses_within("time", shut, now=0.0), Wish(first="devices"))
    assert waiting.takes[3] == 3600.0 + 50.0  # it waits for the window
    assert set(waiting.sides) == {"devices"}


def test_the_privacy_budget_limits_the_rounds_with_devices():
    rounds = [past_round(1 + place, "federated") for place in range(4)]
    few = observe(5, rounds, epsilon=4.0, epsilon_spent=2.0)
    assert budget_plan.rounds_by_epsilon(few) == 4
    assert budget_plan.rounds_with_devices(few) == (6, 4)
    # Of many devices, each is asked in one round of ten.
    many = dataclasses.replace(few, clients_ready=60, clients_ineligible=20)
    assert budget_plan.rounds_by_epsilon(many) == 10
    assert budget_plan.rounds_by_epsilon(observe(5, rounds)) == float("inf")
    found = courses_within(epsilon=4.0, epsilon_spent=1.0)  # after one round with devices
    assert max(course.sides.count("devices") for course in found) == 3


def test_bytes_limit_the_rounds_with_devices():
    limited = observe(3, HISTORY, client_bytes=10.0, bytes_left=250.0)
    assert budget_plan.rounds_with_devices(limited) == (8, 3)


# -- against all orders ----------------------------------------------------------------------------


def reached_by(course, world):
    """What a course takes to the target in a known world; None if it misses it."""
    value = 0.1
    for side, takes in zip(course.sides, course.takes, strict=True):
        rounds = world.datacenter if side == "datacenter" else world.devices
        value += rounds.speed * (rounds.end - value)
        if value >= world.target:
            return takes
    return None


def test_the_best_course_is_about_the_best_of_all_orders():
    """Of 2^12 orders in random worlds with a limit: one change of sides is enough."""
    more = []
    for seed in range(40):
        draw = random.Random(seed)
        by_time = seed % 2 == 0
        world = World(
            datacenter=Rounds(
                speed=draw.uniform(0.05, 0.25), end=draw.uniform(0.6, 0.9), seconds=20, price=0.5
            ),
            devices=Rounds(speed=draw.uniform(0.1, 0.3), end=0.97, seconds=50, price=8),
            objective="time" if by_time else "cost",
            target=draw.uniform(0.7, 0.88),
            rounds=12,
            budget=draw.uniform(25, 60) if by_time else None,
            seconds=None if by_time else draw.uniform(250, 500),
        )
        found = courses_within(world.objective, budget=world.budget, seconds_left=world.seconds)
        best = best_of_all(world)
        takes = [each for course in found if (each := reached_by(course, world)) is not None]
        assert bool(takes) == best.reached, seed
        if takes:
            more.append(min(takes) / best.takes)
    assert len(more) > 15
    assert min(more) > 1 - 1e-9
    assert max(more) < 1.5
    assert statistics.fmean(more) < 1.05


# -- the policy ------------------------------------------------------------------------------------

TOO_FEW_ROUNDS = World(
    datacenter=Rounds(speed=0.12, end=0.88, seconds=20, price=1),
    devices=Rounds(speed=0.2, end=0.97, seconds=10, price=8),
    objective="cost",
    target=0.9,
    rounds=14,
    noise=0.002,
)
"""The datacenter is always cheaper, and stops short of the target; devices reach it if they begin
early enough for the limit on rounds."""
OUT_OF_TIME = dataclasses.replace(TOO_FEW_ROUNDS, rounds=30, seconds=260)
"""As before, with a limit on time."""
CHEAP_AND_GOOD = World(
    datacenter=Rounds(speed=0.2, end=0.95, seconds=10, price=1),
    devices=Rounds(speed=0.2, end=0.97, seconds=10, price=8),
    objective="cost",
    target=0.85,
    rounds=20,
    noise=0.002,
)
"""The datacenter is cheaper, and reaches the target."""
WRONG_DATA = World(
    datacenter=Rounds(speed=0.3, end=0.3, seconds=5, price=1),
    devices=Rounds(speed=0.2, end=0.97, seconds=10, price=8),
    objective="time",
    target=0.85,
    rounds=20,
    noise=0.002,
)
"""The datacenter soon teaches nothing."""


@pytest.mark.parametrize("world", [TOO_FEW_ROUNDS, OUT_OF_TIME])
def test_a_plan_to_the_end_reaches_what_trials_miss(world):
    """They prefer the datacenter, whose rate per price is higher, until it is too late."""
    planned = followed(world, sure=0.8)
    by_trials = followed(world, sure=1.0)
    assert planned.reached
    assert not by_trials.reached
    assert any("planned to the end of the run" in reason for reason in planned.reasons)
    assert not any("planned" in reason for reason in by_trials.reasons)
    best = best_of_all(world, begins="dddff")  # what trials begin with
    assert planned.takes <= 1.4 * best.takes


@pytest.mark.parametrize("world", [CHEAP_AND_GOOD, WRONG_DATA])
def test_a_plan_to_the_end_is_no_worse_elsewhere(world):
    assert followed(world, sure=0.8).loss <= followed(world, sure=1.0).loss


def test_a_plan_is_part_of_the_state_and_of_the_reasons():
    """`followed` makes a new policy for each round, as a run that is continued does."""
    first = followed(TOO_FEW_ROUNDS, sure=0.8)
    assert first == followed.__wrapped__(TOO_FEW_ROUNDS, sure=0.8)  # without its cache
    planned = next(
        place for place, reason in enumerate(first.reasons) if reason.startswith("planned")
    )
    words = state_in_words("adaptive", first.states[planned])
    assert any("the plan for the rest of the run" in sentence for sentence in words)
    assert "forecast" in first.reasons[planned]


def test_rounds_of_a_race_are_not_taken_for_a_course():
    """They begin with earlier models; the rounds before and after them are known."""
    target = TargetMetric(name="accuracy", at_least=0.9)
    strategy = strategy_of("adaptive", objective="cost", target_metric=target)
    policy = load_policy(strategy)
    sides = ["datacenter"] * 3 + ["federated"] * 10
    history = [
        past_round(place, regime, accuracy=0.1 + 0.03 * place)
        for place, regime in enumerate(sides, 1)
    ]
    begun = observe(5, history[:4], rounds=40, target=target)
    state = {"phase": "edge", "target": {"side": "devices", "since": 3, "seen": 4}}
    state["target"] |= {"trial": True, "trials": 1, "progress": 0.04}
    following = policy.plan(dataclasses.replace(begun, state=state)).state["target"]
    assert (following["seen"], following["before_others"]) == (5, 0)
    later = observe(14, history, rounds=40, target=target, state={**state, "target": following})
    found = policy.plan(later).state["target"]
    assert (found["seen"], found["before_others"], found["last_other"]) == (14, 5, 13)
