"""The length of the server's steps, and devices that come in turns, with the adaptive policy."""

import dataclasses

import pytest
from tests.server.strategy.observations import (
    HALF,
    gradients_of,
    observe,
    past_round,
    strategy_of,
)

from isthmus_server.strategy import load_policy
from isthmus_server.strategy.policy import Forecast

DEVICES = {"side": "federated", "opens": "00:00", "closes": "06:00"}
LATER = {"side": "federated", "opens": "06:00", "closes": "12:00"}


@pytest.mark.parametrize(
    ("windows", "scale"),
    [
        ((DEVICES, LATER), 0.5),
        ((DEVICES,), 1.0),
        ((DEVICES, {**LATER, "side": "datacenter"}), 1.0),
        (({**DEVICES, "days": ("sat",)}, {**LATER, "days": ("sun", "mon")}), 1.0),
        (({**DEVICES, "days": ("sat", "sun")}, {**LATER, "days": ("sun", "mon")}), 0.5),
        (({**DEVICES, "days": ("sat", "sat")},), 1.0),
        ((DEVICES, DEVICES), 1.0),
        ((DEVICES, {**DEVICES, "opens": "02:00", "days": ("sat",)}), 1.0),
        ((LATER, {**DEVICES, "closes": "00:00"}), 1.0),
        ((LATER, {**DEVICES, "opens": "22:00"}), 0.5),
    ],
)
def test_steps_are_short_from_the_start_if_devices_may_come_in_turns(windows, scale):
    plan = load_policy(strategy_of("adaptive", windows=windows)).plan(observe(1, []))
    assert plan.step_scale == scale
    assert ("they have 2 windows a day: steps x 0.5" in plan.reason) == (scale < 1)


def rounds_with(device_losses, **figures):
    """Committed federated rounds with these losses of the devices."""
    return [
        dataclasses.replace(
            past_round(round_, "federated", gradients=gradients_of(1.0), **figures),
            training={"federated": {"loss": loss}},
        )
        for round_, loss in enumerate(device_losses, 1)
    ]


def test_steps_stay_short_once_devices_have_forgotten():
    """Also where public data cover part of the target, and if the loss falls again."""
    history = rounds_with([1.0, 0.4, 2.6, *[0.3] * 6])
    for rounds, scale in ((2, 1.0), (3, 0.5), (9, 0.5)):
        observation = observe(
            rounds + 1, history[:rounds], state={"phase": "edge", "edge_rounds": rounds}
        )
        plan = load_policy(HALF).plan(observation)
        assert plan.step_scale == scale
        assert ("rose to 2.6 times the first" in plan.reason) == (scale < 1)


IN_TURNS = strategy_of("adaptive", windows=(DEVICES, LATER))
OPEN_AT_HOURS = Forecast(ready=True, changes_in=3600.0, share=0.5)
BOTH = ["00:00-06:00", "06:00-12:00"]


def plan_in_turns(history, strategy=IN_TURNS, hour=1.0, **state):
    """The plan after a history, at an hour of the day."""
    observation = observe(
        len(history) + 1,
        history,
        state={"phase": "edge", "edge_rounds": len(history), **state},
        now=hour * 3600,
        forecast={"federated": OPEN_AT_HOURS},
    )
    return load_policy(strategy).plan(observation)


@pytest.mark.parametrize(
    ("windows", "second_loss", "scale"),
    [
        (BOTH, 1.3, 1.0),
        (BOTH, 1.4, 0.5),  # they forgot more than a third
        (BOTH[:1], 0.9, 0.5),  # no devices of the other window have trained yet
        (BOTH, None, 0.5),  # their loss is not known
    ],
)
def test_steps_are_whole_once_devices_of_another_window_forgot_little(windows, second_loss, scale):
    history = rounds_with([1.0, 0.6, second_loss])
    if second_loss is None:
        history = [dataclasses.replace(past, training={}) for past in history]
    plan = plan_in_turns(history, windows=windows)
    assert plan.step_scale == scale
    assert ("their loss was only 1.3 times the first" in plan.reason) == (scale == 1)


def test_steps_stay_short_in_turns_where_public_data_hold_a_part_of_the_target():
    strategy = strategy_of("adaptive", windows=(DEVICES, LATER), target_edge_share=0.5)
    assert plan_in_turns(rounds_with([1.0, 0.6, 0.9]), strategy, windows=BOTH).step_scale == 0.5


def test_the_windows_in_which_devices_trained_are_remembered():
    first = plan_in_turns([], hour=5.0)
    assert list(first.state["windows"]) == BOTH[:1]
    second = plan_in_turns(rounds_with([1.0]), hour=7.0, windows=first.state["windows"])
    assert list(second.state["windows"]) == BOTH
    assert (
        list(plan_in_turns([], strategy_of("adaptive", windows=(DEVICES,))).state["windows"]) == []
    )


def test_the_datacenter_trains_in_parallel_where_devices_in_turns_forget():
    """They cannot race, and its gradient would do more harm if public labels were wrong."""
    plan = plan_in_turns(rounds_with([1.0, 0.6, 2.3], public_loss=3.0))
    assert (plan.regime, plan.merge, plan.step_scale) == ("hybrid", "weighted", 0.5)
    assert "2.3 times the first, the threshold is 2), so the datacenter trains in" in plan.reason


@pytest.mark.parametrize(
    ("parallel_rounds", "merge"), [(0, "transfer"), (6, "transfer"), (7, "weighted")]
)
def test_devices_in_turns_take_the_gradient_of_public_data_like_theirs(parallel_rounds, merge):
    """The public loss is no evidence once the datacenter has trained on public data for a while."""
    history = rounds_with([1.0, 0.6, 2.3, *[0.9] * (parallel_rounds + 1)], public_loss=3.0)
    history[-1] = dataclasses.replace(history[-1], metrics={"public_loss": 1.5})
    for at in range(3, 3 + parallel_rounds):
        history[at] = dataclasses.replace(history[at], regime="hybrid")
    plan = plan_in_turns(history)
    assert (plan.merge, plan.step_scale) == (merge, 0.5)
    assert plan.transfer_weight == (0.25 if merge == "transfer" else None)


def test_devices_in_turns_do_not_race_although_there_is_always_a_window():
    windows = (DEVICES, {**LATER, "closes": "00:00"})
    strategy = strategy_of("adaptive", windows=windows)
    history = rounds_with([1.0, 0.6, 2.3], public_loss=3.0)
    state = {"phase": "edge", "edge_rounds": 3}
    plan = load_policy(strategy).plan(observe(4, history, state=state, rounds=200))
    assert plan.merge == "weighted"


@pytest.mark.parametrize(
    ("windows", "losses", "length", "weight"),
    [
        ((), [1.0, 0.6], 2.9, 0.25),
        ((), [1.0, 0.6], 3.1, 0.125),  # its component along the gradient is more than 1.5 x 2
        ((), [1.0, 2.1], 3.1, 0.25),  # steps are short from here on
        ((DEVICES, LATER), [1.0, 0.6], 2.9, 0.125),  # steps are whole though devices take turns
        ((DEVICES, LATER), [1.0, 0.6], 3.1, 0.0625),
        ((DEVICES, LATER), [1.0, 1.4], 3.1, 0.25),
    ],
)
def test_the_gradient_counts_half_if_whole_steps_carry_it_too_far(windows, losses, length, weight):
    first, second = rounds_with(losses, public_loss=3.0)
    first = dataclasses.replace(first, norms={"federated": 2.0})
    second = dataclasses.replace(
        second, regime="hybrid", norms={"federated": length, "datacenter": 0.1}, cosine=1.0
    )
    strategy = strategy_of("adaptive", windows=windows)
    state = {"uses_gradient": True, "gradient_since": 2, "windows": BOTH}
    plan = plan_in_turns([first, second], strategy, **state)
    assert plan.transfer_weight == pytest.approx(weight)
    assert (
        "public data have been found useful for them since round 2, so they take "
        f"{weight:.3g} of the datacenter's gradient (at most 0.25 times as long as theirs)"
    ) in plan.reason
