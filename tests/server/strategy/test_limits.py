"""No policy exceeds the job's limits: neither a built-in one nor a hostile one."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.strategy.observations import MODELS, comparison_of, observe, past_round

from isthmus.errors import JobError
from isthmus.job import StrategySection, TargetMetric
from isthmus_server.strategy import Compare, Plan, Stop, Wait, load_policy
from isthmus_server.strategy.answer_checks import checked_answer
from isthmus_server.strategy.limits import LimitRefusal, enforce_limits
from isthmus_server.strategy.policies import BUILT_IN
from isthmus_server.strategy.policy import KINDS, Forecast, PastRound

money = st.floats(0, 100)
forecasts = st.one_of(
    st.just(Forecast()),
    st.builds(Forecast, ready=st.booleans(), changes_in=st.floats(1, 1e5), share=st.floats(0, 1)),
)
rounds = st.builds(
    PastRound,
    round=st.integers(1, 50),
    regime=st.sampled_from(KINDS),
    metrics=st.one_of(
        st.just({}), st.fixed_dictionaries({"loss": st.floats(0, 10), "accuracy": st.floats(0, 1)})
    ),
    seconds=st.floats(0, 1e4),
    price=money,
    accepted=st.integers(0, 20),
)


@st.composite
def observations(draw):
    """Any observation of a run."""
    history = draw(st.lists(rounds, max_size=12))
    models = ("initial", "current", draw(st.sampled_from(["initial", "served", "day"])))
    comparison = st.builds(
        lambda a, b: comparison_of(models, (a, b)), st.floats(-1, 1), st.floats(-1, 1)
    )
    cohort = draw(st.integers(1, 20))
    return observe(
        len(history) + 1,
        history,
        rounds=draw(st.integers(len(history) + 1, 200)),
        clients_ready=draw(st.integers(0, 30)),
        datacenter_ready=draw(st.booleans()),
        datacenters=draw(st.integers(0, 3)),
        spent=draw(money),
        budget=draw(st.none() | money),
        cohort=cohort,
        over_selection=draw(st.floats(1, 3)),
        quorum=draw(st.integers(1, cohort)),
        datacenter_steps=draw(st.integers(1, 500)),
        client_price=draw(st.floats(0, 10)),
        step_price=draw(st.floats(0, 1)),
        comparison_price=draw(st.floats(0, 1)),
        client_bytes=draw(st.floats(0, 1e9)),
        model_bytes=draw(st.floats(0, 1e9)),
        now=draw(st.floats(0, 2e9)),
        elapsed=draw(st.floats(0, 1e6)),
        seconds_left=draw(st.none() | st.floats(-10, 1e6)),
        bytes_left=draw(st.none() | st.floats(-1e9, 1e11)),
        forecast={"federated": draw(forecasts), "datacenter": draw(forecasts)},
        models=(*MODELS, "day", "warm"),
        comparisons=tuple(draw(st.lists(comparison, max_size=2))),
        refused=tuple(draw(st.lists(st.just("devices were busy"), max_size=1))),
    )


plans = st.builds(
    Plan,
    st.sampled_from(KINDS),
    st.just("because"),
    datacenter_steps=st.none() | st.integers(1, 10_000),
    cohort=st.none() | st.integers(1, 1000),
)
answers = st.one_of(
    plans,
    st.builds(Stop, st.just("enough")),
    st.builds(Wait, st.floats(1e-3, 1e9), st.just("later")),
    st.builds(
        Compare,
        st.sampled_from([("current", "served"), ("initial", "current", "initial+current")]),
        st.integers(1, 1000),
        st.just("to know"),
    ),
)


def assert_within_limits(answer, observation):
    """Assert that no limit forbids an answer; implemented independently of `enforce_limits`."""
    over = observation.seconds_left is not None and observation.seconds_left <= 0
    if isinstance(answer, Stop | LimitRefusal):
        assert answer.reason
        return
    assert not over
    if isinstance(answer, Wait):
        assert observation.seconds_left is None or answer.seconds < observation.seconds_left
        return
    left = math.inf if observation.budget is None else observation.budget - observation.spent + 1e-6
    edge = isinstance(answer, Compare) or answer.regime != "datacenter"
    if edge:
        assert observation.forecast["federated"].ready
    if isinstance(answer, Compare):
        assert answer.devices <= observation.clients_ready
        assert answer.devices * len(answer.models) * observation.comparison_price <= left
        assert (
            observation.bytes_left is None
            or answer.devices * 2 * observation.model_bytes <= observation.bytes_left
        )
        return
    cohort = answer.cohort or observation.cohort
    invited = math.ceil(cohort * observation.over_selection)
    price = 0.0
    if edge:
        price += invited * observation.client_price
        assert cohort >= observation.quorum
        assert (
            observation.bytes_left is None
            or invited * observation.client_bytes <= observation.bytes_left
        )
    if answer.regime != "federated":
        steps = answer.datacenter_steps or observation.datacenter_steps
        price += max(observation.datacenters, 1) * steps * observation.step_price
        assert observation.forecast["datacenter"].ready
    assert price <= left


@given(observations(), answers)
def test_no_answer_exceeds_a_limit(observation, answer):
    constrained = enforce_limits(answer, observation)
    assert_within_limits(constrained.answer, observation)
    assert bool(constrained.adjustments) == (constrained.answer != answer)


@pytest.mark.parametrize("policy", sorted(BUILT_IN))
@settings(max_examples=25)
@given(observation=observations(), share=st.sampled_from([0.0, 0.6, 1.0]))
def test_no_built_in_policy_exceeds_a_limit(policy, observation, share):
    schedule = [{"regime": "federated", "rounds": 3}, {"regime": "hybrid"}]
    strategy = StrategySection(policy=policy, target_edge_share=share, schedule=schedule)
    loaded = load_policy(strategy)
    observation = dataclasses.replace(observation, state={})
    for _ in range(3):
        proposed = checked_answer(loaded, policy, observation)
        constrained = enforce_limits(proposed, observation)
        assert_within_limits(constrained.answer, observation)
        # The same observation always gets the same answer, also from a new policy object.
        assert checked_answer(load_policy(strategy), policy, observation) == proposed
        if isinstance(proposed, Stop | Wait):
            break
        observation = dataclasses.replace(observation, state=proposed.state)
        if isinstance(proposed, Compare):
            result = comparison_of(proposed.models, [-0.1] * (len(proposed.models) - 1))
            observation = dataclasses.replace(
                observation, comparisons=(*observation.comparisons, result)
            )


class FixedAnswer:
    """Returns a given answer."""

    def __init__(self, answer):
        self.answer = answer

    def plan(self, observation):
        return self.answer


@given(
    observations(),
    st.sampled_from(["regime", "reason", "cohort", "datacenter_steps", "step_scale", "state"]),
    st.sampled_from([-1, 0, math.nan, math.inf, True, "x", [], None, {"x": {1}}, object()]),
)
def test_an_invalid_answer_is_refused_or_harmless(observation, field, value):
    plan = dataclasses.replace(Plan("federated", "because"), **{field: value})
    try:
        answer = checked_answer(FixedAnswer(plan), "mine", observation)
    except JobError as error:
        assert "the policy 'mine' answered" in str(error)  # noqa: PT017 - nothing need be raised
        return
    assert_within_limits(enforce_limits(answer, observation).answer, observation)


# -- reasons -------------------------------------------------------------------------------------

NIGHT = Forecast(ready=False, changes_in=600.0, share=0.5)


@pytest.mark.parametrize(
    ("answer", "changes", "expected"),
    [
        (
            Plan("federated", "x"),
            {"budget": 7.0},
            Stop("the budget of 7 is used up: 0 is spent and a federated round costs 8"),
        ),
        (
            Plan("hybrid", "x"),
            {"seconds_left": 0.0, "elapsed": 60.0},
            Stop("the run has gone on for 60 s, its limit"),
        ),
        (
            Plan("federated", "x"),
            {"bytes_left": 3e6, "client_bytes": 1e6},
            Stop(
                "a federated round moves about 8 MB to and from devices, and 3 MB are left "
                "(device_bytes)"
            ),
        ),
        (
            Plan("federated", "x"),
            {"forecast": {"federated": NIGHT}},
            Wait(600.0, "the federated side is outside of its window"),
        ),
        (
            Plan("federated", "x"),
            {"forecast": {"federated": NIGHT}, "seconds_left": 500.0},
            Stop(
                "the federated side is outside of its window; it would have to wait for 600 s and "
                "the run ends in 500 s"
            ),
        ),
        (Plan("datacenter", "x"), {"bytes_left": 0.0}, Plan("datacenter", "x")),
        (Plan("federated", "x", cohort=2), {"quorum": 6}, Plan("federated", "x", cohort=6)),
        (Plan("federated", "x", cohort=50), {"quorum": 6}, Plan("federated", "x", cohort=50)),
        (
            Compare(("current", "served"), 9, "x"),
            {},
            LimitRefusal("9 devices are to be asked and 8 are ready"),
        ),
        (
            Compare(("current", "served"), 8, "x"),
            {"forecast": {"federated": NIGHT}},
            LimitRefusal("devices cannot be asked outside of their window"),
        ),
        (
            Compare(("current", "served"), 8, "x"),
            {"budget": 0.3},
            LimitRefusal("asking 8 devices costs 0.32 and 0.3 is left"),
        ),
    ],
)
def test_each_limit_gives_its_reason(answer, changes, expected):
    assert enforce_limits(answer, observe(**changes)).answer == expected


def test_a_plan_waits_for_devices_that_become_eligible_later():
    later = observe(clients_ready=2, clients_ineligible=4, quorum=3, seconds_until_quorum=600.0)
    constrained = enforce_limits(Plan("federated", "x"), later)
    assert isinstance(constrained.answer, Wait)
    assert constrained.answer.seconds == 600.0
    assert constrained.adjustments[0].startswith(
        "2 devices may be invited and the quorum is 3; 4 are outside of their hours or at"
    )
    assert enforce_limits(Plan("datacenter", "x"), later).answer.regime == "datacenter"
    # Other devices may still connect.
    too_few = observe(clients_ready=2, clients_ineligible=0, quorum=3)
    assert enforce_limits(Plan("federated", "x"), too_few).answer.regime == "federated"
    others = observe(clients_ready=2, clients_ineligible=4, quorum=3, others_may_come=True)
    assert enforce_limits(Plan("federated", "x"), others).answer.regime == "federated"
    never = observe(clients_ready=2, clients_ineligible=4, quorum=3)
    assert isinstance(enforce_limits(Plan("hybrid", "x"), never).answer, Stop)


def test_a_measurement_of_gradients_is_left_out_where_only_it_exceeds_a_limit():
    plan = Plan("federated", "to know", measure_gradients=True)
    wide = observe(datacenters=1, client_bytes=100, model_bytes=50)
    assert enforce_limits(plan, wide).answer == plan
    unmeasured = dataclasses.replace(plan, measure_gradients=False)
    shut = {"datacenter": Forecast(ready=False, changes_in=60.0, share=0.5)}
    price = wide.price("federated")
    moved = wide.invited() * 100
    for limit in ({"bytes_left": moved}, {"budget": price}, {"forecast": shut}):
        constrained = enforce_limits(plan, dataclasses.replace(wide, **limit))
        assert constrained.answer == unmeasured
        assert "gradients are not measured" in constrained.adjustments[0]
    assert isinstance(enforce_limits(plan, dataclasses.replace(wide, budget=0.0)).answer, Stop)


# -- the target ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "metrics", "ends"),
    [
        ({"at_least": 0.9}, {"accuracy": 0.9}, True),
        ({"at_least": 0.9}, {"accuracy": 0.89}, False),
        ({"at_most": 0.9}, {"accuracy": 0.91}, False),
        ({"at_most": 0.9}, {"accuracy": 0.9}, True),
        ({"at_least": 0.9}, {"accuracy": math.nan}, False),
        ({"at_least": 0.9}, {}, False),
    ],
)
def test_a_run_ends_after_the_round_that_reaches_the_target(target, metrics, ends):
    history = [past_round(1, "federated", **metrics)]
    goal = TargetMetric(name="accuracy", **target)
    answer = enforce_limits(Plan("federated", "x"), observe(2, history, target=goal)).answer
    assert isinstance(answer, Stop) == ends
    if ends:
        assert answer.reason.startswith("round 1 reached the target, accuracy of at ")


def test_a_target_that_the_task_does_not_measure_ends_the_run_with_a_sentence():
    goal = TargetMetric(name="acuracy", at_least=0.9)
    observation = observe(2, [past_round(1, "federated", accuracy=0.5, loss=1.0)], target=goal)
    with pytest.raises(JobError, match=r"'acuracy' is not a held-out metric .* accuracy, loss"):
        enforce_limits(Plan("federated", "x"), observation)
