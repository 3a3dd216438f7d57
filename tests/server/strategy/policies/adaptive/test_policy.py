"""The adaptive policy, over simulated rounds."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.strategy.observations import (
    ROOM_FOR_WARM_START,
    adapt,
    adaptive,
    initials,
    observe,
    past_round,
    strategy_of,
)

from isthmus_server.strategy import Stop, load_policy
from isthmus_server.strategy.answer_checks import checked_answer
from isthmus_server.strategy.loading import state_in_words
from isthmus_server.strategy.policies.adaptive.budget_plan import rounds_with_devices
from isthmus_server.strategy.policies.adaptive.state import AdaptiveState
from isthmus_server.strategy.policy import Forecast, Plan


def test_a_warm_start_uses_rounds_that_the_budget_leaves_to_no_device():
    plans = adapt(judge=lambda models: [-0.1])
    warm = initials(plans).index("f")
    assert warm == 15  # of the 50 rounds with devices that the budget buys, 30 %
    assert set(initials(plans[:warm])) == {"d"}
    assert set(initials(plans[warm : warm + 40])) == {"f"}
    assert plans[warm - 1].keep == {"warm": "current"}
    assert plans[warm].start == "current"


def test_there_is_no_warm_start_if_the_budget_fills_every_round():
    (first, *_) = adapt(rounds=50, judge=lambda models: "there was nothing to ask")
    assert first.regime == "federated"
    assert "the limits allow 50 of the 50 rounds" in first.reason


def test_a_warm_start_that_does_not_help_is_abandoned():
    for verdict in ([-0.005], [0.2], "devices were busy"):
        plans = adapt(judge=lambda models, verdict=verdict: verdict)
        assert initials(plans[:8]) == "dddddfff"
        assert (plans[5].start, plans[5].reset_optimizer) == ("initial", True)
        assert "begins cold" in plans[5].reason
        assert "d" not in initials(plans[5:40])


def test_harmful_edge_rounds_return_to_the_warm_model_with_shorter_steps():
    plans = adapt(judge=lambda models: [-0.1] if models[0] == "initial" else [0.1])
    first = initials(plans).index("f")
    back, again = first + 5, first + 10
    assert [(plans[at].start, plans[at].step_scale) for at in (back, again)] == [
        ("warm", 0.5),
        ("warm", 0.25),
    ]
    assert plans[back].reset_optimizer
    assert set(initials(plans[first:-1])) == {"f"}
    assert {plan.step_scale for plan in plans[again:-1]} == {0.25}
    assert {plan.start for plan in plans[again + 1 : -1]} == {"current"}


def devices_open_from(opens):
    """Overrides with which the devices' window opens in a round and stays open."""

    def changes(round_):
        edge = Forecast(ready=round_ >= opens, changes_in=3.0, share=0.5)
        return ROOM_FOR_WARM_START | {"forecast": {"federated": edge}}

    return changes


def test_a_warm_start_uses_the_time_before_the_devices_window():
    asked = []

    def judge(models):
        asked.append(models)
        return [-0.1]

    plans = adapt(changes=devices_open_from(8), judge=judge)
    assert initials(plans[:12]) == "dddddddfffff"
    assert plans[7].start == "current"
    assert "outside of the devices' hours" in plans[6].reason
    assert asked == [("initial", "current")]  # no probation follows, because devices have hours


def test_a_warm_start_before_the_window_is_limited_and_must_help():
    better = {"changes": devices_open_from(40), "losses": lambda round_: 0.9**round_}
    assert initials(adapt(**better)).index("f") == 15  # which waits for the devices
    assert initials(adapt(changes=devices_open_from(40))).index("f") == 9  # nothing more to learn
    harmful = adapt(changes=devices_open_from(8), judge=lambda models: [0.1])
    assert (harmful[7].start, harmful[7].reset_optimizer) == ("initial", True)
    assert "d" not in initials(harmful[7:40])


def test_there_is_no_probation_where_devices_have_hours():
    """A model of some devices' classes loses on others' at first, and must not be dropped."""
    plans = adapt(
        changes=devices_open_from(1),
        judge=lambda models: [-0.1] if models[0] == "initial" else [9.9],
    )
    assert {plan.step_scale for plan in plans} == {1.0}


def test_a_rejected_warm_start_does_not_exclude_the_gradient():
    """Public data of some classes make a bad start, and a good teacher of these classes."""
    plans = adapt(judge=lambda models: [0.1], losses=lambda round_: 3 * 0.8**round_)
    assert initials(plans[:5]) == "ddddd"
    assert set(initials(plans[5:20])) == {"f", "h"}


@given(
    share=st.floats(0.05, 1.0),
    bound=st.one_of(st.just(0.0), st.floats(1e-38, 10.0)),
    norms=st.tuples(st.floats(0.0, 1e6), st.floats(0.0, 1e6)),
    losses=st.lists(st.floats(0.0, 1e6), max_size=12),
    cosine=st.one_of(st.none(), st.floats(-1.0, 1.0)),
    here=st.booleans(),
    budget=st.one_of(st.none(), st.floats(1.0, 400.0)),
    uses_gradient=st.booleans(),
)
def test_the_transfer_weight_never_exceeds_its_bound(
    share, bound, norms, losses, cosine, here, budget, uses_gradient
):
    strategy = strategy_of("adaptive", target_edge_share=share, transfer_weight=bound)
    both = dict(zip(("datacenter", "federated"), norms, strict=True))
    history = [
        dataclasses.replace(past_round(round_, "hybrid", loss=loss), norms=both, cosine=cosine)
        for round_, loss in enumerate(losses, 1)
    ]
    state = {"phase": "edge", "edge_rounds": len(losses), "uses_gradient": uses_gradient}
    observation = observe(
        len(losses) + 1, history, rounds=50, state=state, datacenter_ready=here, budget=budget
    )
    plan = checked_answer(load_policy(strategy), "adaptive", observation)
    assert isinstance(plan, Plan)
    assert plan == checked_answer(load_policy(strategy), "adaptive", observation)
    if plan.regime == "hybrid":
        assert here
        if plan.merge == "weighted":
            assert share < 1
            assert len(history) >= 6
            assert plan.transfer_weight is None
        else:
            assert 0 < plan.transfer_weight <= bound
        assert any(letter.isdigit() for letter in plan.reason)
    else:
        assert plan.transfer_weight is None


@pytest.mark.parametrize(("step_price", "batches"), [(0.001, 50), (0.02, 20), (1.0, 1)])
def test_an_expensive_gradient_uses_fewer_batches(step_price, batches):
    prices = {"step_price": step_price}  # eight devices cost 8, of which a twentieth may go to it
    strategy = strategy_of("adaptive", target_edge_share=0.5)
    plans = adapt(rounds=3, strategy=strategy, changes=lambda round_: prices)
    assert {plan.datacenter_steps for plan in plans} == {batches}


def test_an_expensive_probation_is_left_out():
    """A comparison on eight devices costs 0.32; a hundredth of the remaining budget is allowed."""

    def asked(spent):
        found = []

        def judge(models):
            found.append(models)
            return [-0.1]

        # The probation is due in round 21: 15 warm rounds, 5 with devices.
        adapt(
            judge=judge,
            changes=lambda round_: ROOM_FOR_WARM_START | ({"spent": spent} if round_ > 20 else {}),
        )
        return found[1:]

    assert asked(spent=360.0) == [("warm", "served")]
    assert asked(spent=370.0) == []


def test_possible_rounds_are_estimated_from_past_durations():
    past_ = [
        dataclasses.replace(past_round(round_, "federated"), elapsed=elapsed)
        for round_, elapsed in enumerate((10.0, 20.0, 30.0, 530.0, 540.0), 1)  # a wait among them
    ]
    forecast = {"federated": Forecast(ready=True, changes_in=9.0, share=0.5)}
    more = {"rounds": 100, "seconds_left": 400.0, "forecast": forecast, "budget": 50.0}
    assert rounds_with_devices(observe(6, past_, **more)) == (20.0, 6.0)


def test_a_federated_round_is_planned_while_the_window_is_closed():
    policy = load_policy(adaptive())
    dark = {"federated": Forecast(ready=False, changes_in=3.0, share=0.5)}
    begun = policy.plan(observe(1, budget=8.0)).state
    assert policy.plan(observe(2, state=begun, forecast=dark)).regime == "federated"  # when it may


def test_every_reason_contains_a_number():
    runs = [
        adapt(judge=lambda models: [-0.1] * (len(models) - 1), rounds=60),
        adapt(judge=lambda models: [0.1], rounds=40, changes=devices_open_from(8)),
        adapt(rounds=12, strategy=strategy_of("adaptive", target_edge_share=0.5)),
        adapt(rounds=50, losses=lambda round_: 3 * 0.9**round_),
    ]
    for plan in (plan for plans in runs for plan in plans):
        assert not isinstance(plan, Stop)
        assert any(letter.isdigit() for letter in plan.reason), plan.reason


def test_the_state_survives_json():
    state = AdaptiveState(
        phase="warm",
        warm_rounds=3,
        max_warm_rounds=9,
        warm_accepted=True,
        pending_comparison="warm",
    )
    assert AdaptiveState.from_json(state.to_json()) == state
    assert dataclasses.asdict(AdaptiveState()) == AdaptiveState().to_json()


def datacenter_comes_in(round_of_arrival, budget=400.0):
    """Overrides with which no datacenter is connected before a round."""

    def changes(round_):
        ready = round_ >= round_of_arrival
        names = ["dc"] if ready else []
        return {"budget": budget, "datacenter_ready": ready, "datacenter_names": names}

    return changes


def test_a_datacenter_that_comes_late_begins_the_warm_start_then():
    """It goes on from what devices have trained, which the warm model has to beat."""
    asked = []

    def judge(models):
        asked.append(models)
        return [-0.1]

    there = initials(adapt(judge=judge, changes=datacenter_comes_in(1))).count("d")
    asked.clear()
    plans = adapt(judge=judge, changes=datacenter_comes_in(4))
    assert initials(plans[:4]) == "fffd"
    assert "no datacenter is available" in plans[0].reason
    assert [plan.keep for plan in plans[:3]] == 3 * [{"cold": "current"}]
    late = initials(plans[3:]).index("f")
    assert late == there == 15  # of the 50 rounds with devices in the budget, 30 %
    assert {plan.start for plan in plans[3 : 3 + late]} == {"current"}
    assert plans[2 + late].keep == {"warm": "current"}
    assert asked[0] == ("cold", "current")
    assert set(initials(plans[3 + late : -1])) == {"f"}


def test_a_late_warm_start_has_no_more_rounds_than_devices_after_it():
    """8 rounds with devices are left in the budget."""
    strategy = adaptive(warm_share=0.5)
    plans = adapt(judge=lambda models: [-0.1], changes=datacenter_comes_in(43), strategy=strategy)
    assert initials(plans[42:51]) == 8 * "d" + "f"


def test_a_late_warm_start_that_does_not_help_goes_back_to_what_devices_trained():
    plans = adapt(judge=lambda models: [0.2], changes=datacenter_comes_in(4))
    assert initials(plans[:12]) == "fffdddddffff"
    assert (plans[8].start, plans[8].reset_optimizer) == ("cold", True)
    assert "back to the one before" in plans[8].reason
    assert "d" not in initials(plans[8:-1])
    assert not any("cold" in plan.keep for plan in plans[3:-1])


def test_a_datacenter_that_leaves_before_its_warm_start_is_awaited_again():
    def changes(round_):
        ready = round_ >= 7
        names = ["dc"] if ready else []
        return ROOM_FOR_WARM_START | {"datacenter_ready": ready, "datacenter_names": names}

    plans = adapt(judge=lambda models: [-0.1], changes=changes)
    assert initials(plans[:9]) == "ffffffddd"


def test_a_datacenter_that_comes_too_late_for_a_warm_start_is_told_why():
    plans = adapt(rounds=50, changes=datacenter_comes_in(20))
    assert "d" not in initials(plans)
    assert "a datacenter has come, and the limits allow" in plans[19].reason
    assert "has come" not in plans[20].reason


def datacenter_is_there(rounds, **more):
    """Overrides with which a datacenter is connected in these rounds only."""

    def changes(round_):
        ready = round_ in rounds
        names = ["dc"] if ready else []
        return {"budget": 400.0, "datacenter_ready": ready, "datacenter_names": names, **more}

    return changes


@pytest.mark.parametrize("outcome", ["better", "no clear gain"])
def test_the_rest_of_an_interrupted_warm_start_follows_when_the_datacenter_is_back(outcome):
    """What it had trained before it left has to prove its use, and so has the rest."""
    asked = []

    def judge(models):
        asked.append(models)
        return [-0.1 if outcome == "better" or len(asked) > 1 else 0.0]

    there = {*range(1, 5), *range(10, 121)}
    plans = adapt(judge=judge, changes=datacenter_is_there(there))
    assert initials(plans[:11]) == "ddddfffffdd"
    assert asked[:2] == [("initial", "current"), ("cold", "current")]
    assert plans[4].start == ("current" if outcome == "better" else "initial")
    assert ("the datacenter left after 4 rounds" in plans[4].reason) == (outcome == "better")
    uninterrupted = initials(adapt(judge=lambda models: [-0.1])).count("d")
    assert initials(plans).count("d") == uninterrupted


def test_a_datacenter_that_comes_and_goes_gets_no_more_rounds_than_one_that_stays():
    plans = adapt(judge=lambda models: [-0.1], changes=datacenter_is_there(range(1, 121, 2)))
    uninterrupted = initials(adapt(judge=lambda models: [-0.1])).count("d")
    assert initials(plans).count("d") <= uninterrupted


def test_a_datacenter_that_comes_within_the_devices_hours_begins_the_warm_start_then():
    """Neither it nor the devices were there at the start."""

    def changes(round_):
        here = datacenter_comes_in(4)(round_)
        return here | devices_open_from(2)(round_) | {"budget": 400.0}

    plans = adapt(judge=lambda models: [-0.1], changes=changes)
    assert initials(plans[:6]) == "fffddd"


def test_its_state_is_told_in_words():
    plans = adapt(judge=lambda models: [-0.1], changes=datacenter_comes_in(4))
    told = [state_in_words("adaptive", plan.state) for plan in plans[:-1]]
    missed = "no datacenter was there for a warm start; it begins once one is"
    assert told[0] == ["rounds with devices so far: 1", missed]
    assert told[3] == ["a warm start has made 1 of at most 15 rounds"]
    assert told[30][1] == "devices found the model of the warm start better"
    assert "=" not in str(told)
    assert state_in_words("my.module:Policy", {"b": 2, "a": 1}) == ["a=1, b=2"]
