"""Forecasts of rounds: time and progress as in the rounds before, price and bytes by the plan."""

import dataclasses
import math

import pytest
from tests.server.strategy.observations import observe, past_round

from isthmus.job import TargetMetric
from isthmus_server.strategy import Plan
from isthmus_server.strategy.forecast import forecast_round, mean_progress, rounds_to_target

ACCURACY = TargetMetric(name="accuracy", at_least=0.9)


def history_of(*rounds):
    """Rounds as (regime, accuracy) or (regime,) without an evaluation; they take 1, 2, 3, ... s."""
    return [
        dataclasses.replace(
            past_round(number, regime, **({"accuracy": value[0]} if value else {})),
            seconds=float(number),
        )
        for number, (regime, *value) in enumerate(rounds, 1)
    ]


def seen(*rounds, target=ACCURACY):
    return observe(len(rounds) + 1, history_of(*rounds), target=target)


def test_progress_is_the_part_of_what_was_missing_to_the_target():
    observation = seen(("federated", 0.5), ("federated", 0.6), ("federated", 0.75))
    assert mean_progress(observation) == pytest.approx((0.1 / 0.4 + 0.15 / 0.3) / 2)
    assert mean_progress(observation, since=2) == pytest.approx(0.15 / 0.3)


def test_progress_does_not_depend_on_the_unit_of_the_metric():
    losses = [4.0, 3.0, 2.5]
    values = []
    for factor in (1, 1000):
        history = [past_round(i, "federated", loss=factor * x) for i, x in enumerate(losses, 1)]
        values.append(mean_progress(observe(4, history)))
    assert values[0] == pytest.approx(values[1])


def test_a_gain_of_rounds_in_several_regimes_is_the_progress_of_none():
    observation = seen(("datacenter", 0.5), ("federated",), ("datacenter", 0.7), ("datacenter",))
    assert mean_progress(observation, ("datacenter",)) is None
    assert mean_progress(observation, ("datacenter", "federated")) == pytest.approx(0.25)


def test_a_figure_that_is_not_a_number_is_no_progress():
    observation = seen(("federated", 0.5), ("federated", math.nan), ("federated", 0.7))
    assert mean_progress(observation) == pytest.approx(0.25)


def test_a_round_is_forecast_from_those_of_its_regime():
    observation = seen(("datacenter", 0.5), ("datacenter", 0.7), ("federated", 0.8))
    plan = Plan("datacenter", "x", datacenter_steps=100)
    forecast = forecast_round(plan, observation)
    assert forecast.price == observation.price("datacenter", steps=100)
    assert forecast.device_bytes == 0
    assert forecast.seconds == 1.5
    assert forecast.metric == "accuracy"
    assert forecast.value == pytest.approx(0.85)  # half of the missing 0.1 is closed
    assert forecast.rounds_to_target == pytest.approx(2)


def test_the_target_is_out_of_reach_if_rounds_move_away_from_it():
    observation = seen(("federated", 0.5), ("federated", 0.4))
    assert forecast_round(Plan("federated", "x"), observation).rounds_to_target == math.inf
    assert rounds_to_target(0.0) == math.inf


def test_nothing_is_forecast_for_a_regime_before_its_first_round():
    observation = seen(("datacenter", 0.5), ("datacenter", 0.6))
    forecast = forecast_round(Plan("federated", "x"), observation)
    assert (forecast.seconds, forecast.value, forecast.rounds_to_target) == (None, None, None)
    assert forecast.price == observation.price("federated")


def test_without_a_target_the_forecast_is_of_the_held_out_loss():
    history = [past_round(1, "federated", loss=2.0), past_round(2, "federated", loss=1.0)]
    forecast = forecast_round(Plan("federated", "x"), observe(3, history))
    assert (forecast.metric, forecast.value, forecast.rounds_to_target) == ("loss", 0.5, None)
