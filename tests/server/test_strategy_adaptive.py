"""What `adaptive` does, over rounds whose observations are made up."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.job import StrategySection
from isthmus_server.strategy import Stop, load_policy
from isthmus_server.strategy.answer_checks import checked_answer
from isthmus_server.strategy.evidence import apartness
from isthmus_server.strategy.outlook import rounds_with_devices
from isthmus_server.strategy.policies.adaptive import State
from isthmus_server.strategy.policy import Forecast, Plan

from .observing import observe, past, play


def job(policy, settings=None, **more):
    return StrategySection(policy=policy, settings=settings or {}, **more)


def initials(plans):
    return "".join(plan.regime[0] for plan in plans)


ROOM = {"budget": 400.0}
"""For 50 rounds of 8 devices; with 120 rounds there is room for a warm start."""


def adaptive(**settings):
    return job("adaptive", settings)


def adapt(rounds=120, judge=lambda models: [0.0] * (len(models) - 1), see=None, **more):
    strategy = more.pop("strategy", None) or adaptive()
    return play(strategy, rounds, see or (lambda round_: ROOM), judge, **more)


def test_adaptive_starts_warm_where_that_takes_nothing_from_the_devices():
    plans = adapt(judge=lambda models: [-0.1])
    warm = initials(plans).index("f")
    assert warm == 15  # of the 50 rounds with devices that the budget buys, 30 %
    assert set(initials(plans[:warm])) == {"d"}
    assert set(initials(plans[warm : warm + 40])) == {"f"}
    assert plans[warm - 1].keep == {"warm": "current"}
    assert plans[warm].start == "current"


def test_adaptive_starts_cold_where_the_budget_fills_every_round():
    (first, *_) = adapt(rounds=50, judge=lambda models: "there was nothing to ask")
    assert first.regime == "federated"
    assert "fills 50 of the 50 rounds" in first.reason


def test_adaptive_gives_up_a_warm_start_that_does_not_help():
    for verdict in ([-0.005], [0.2], "devices were busy"):
        plans = adapt(judge=lambda models, verdict=verdict: verdict)
        assert initials(plans[:8]) == "dddddfff"
        assert (plans[5].start, plans[5].reset_optimizer) == ("initial", True)
        assert "begins cold" in plans[5].reason
        assert "d" not in initials(plans[5:40])


def test_adaptive_goes_back_when_edge_rounds_harm_but_does_not_give_them_up():
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


def morning(opens):
    """Devices come in a round, and stay."""

    def see(round_):
        edge = Forecast(ready=round_ >= opens, changes_in=3.0, share=0.5)
        return ROOM | {"forecast": {"federated": edge}}

    return see


def test_adaptive_starts_warm_while_the_devices_have_not_come_yet():
    asked = []

    def judge(models):
        asked.append(models)
        return [-0.1]

    plans = adapt(see=morning(8), judge=judge)
    assert initials(plans[:12]) == "dddddddfffff"
    assert plans[7].start == "current"
    assert "while the devices are away" in plans[6].reason
    assert asked == [("initial", "current")]  # nobody who trained is there to ask later


def test_a_warm_start_in_the_dark_ends_with_its_limit_and_must_help():
    better = {"see": morning(40), "losses": lambda round_: 0.9**round_}
    assert initials(adapt(**better)).index("f") == 15  # which waits for the devices
    assert initials(adapt(see=morning(40))).index("f") == 9  # nothing more to learn
    harmful = adapt(see=morning(8), judge=lambda models: [0.1])
    assert (harmful[7].start, harmful[7].reset_optimizer) == ("initial", True)
    assert "d" not in initials(harmful[7:40])


def test_devices_of_other_hours_do_not_judge_what_their_neighbours_trained():
    """A model of some devices' classes alone loses on others' at first, and must not be dropped."""
    plans = adapt(see=morning(1), judge=lambda models: [-0.1] if models[0] == "initial" else [9.9])
    assert {plan.step_scale for plan in plans} == {1.0}


def shared(share, gradient, step, **more):
    """A plan where the datacenter holds a part of the target, after a first round of such norms."""
    taken = gradient * min(0.33 * (1 - share) / share, 0.05)  # half of the job's bound, at first
    first = dataclasses.replace(past(1, "hybrid"), norms={"datacenter": taken, "federated": step})
    policy = load_policy(job("adaptive", target_edge_share=share))
    return policy.plan(observe(2, [first], state={"phase": "edge"}, **more))


def test_adaptive_transfers_where_the_datacenter_holds_part_of_the_target():
    strategy = job("adaptive", target_edge_share=20 / 26)
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
def test_the_weight_of_a_gradient_goes_by_the_target_and_by_its_length(
    share, gradient, step, weight
):
    plan = shared(share, gradient, step)
    assert plan.transfer_weight == pytest.approx(weight)
    assert f"take {weight:.3g}" in plan.reason


def together(rounds, cosine, gradient=2.0, theirs=()):
    """Rounds in which devices took a gradient along, of such lengths and cosines."""
    losses = [*theirs, *[1.0] * (rounds - len(theirs))]
    return [
        dataclasses.replace(
            past(round_, "hybrid"),
            norms={"datacenter": 0.05 * gradient, "federated": 4.0},
            cosine=cosine,
            training={"federated": {"loss": losses[round_ - 1]}},
        )
        for round_ in range(1, rounds + 1)
    ]


def merges(history, strategy, rounds=6, **more):
    """How the rounds after such a history join both sides."""
    found = []
    for edge in range(len(history), len(history) + rounds):
        seen = observe(edge + 1, history, state={"phase": "edge", "edge": edge}, **more)
        plan = load_policy(strategy).plan(seen)
        assert (plan.transfer_weight is None) == (plan.merge == "weighted")
        found.append(plan.merge[0])
    return "".join(found)


HALF = job("adaptive", target_edge_share=0.5)


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        (together(6, 0.9), "twtwtw"),  # sqrt(0.5) x 2/4 x 0.9 = 0.32
        (together(5, 0.9), "tttttt"),  # not yet seen
        (together(6, 0.4), "tttttt"),  # the gradient turns away from what devices do: alike
        (together(6, 0.9, gradient=0.9), "tttttt"),  # nor is it long
        (together(6, 0.9, theirs=[1.0, 1.4]), "wwwwww"),  # they undo what others taught
        (together(6, 0.4, theirs=[1.0, 1.4]), "tttttt"),
    ],
)
def test_the_datacenter_trains_beside_the_devices_where_public_data_lie_apart(history, expected):
    assert merges(history, HALF) == expected


def test_how_far_public_data_lie_apart_is_settled_by_the_first_rounds():
    """What rounds of another kind measure later cannot change it, nor can a resumed run."""
    first, later = together(6, 0.9), together(30, -0.5, gradient=9.0)[6:]
    assert apartness(observe(history=first), 0.5, 0.5) == pytest.approx(0.318, abs=1e-3)
    assert merges([*first, *later], HALF) == merges(first, HALF)


@pytest.mark.parametrize(("step_price", "steps"), [(0.001, 50), (0.132, 20), (9.0, 1)])
def test_training_beside_the_devices_costs_at_most_a_third_of_theirs(step_price, steps):
    seen = observe(8, together(7, 0.9), state={"phase": "edge", "edge": 7}, step_price=step_price)
    plan = load_policy(HALF).plan(seen)
    assert (plan.regime, plan.merge, plan.datacenter_steps) == ("hybrid", "weighted", steps)


def test_devices_work_alone_while_the_datacenter_is_away():
    plan = shared(0.5, 1.0, 3.0, datacenter_ready=False)
    assert plan.regime == "federated"
    assert "the datacenter is not here" in plan.reason


def test_devices_take_the_gradient_along_while_public_data_are_like_theirs():
    """The held-out loss falls below two thirds of the first in the fifth round."""
    plans = adapt(rounds=50, losses=lambda round_: 3 * 0.9**round_)
    begins = initials(plans).index("h")
    assert begins == 5
    assert {plan.transfer_weight for plan in plans[begins:-1]} == {0.1}
    assert "public data are like theirs" in plans[begins].reason
    assert "0.667" in plans[begins].reason


@pytest.mark.parametrize("losses", [lambda round_: 3.0, lambda round_: 3 * 1.1**round_])
def test_devices_stay_by_themselves_where_public_data_are_unlike_theirs(losses):
    assert set(initials(adapt(rounds=50, losses=losses)[:-1])) == {"f"}


def test_a_warm_start_says_nothing_of_whether_public_data_are_alike():
    """The datacenter lowers their loss itself, so it counts once devices have worked for long."""

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
def test_devices_that_forget_what_others_taught_take_the_gradient_along(losses, regime):
    history = [
        dataclasses.replace(past(round_, "federated"), training={"federated": {"loss": loss}})
        for round_, loss in enumerate(losses, 1)
    ]
    state = {"phase": "edge", "edge": len(losses)}
    plan = load_policy(adaptive()).plan(observe(len(losses) + 1, history, state=state))
    assert plan.regime == regime
    assert ("rose to 2.5 times the first" in plan.reason) == (regime == "hybrid")
    assert plan.state["lent"] == (regime == "hybrid")  # and so it stays
    assert plan.step_scale == (0.5 if regime == "hybrid" else 1.0)


def test_the_steps_of_a_fleet_that_forgets_stay_short():
    """Also where the datacenter holds a part of the target, and whatever becomes of their loss."""
    history = together(9, 0.4, theirs=[1.0, 0.4, 2.6, 0.3])
    for rounds, scale in ((2, 1.0), (3, 0.5), (9, 0.5)):
        seen = observe(rounds + 1, history[:rounds], state={"phase": "edge", "edge": rounds})
        plan = load_policy(HALF).plan(seen)
        assert plan.step_scale == scale
        assert ("rose to 2.6 times the first" in plan.reason) == (scale < 1)


def test_a_datacenter_that_was_of_no_use_lends_no_gradient():
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
    lent=st.booleans(),
)
def test_no_weight_is_over_the_bound_and_none_without_a_datacenter(
    share, bound, norms, losses, cosine, here, budget, lent
):
    strategy = job("adaptive", target_edge_share=share, transfer_weight=bound)
    both = dict(zip(("datacenter", "federated"), norms, strict=True))
    history = [
        dataclasses.replace(past(round_, "hybrid", loss=loss), norms=both, cosine=cosine)
        for round_, loss in enumerate(losses, 1)
    ]
    state = {"phase": "edge", "edge": len(losses), "lent": lent}
    seen = observe(
        len(losses) + 1, history, rounds=50, state=state, datacenter_ready=here, budget=budget
    )
    plan = checked_answer(load_policy(strategy), "adaptive", seen)
    assert isinstance(plan, Plan)
    assert plan == checked_answer(load_policy(strategy), "adaptive", seen)
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
def test_a_gradient_that_is_dear_beside_the_devices_is_of_fewer_batches(step_price, batches):
    see = {"step_price": step_price}  # eight devices cost 8, of which a twentieth may go to it
    strategy = job("adaptive", target_edge_share=0.5)
    plans = adapt(rounds=3, strategy=strategy, see=lambda round_: see)
    assert {plan.datacenter_steps for plan in plans} == {batches}


def test_a_probation_that_is_dear_beside_what_is_left_is_left_out():
    """A visit of eight devices costs 0.32, and a hundredth of what is left may go to it."""

    def asked(spent):
        found = []

        def judge(models):
            found.append(models)
            return [-0.1]

        # The probation is due in round 21: 15 warm rounds, 5 with devices.
        adapt(judge=judge, see=lambda round_: ROOM | ({"spent": spent} if round_ > 20 else {}))
        return found[1:]

    assert asked(spent=360.0) == [("warm", "served")]
    assert asked(spent=370.0) == []


def test_the_rounds_that_time_allows_are_reckoned_from_what_rounds_took():
    past_ = [
        dataclasses.replace(past(round_, "federated"), elapsed=elapsed)
        for round_, elapsed in enumerate((10.0, 20.0, 30.0, 530.0, 540.0), 1)  # a wait among them
    ]
    forecast = {"federated": Forecast(ready=True, changes_in=9.0, share=0.5)}
    more = {"rounds": 100, "seconds_left": 400.0, "forecast": forecast, "budget": 50.0}
    assert rounds_with_devices(observe(6, past_, **more)) == (20.0, 6.0)


def test_adaptive_waits_while_devices_are_away():
    policy = load_policy(adaptive())
    dark = {"federated": Forecast(ready=False, changes_in=3.0, share=0.5)}
    begun = policy.plan(observe(1, budget=8.0)).state
    assert policy.plan(observe(2, state=begun, forecast=dark)).regime == "federated"  # when it may


def test_adaptive_ends_edge_work_with_the_privacy_budget():
    plans = adapt(rounds=6, see=lambda round_: {"epsilon_left": 3.0 - round_})
    assert initials(plans) == "ffdddd"
    assert "privacy budget is spent" in plans[2].reason


def test_every_reason_of_adaptive_has_numbers():
    runs = [
        adapt(judge=lambda models: [-0.1] * (len(models) - 1), rounds=60),
        adapt(judge=lambda models: [0.1], rounds=40, see=morning(8)),
        adapt(rounds=12, strategy=job("adaptive", target_edge_share=0.5)),
        adapt(rounds=50, losses=lambda round_: 3 * 0.9**round_),
    ]
    for plan in (plan for plans in runs for plan in plans):
        assert not isinstance(plan, Stop)
        assert any(letter.isdigit() for letter in plan.reason), plan.reason


def test_the_state_of_adaptive_reads_back_as_it_was_written():
    state = State(phase="warm", warm=3, limit=9, proved=True, asking="warm")
    assert State.read(state.write()) == state
    assert dataclasses.asdict(State()) == State().write()
