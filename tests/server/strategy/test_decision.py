"""Decisions on rounds, and the observations that policies receive."""

import copy
import dataclasses
import json
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.storage.records import comparison_record, round_record
from tests.server.strategy.observations import comparison_of, observe, simulate

from isthmus.errors import JobError, RoundFailed
from isthmus.job import StrategySection, parse_job
from isthmus_server.storage.records import PlannedAttempt, Receipt
from isthmus_server.strategy import Compare, Plan, Stop, Wait
from isthmus_server.strategy.decision import (
    MAX_COMPARISONS,
    DecidedWait,
    RequestedComparison,
    decide,
)
from isthmus_server.strategy.limits import RunLimits
from isthmus_server.strategy.loading import load_policy
from isthmus_server.strategy.observation import observe as observe_run
from isthmus_server.strategy.policies import BUILT_IN
from isthmus_server.strategy.policy import Forecast

JUST_SO = ("current", "served")


class VirtualClock:
    """Simulated time that advances when the decision pauses."""

    def __init__(self):
        self.time = 0.0
        self.waits = []

    def now(self):
        return self.time

    async def pause(self, wait):
        self.waits.append(wait)
        self.time += wait.seconds


class Scripted:
    """A policy whose `plan` is the given function."""

    def __init__(self, answer):
        self.plan = answer


@pytest.fixture
def ask():
    """Decide a round; `look` returns observations, `compare_models` the differences of models."""

    async def ask(answer, look=lambda made, clock: observe(comparisons=made), compare_models=None):
        clock, made = VirtualClock(), []

        async def run_comparison(request):
            differences = compare_models(request.models)
            if isinstance(differences, str):
                raise RoundFailed(differences)
            made.append(comparison_of(request.models, differences))

        decision = await decide(
            Scripted(answer),
            "mine",
            RunLimits(lambda: look(tuple(made), clock), clock.pause),
            run_comparison,
        )
        return decision, clock

    return ask


async def test_a_plan_within_the_limits_is_the_decision(ask):
    decision, clock = await ask(lambda seen: Plan("federated", "because", {"turn": 1}))
    assert decision.answer == Plan("federated", "because", {"turn": 1})
    assert decision.observation.clients_ready == 8
    assert decision.observation.history == ()
    assert (list(decision.requested), list(decision.adjustments), clock.waits) == ([], [], [])


async def test_a_comparison_is_observed_in_the_same_round(ask):
    def answer(seen):
        if not seen.comparisons:
            return Compare(JUST_SO, 4, "to know")
        return Plan("federated", f"served is {seen.comparisons[0].difference['served']:+}")

    decision, _ = await ask(answer, compare_models=lambda models: [-0.25])
    assert decision.answer.reason == "served is -0.25"
    assert decision.requested == [
        RequestedComparison(models=JUST_SO, devices=4, reason="to know", refused=None)
    ]


async def test_a_comparison_that_cannot_be_made_is_refused_with_the_reason(ask):
    def answer(seen):
        return Stop(seen.refused[0]) if seen.refused else Compare(JUST_SO, devices, "to know")

    devices = 9
    decision, _ = await ask(answer)
    assert decision.answer == Stop("9 devices are to be asked and 8 are ready")
    devices = 4
    decision, _ = await ask(answer, compare_models=lambda models: "1 of 4 answered")
    assert decision.answer == Stop("1 of 4 answered")
    assert decision.requested[0].refused == "1 of 4 answered"


async def test_a_comparison_is_not_made_if_the_run_ends(ask):
    decision, _ = await ask(
        lambda seen: Compare(JUST_SO, 4, "to know"),
        lambda made, clock: observe(comparisons=made, seconds_left=0.0),
    )
    assert isinstance(decision.answer, Stop)
    assert decision.requested[0].refused == decision.answer.reason


async def test_a_policy_that_repeats_a_refused_request_is_named(ask):
    with pytest.raises(JobError, match=r"the policy 'mine' answered .* refused .* 1 of 4 answered"):
        await ask(
            lambda seen: Compare(JUST_SO, 4, "to know"),
            compare_models=lambda models: "1 of 4 answered",
        )


async def test_a_policy_with_too_many_requests_is_named(ask):
    with pytest.raises(
        JobError, match=rf"'mine' asked for more than {MAX_COMPARISONS} comparisons"
    ):
        await ask(lambda seen: Compare(JUST_SO, 4, "to know"), compare_models=lambda models: [0.0])


async def test_a_round_waits_for_its_window(ask):
    def look(made, clock):
        away = clock.now() < 600
        return observe(
            forecast={"federated": Forecast(ready=not away, changes_in=600 - clock.now() % 600)}
        )

    decision, clock = await ask(lambda seen: Plan("federated", "because"), look)
    assert decision.answer.regime == "federated"
    assert clock.now() == 600
    reason = "the federated side is outside of its window"
    assert decision.waits == [DecidedWait(seconds=600.0, reason=reason, by_limit=True)]
    assert clock.waits == [Wait(600.0, reason)]


async def test_a_policy_may_request_a_comparison_again_after_a_wait(ask):
    def answer(seen):
        if seen.comparisons:
            return Stop("enough")
        return Wait(60, "they are busy") if seen.refused else Compare(JUST_SO, 4, "to know")

    busy = ["1 of 4 answered"]
    decision, clock = await ask(answer, compare_models=lambda models: busy.pop() if busy else [0.0])
    assert (decision.answer, clock.now()) == (Stop("enough"), 60)


async def test_changes_by_a_limit_are_stored_with_the_decision(ask):
    decision, _ = await ask(lambda seen: Plan("federated", "because", cohort=1))
    assert decision.answer.cohort == 3
    assert list(decision.adjustments) == ["a cohort of 1 became 3, which is the quorum"]


async def test_a_decision_is_read_back_from_the_log(ask):
    plan = Plan("hybrid", "x", {"a": 1}, merge="transfer", keep={"w": "current"}, step_scale=0.5)
    decision, _ = await ask(lambda seen: plan)
    planned = PlannedAttempt(
        round=1, attempt=1, decision=decision, invited=["a", "b"], datacenters=["d"]
    )
    text = json.dumps(planned.to_json())
    again = PlannedAttempt.from_json(json.loads(text))
    assert again.decision.answer == plan
    assert json.dumps(again.to_json()) == text


# -- what a policy sees --------------------------------------------------------------------------

JOB = parse_job("""
name = "table"
rounds = 9
budget = 100.0
seconds = 90_000.0
device_bytes = 1_000_000
[task]
source = "task.py:Learn"
[[strategy.windows]]
side = "federated"
opens = "22:00"
closes = "06:00"
""")


def record(round_, regime="federated", metrics=(("loss", 1.0),), **more):
    receipts = [
        Receipt(
            participant=name, regime="federated", status="accepted", bytes_in=400, bytes_out=300
        )
        for name in ("a", "b")
    ]
    changes = {"started_at": 10.0, "elapsed": 14.0, "metrics": dict(metrics), **more}
    return round_record(round_, receipts, 0.0, regime=regime, **changes)


def compared_once():
    """The record of one comparison that was made."""
    return comparison_record(JUST_SO, comparison_of(JUST_SO, [0.1]))


GIVEN = {
    "spent": 4.0,
    "device_bytes": 1400,
    "state": {},
    "clients_ready": 5,
    "datacenters": ["dc"],
    "model_bytes": 100,
    "now": 20 * 3600.0,
    "elapsed": 10_000.0,
}


def see(outcomes, **changes):
    return observe_run(JOB, [one.as_past_round() for one in outcomes], **{**GIVEN, **changes})


def test_an_observation_has_remaining_limits_and_prices():
    seen = see([record(1)])
    assert (seen.round, seen.rounds, seen.budget_left) == (2, 9, 96.0)
    assert (seen.seconds_left, seen.bytes_left) == (80_000.0, 998_600)
    assert (seen.cohort, seen.quorum, seen.price("federated")) == (8, 6, 8.0)
    assert (seen.price("datacenter"), seen.price("hybrid", steps=100)) == (0.5, 9.0)
    assert seen.client_bytes == 700
    assert not seen.open("federated")
    assert seen.open("datacenter")
    assert seen.forecast["federated"].changes_in == 7200.0
    (past,) = seen.history
    assert (past.seconds, past.accepted, past.bytes_up, past.bytes_down) == (4.0, 2, 800, 600)


plain = (str, int, float, bool, type(None))


def only_plain(value):
    """Check that data consists of numbers, text, and lists and tables of them."""
    if dataclasses.is_dataclass(value):
        return all(only_plain(getattr(value, f.name)) for f in dataclasses.fields(value))
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and only_plain(inner) for key, inner in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return all(only_plain(inner) for inner in value)
    return isinstance(value, plain)


def test_an_observation_contains_only_plain_data():
    more = {"comparisons": [compared_once()], "norms": {"federated": 1.0}, "cosine": 0.5}
    seen = see([record(1), record(2, **more)])
    assert only_plain(seen)
    assert seen.history[1].comparisons[0] == comparison_of(JUST_SO, [0.1])
    assert (seen.history[1].norms, seen.history[1].cosine) == ({"federated": 1.0}, 0.5)


def test_an_observation_has_no_figures_of_single_devices():
    outcomes = [record(1), record(2)]
    changes = {"participant": "somebody", "examples": 99, "seconds": 7.0, "reason": "?"}
    others = [
        dataclasses.replace(
            one,
            receipts=[dataclasses.replace(receipt, **changes) for receipt in one.receipts],
            model_sha256="0" * 64,
            profile={"ranks": {"tokens": 1.0}},
            reason="another",
        )
        for one in outcomes
    ]
    assert see(others) == see(outcomes)


def test_a_policy_that_modifies_its_observation_has_no_effect():
    committed = record(1, comparisons=[compared_once()])
    history, state = [committed.as_past_round()], {"turn": 1}
    before = copy.deepcopy(history)
    seen = observe_run(JOB, history, **{**GIVEN, "state": state})
    seen.history[0].metrics["loss"] = 0.0
    seen.history[0].training["federated"] = {"loss": 0.0}
    seen.history[0].comparisons[0].score["initial"] = 0.0
    seen.history[0].comparisons.clear()
    seen.state["turn"] = 2
    assert (history, state) == (before, {"turn": 1})
    with pytest.raises(dataclasses.FrozenInstanceError):
        seen.spent = 0.0


class Watched(list):
    """A history that counts the accesses to its rounds."""

    looked_at = 0

    def __getitem__(self, at):
        found = super().__getitem__(at)
        self.looked_at += len(found) if isinstance(at, slice) else 1
        return found

    def __iter__(self):
        self.looked_at += len(self)
        return super().__iter__()


def test_the_cost_of_an_observation_is_independent_of_the_history():
    history = Watched([record(1).as_past_round()] * 5000)
    seen = observe_run(JOB, history, **GIVEN)
    assert seen.round == len(seen.history) + 1 == 5001
    assert seen.history[-1] is seen.history[4999]  # a copy, and one of it
    assert [past.round for past in seen.history[-3:]] == [1, 1, 1]
    assert history.looked_at < 20


@pytest.mark.parametrize("policy", sorted(BUILT_IN))
@settings(max_examples=10)
@given(st.randoms(use_true_random=False))
def test_a_policy_recreated_each_round_decides_the_same(policy, random):
    """`simulate` recreates it with its state from JSON; here one object is kept."""
    strategy = StrategySection(policy=policy, schedule=[{"regime": "federated"}])
    losses = [random.uniform(0.5, 2) for _ in range(24)]
    verdicts = {models: random.uniform(-1, 1) for models in ("initial", "warm", "day")}
    changes = [
        {
            "forecast": {"federated": Forecast(ready=random.random() < 0.7, changes_in=9.0)},
            "budget": 300.0,
        }
        for _ in losses
    ]

    def run():
        return simulate(
            strategy,
            24,
            lambda round_: changes[round_ - 1],
            lambda models: [verdicts[models[0]]] * (len(models) - 1),
            lambda round_: losses[round_ - 1],
        )

    anew = run()
    one = load_policy(strategy)
    kept, load = BUILT_IN[policy], BUILT_IN
    load[policy] = lambda strategy: one
    try:
        assert run() == anew
    finally:
        load[policy] = kept
