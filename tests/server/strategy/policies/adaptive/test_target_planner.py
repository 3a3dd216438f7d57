"""`objective = "time"` and `"cost"`: the side that reaches the target metric first, by trials.

Plans for the rest of the run, which come before trials, are those of `test_rest_of_run`.
"""

import dataclasses
import itertools
import json

import pytest
from tests.server.strategy.observations import observe, past_round, strategy_of

from isthmus.job import TargetMetric
from isthmus_server.strategy import Plan, load_policy
from isthmus_server.strategy.answer_checks import checked_answer
from isthmus_server.strategy.limits import enforce_limits

TARGET = TargetMetric(name="accuracy", at_least=0.9)
STARTS = 0.1


def run(objective, closes, seconds=(1.0, 1.0), rounds=400, changes=lambda round_: {}):
    """Train until the target or the end; return the regimes' initials, reasons and the result.

    No rounds are planned ahead (`sure`).

    `closes(side, missing)` is the part of what is missing that a round closes; `seconds` are those
    of a datacenter round and of one with devices.
    """
    settings = {"sure": 1.0}
    strategy = strategy_of("adaptive", settings, objective=objective, target_metric=TARGET)
    history, state, reasons, missing, spent = [], {}, [], TARGET.at_least - STARTS, 0.0
    for round_ in range(1, rounds + 1):
        observation = observe(
            round_,
            history,
            rounds=rounds,
            state=json.loads(json.dumps(state)),
            target=TARGET,
            spent=spent,
            **changes(round_),
        )
        answer = checked_answer(load_policy(strategy), "adaptive", observation)
        answer = enforce_limits(answer, observation).answer
        if not isinstance(answer, Plan):
            break
        state = answer.state
        reasons.append(answer.reason)
        side = "datacenter" if answer.regime == "datacenter" else "devices"
        missing -= closes(side, missing) * missing
        spent += observation.price(answer.regime)
        past = past_round(round_, answer.regime, accuracy=TARGET.at_least - missing)
        took = seconds[side == "devices"]
        history.append(dataclasses.replace(past, seconds=took, elapsed=sum(seconds) * round_))
    regimes = "".join(past.regime[0] for past in history)
    return regimes, reasons, answer


def by_side(datacenter, devices):
    return lambda side, missing: (
        (datacenter if side == "datacenter" else devices)
        * (1.0 if missing > 0.02 else 1.01 / max(missing, 1e-9) * 0.02)
    )


def test_the_cheap_side_that_reaches_the_target_does_the_work():
    regimes, _, end = run("cost", by_side(0.1, 0.2))
    assert "reached the target" in end.reason
    assert regimes.count("d") > 10  # 16 of its rounds cost as much as one with devices
    assert regimes.count("f") <= 3  # one trial


def test_the_side_that_is_out_of_reach_alone_is_left_early():
    """The datacenter closes half of the way at most."""

    def closes(side, missing):
        if side == "devices":
            return 0.3 if missing > 0.02 else 1.01
        return 0.2 if missing > 0.4 else 0.0

    regimes, reasons, end = run("cost", closes)
    assert "reached the target" in end.reason
    last = regimes.rindex("d")
    assert last < 20
    assert set(regimes[last + 1 :]) == {"f"}
    assert any("the datacenter came no closer" in reason for reason in reasons)


@pytest.mark.parametrize(("seconds", "most"), [((1.0, 60.0), "d"), ((60.0, 1.0), "f")])
def test_time_counts_seconds_and_not_prices(seconds, most):
    regimes, _, end = run("time", by_side(0.05, 0.05), seconds)
    assert "reached the target" in end.reason
    assert max("df", key=regimes[4:].count) == most


def test_a_trial_that_is_lost_ends_and_the_next_one_is_later():
    regimes, reasons, _ = run("time", by_side(0.05, 0.001))
    trials = [i for i, reason in enumerate(reasons) if reason.startswith("a trial of the devices")]
    assert len(trials) >= 2
    gaps = [after - before for before, after in itertools.pairwise(trials)]
    assert gaps == sorted(gaps)
    assert regimes.count("f") < 0.3 * len(regimes)
    assert any("per second" in reason for reason in reasons)


def test_devices_go_on_where_no_side_comes_closer():
    regimes, _, _ = run("cost", by_side(0.0, 0.0), rounds=60)
    assert regimes == "ddd" + 57 * "f"


def test_a_side_that_is_away_is_replaced_and_comes_back():
    def changes(round_):
        return {"clients_ready": 0 if round_ < 20 else 8, "datacenter_ready": round_ < 30}

    regimes, reasons, _ = run("time", by_side(0.001, 0.001), rounds=40, changes=changes)
    assert set(regimes[:19]) == {"d"}
    assert set(regimes[30:]) == {"f"}
    assert "the devices cannot train now" in reasons[5]


def test_devices_that_proved_faster_go_on_when_they_are_back():
    def changes(round_):
        return {"clients_ready": 0 if 10 < round_ < 15 else 8}

    regimes, reasons, _ = run("time", by_side(0.01, 0.02), rounds=30, changes=changes)
    assert regimes == "ddd" + 7 * "f" + 4 * "d" + 16 * "f"
    assert reasons[14].startswith("the devices can train again")


def test_quality_neither_tries_sides_nor_compares_rates():
    """The same target with `objective = "quality"` only ends the run."""
    observation = observe(1, target=TARGET)
    plain = load_policy(strategy_of("adaptive")).plan(observation)
    targeted = load_policy(strategy_of("adaptive", target_metric=TARGET)).plan(observation)
    assert plain == targeted


@pytest.mark.parametrize(
    ("objective", "closes", "wins"),
    [("cost", (0.05, 0.1), "d"), ("cost", (0.001, 0.1), "f"), ("time", (0.1, 0.05), "d")],
)
def test_a_datacenter_that_comes_late_is_tried(objective, closes, wins):
    """Devices that train only because it was not there have not proved to be faster."""

    def changes(round_):
        return {"datacenter_ready": round_ > 6, "client_price": 1.0, "step_price": 0.005}

    regimes, reasons, _ = run(objective, by_side(*closes), changes=changes)
    assert regimes[:6] == "ffffff"
    assert regimes[6:8] == "dd"
    assert "a trial of the datacenter: it has come after the devices began" in reasons[6]
    assert regimes[8:12] == 4 * wins


@pytest.mark.parametrize(("closes", "wins"), [((0.05, 0.1), "d"), ((0.001, 0.1), "f")])
def test_devices_that_stand_in_for_a_datacenter_that_left_have_not_proved_faster(closes, wins):
    """It was the faster one by a trial, or had none; once it is back it is tried."""

    def changes(round_):
        gone = 10 < round_ < 20
        return {"datacenter_ready": not gone, "client_price": 1.0, "step_price": 0.005}

    regimes, reasons, _ = run("cost", by_side(*closes), changes=changes)
    if closes[0] > 0.01:
        assert regimes[10:19] == 9 * "f"
        assert "the datacenter cannot train now" in reasons[10]
        assert "a trial of the datacenter: it has come after the devices began" in reasons[19]
        assert regimes[19:21] == "dd"
    assert regimes[22:26] == 4 * wins


@pytest.mark.parametrize("objective", ["cost", "time"])
def test_a_datacenter_that_comes_in_the_first_round_trains_as_one_that_was_there(objective):
    """Devices are not measured first, which costs the most: their trial follows."""

    def late(round_):
        return {"datacenter_ready": round_ > 1}

    closes = by_side(0.1, 0.05)
    on_time, _, _ = run(objective, closes)
    regimes, reasons, _ = run(objective, closes, changes=late)
    assert "it has come, and training on no device is tried first" in reasons[1]
    # That round takes the place of the first one of the datacenter, whose gain nobody knows.
    assert regimes[:12] == "f" + on_time[1:12]
    assert regimes.count("f") <= on_time.count("f") + 1
