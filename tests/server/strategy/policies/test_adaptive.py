"""The adaptive policy, over simulated rounds."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.strategy.observations import observe, past_round, simulate

from isthmus.job import StrategySection
from isthmus_server.strategy import Stop, load_policy
from isthmus_server.strategy.answer_checks import checked_answer
from isthmus_server.strategy.policies.adaptive_state import AdaptiveState
from isthmus_server.strategy.policies.estimates import gradient_divergence, rounds_with_devices
from isthmus_server.strategy.policy import Forecast, Plan


def strategy_of(policy, settings=None, **more):
    return StrategySection(policy=policy, settings=settings or {}, **more)


def initials(plans):
    return "".join(plan.regime[0] for plan in plans)


ROOM_FOR_WARM_START = {"budget": 400.0}
"""Pays for 50 rounds of 8 devices, which leaves room for a warm start in 120 rounds."""


def adaptive(**settings):
    return strategy_of("adaptive", settings)


def adapt(rounds=120, judge=lambda models: [0.0] * (len(models) - 1), changes=None, **more):
    strategy = more.pop("strategy", None) or adaptive()
    return simulate(
        strategy, rounds, changes or (lambda round_: ROOM_FOR_WARM_START), judge, **more
    )


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
    assert "fills 50 of the 50 rounds" in first.reason


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


def second_plan(share, gradient, step, **more):
    """The second plan where devices hold a share of the target, after a round of these norms."""
    taken = gradient * min(0.33 * (1 - share) / share, 0.05)  # half of the job's bound, at first
    first = dataclasses.replace(
        past_round(1, "hybrid"), norms={"datacenter": taken, "federated": step}
    )
    policy = load_policy(strategy_of("adaptive", target_edge_share=share))
    return policy.plan(observe(2, [first], state={"phase": "edge"}, **more))


def test_the_gradient_is_transferred_where_public_data_cover_part_of_the_target():
    strategy = strategy_of("adaptive", target_edge_share=20 / 26)
    plans = adapt(rounds=20, strategy=strategy)
    assert {plan.regime for plan in plans} == {"hybrid"}
    assert {plan.merge for plan in plans} == {"transfer"}
    # Half of the job's bound, until there was a round that shows how long the two are.
    assert {plan.transfer_weight for plan in plans} == {0.05}


@pytest.mark.parametrize(
    ("share", "gradient", "step", "weight"),
    [
        (0.5, 1.0, 3.0, 0.1),  # no more than the job's
        (0.9, 1.0, 3.0, 0.33 / 9),  # a third of (1 - pi)/pi
        (0.5, 2.5, 2.5, 0.1 * 0.55 / 1.2),  # no longer than 0.55 of the devices' own step
        (0.5, 2.5, 0.0, 0.05),  # nothing to compare with
    ],
)
def test_the_transfer_weight_follows_the_target_and_the_norms(share, gradient, step, weight):
    plan = second_plan(share, gradient, step)
    assert plan.transfer_weight == pytest.approx(weight)
    assert f"take {weight:.3g}" in plan.reason


def transfer_rounds(rounds, cosine, gradient=2.0, device_losses=()):
    """Committed transfer rounds with these norms, cosines and losses of the devices."""
    losses = [*device_losses, *[1.0] * (rounds - len(device_losses))]
    return [
        dataclasses.replace(
            past_round(round_, "hybrid"),
            norms={"datacenter": 0.05 * gradient, "federated": 4.0},
            cosine=cosine,
            training={"federated": {"loss": losses[round_ - 1]}},
        )
        for round_ in range(1, rounds + 1)
    ]


def merges(history, strategy, rounds=6, **more):
    """First letters of the merge rules in the rounds after a history."""
    letters = []
    for edge in range(len(history), len(history) + rounds):
        observation = observe(
            edge + 1, history, state={"phase": "edge", "edge_rounds": edge}, **more
        )
        plan = load_policy(strategy).plan(observation)
        assert (plan.transfer_weight is None) == (plan.merge == "weighted")
        letters.append(plan.merge[0])
    return "".join(letters)


HALF = strategy_of("adaptive", target_edge_share=0.5)


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        (transfer_rounds(6, 0.9), "twtwtw"),  # sqrt(0.5) x 2/4 x 0.9 = 0.32
        (transfer_rounds(5, 0.9), "tttttt"),  # not yet observation
        (transfer_rounds(6, 0.4), "tttttt"),  # the gradient turns away from what devices do: alike
        (transfer_rounds(6, 0.9, gradient=0.9), "tttttt"),  # nor is it long
        (
            transfer_rounds(6, 0.9, device_losses=[1.0, 1.4]),
            "wwwwww",
        ),  # they undo what others taught
        (transfer_rounds(6, 0.4, device_losses=[1.0, 1.4]), "tttttt"),
    ],
)
def test_the_datacenter_trains_in_parallel_where_public_data_differ(history, expected):
    assert merges(history, HALF) == expected


def test_only_the_first_rounds_decide_whether_public_data_differ():
    """What rounds of another kind measure later cannot change it, nor can a resumed run."""
    first, later = transfer_rounds(6, 0.9), transfer_rounds(30, -0.5, gradient=9.0)[6:]
    assert gradient_divergence(observe(history=first), 0.5, 0.5) == pytest.approx(0.318, abs=1e-3)
    assert merges([*first, *later], HALF) == merges(first, HALF)


@pytest.mark.parametrize(("step_price", "steps"), [(0.001, 50), (0.132, 20), (9.0, 1)])
def test_parallel_training_costs_at_most_a_third_of_the_devices_work(step_price, steps):
    observation = observe(
        8, transfer_rounds(7, 0.9), state={"phase": "edge", "edge_rounds": 7}, step_price=step_price
    )
    plan = load_policy(HALF).plan(observation)
    assert (plan.regime, plan.merge, plan.datacenter_steps) == ("hybrid", "weighted", steps)


def test_rounds_are_federated_without_a_connected_datacenter():
    plan = second_plan(0.5, 1.0, 3.0, datacenter_ready=False)
    assert plan.regime == "federated"
    assert "no datacenter is available" in plan.reason


def test_devices_apply_the_gradient_while_public_data_resemble_theirs():
    """The held-out loss falls below two thirds of the first in the fifth round."""
    plans = adapt(rounds=50, losses=lambda round_: 3 * 0.9**round_)
    begins = initials(plans).index("h")
    assert begins == 5
    assert {plan.transfer_weight for plan in plans[begins:-1]} == {0.1}
    assert "public data are like theirs" in plans[begins].reason
    assert "0.667" in plans[begins].reason


@pytest.mark.parametrize("losses", [lambda round_: 3.0, lambda round_: 3 * 1.1**round_])
def test_rounds_stay_federated_where_public_data_do_not_resemble_theirs(losses):
    assert set(initials(adapt(rounds=50, losses=losses)[:-1])) == {"f"}


def test_after_a_warm_start_similarity_is_checked_later():
    """The datacenter lowers the public loss itself, so more rounds with devices are needed."""

    def falls_then_rises(round_):
        return 3 * 0.8**round_ if round_ <= 20 else 3.0

    plans = adapt(judge=lambda models: [-0.1], losses=falls_then_rises)
    first = initials(plans).index("f")
    assert first == 15
    assert set(initials(plans[first:-1])) == {"f"}
    falls = adapt(judge=lambda models: [-0.1], losses=lambda round_: 3 * 0.8**round_)
    assert initials(falls[15:]).index("h") == 9


@pytest.mark.parametrize(
    ("losses", "regime"), [([1.5, 0.5, 3.8], "hybrid"), ([1.5, 3.0], "federated")]
)
def test_devices_that_forget_what_others_taught_apply_the_gradient(losses, regime):
    history = [
        dataclasses.replace(past_round(round_, "federated"), training={"federated": {"loss": loss}})
        for round_, loss in enumerate(losses, 1)
    ]
    state = {"phase": "edge", "edge_rounds": len(losses)}
    plan = load_policy(adaptive()).plan(observe(len(losses) + 1, history, state=state))
    assert plan.regime == regime
    assert ("rose to 2.5 times the first" in plan.reason) == (regime == "hybrid")
    assert plan.state["uses_gradient"] == (regime == "hybrid")  # and so it stays
    assert plan.step_scale == (0.5 if regime == "hybrid" else 1.0)


def test_steps_stay_short_once_devices_have_forgotten():
    """Also where public data cover part of the target, and if the loss falls again."""
    history = transfer_rounds(9, 0.4, device_losses=[1.0, 0.4, 2.6, 0.3])
    for rounds, scale in ((2, 1.0), (3, 0.5), (9, 0.5)):
        observation = observe(
            rounds + 1, history[:rounds], state={"phase": "edge", "edge_rounds": rounds}
        )
        plan = load_policy(HALF).plan(observation)
        assert plan.step_scale == scale
        assert ("rose to 2.6 times the first" in plan.reason) == (scale < 1)


def test_an_excluded_datacenter_provides_no_gradient():
    plans = adapt(judge=lambda models: [0.1], losses=lambda round_: 3 * 0.8**round_)
    assert initials(plans[:-1]) == "ddddd" + "f" * (len(plans) - 6)


@given(
    share=st.floats(0.05, 1.0),
    bound=st.floats(0.0, 10.0),
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
