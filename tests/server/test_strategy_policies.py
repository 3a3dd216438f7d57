"""What each policy does, over rounds whose observations are made up."""

import dataclasses

import pytest

from isthmus.errors import JobError
from isthmus.job import StrategySection
from isthmus_server.strategy import Stop, Wait, load_policy
from isthmus_server.strategy.outlook import rounds_with_devices
from isthmus_server.strategy.policies import BUILT_IN
from isthmus_server.strategy.policy import Forecast

from .observing import observe, past, play


def job(policy, settings=None, **more):
    return StrategySection(policy=policy, settings=settings or {}, **more)


def initials(plans):
    return "".join(plan.regime[0] for plan in plans)


@pytest.mark.parametrize("policy", sorted(BUILT_IN))
def test_settings_that_a_policy_does_not_have_are_one_sentence(policy):
    strategy = job(policy, {"patiance": 3}, schedule=[{"regime": "federated"}])
    with pytest.raises(JobError, match=r"^unknown key strategy\.settings\.patiance; known here: "):
        load_policy(strategy)


def test_a_setting_out_of_its_range_is_one_sentence():
    with pytest.raises(JobError, match=r"^strategy\.settings\.patience=0: input should be greater"):
        load_policy(job("plateau", {"patience": 0}))


def test_plateau_goes_to_the_other_regime_when_the_loss_stays():
    falling = [1.0, 0.9, 0.9, 0.9, 0.89, 0.8, 0.7, 0.7, 0.7, 0.7]
    plans = play(job("plateau", {"patience": 2}), 10, losses=lambda round_: falling[round_ - 1])
    assert initials(plans) == "ddddfffffd"
    assert plans[4].reason == "loss has not fallen below 0.9 by 1% in 2 evaluated datacenter rounds"


def test_budget_leaves_a_reserve():
    plans = play(job("budget", {"reserve": 0.5}), 6, lambda round_: {"budget": 40.0})
    # A round of 8 devices costs 8, so 40, 32, 24 and then 16 are left.
    assert initials(plans) == "fffddd"
    assert plans[3].reason == "16 of 40 is left of the budget, and 50% is kept back"
    nearly = play(job("budget"), 3, lambda round_: {"epsilon_left": 4.0 - 2 * round_})
    assert initials(nearly) == "fdd"


def test_availability_takes_whoever_can_work():
    policy = load_policy(job("availability", {"both": "hybrid"}))
    night, always = Forecast(ready=False, changes_in=60.0, share=0.5), Forecast()

    def answer(edge, center, clients=8, datacenter=True):
        return policy.plan(
            observe(
                forecast={"federated": edge, "datacenter": center},
                clients_ready=clients,
                datacenter_ready=datacenter,
            )
        )

    assert answer(always, always).regime == "hybrid"
    assert answer(night, always).regime == "datacenter"
    assert answer(always, night).regime == "federated"
    assert answer(always, always, clients=2).regime == "datacenter"
    assert answer(always, always, datacenter=False).regime == "federated"
    assert answer(night, night) == Wait(
        60.0, "the devices are outside of their window, and the datacenter cannot work"
    )
    assert answer(always, always, clients=0, datacenter=False).regime == "federated"


@pytest.mark.parametrize("method", ["ucb", "thompson"])
def test_a_bandit_tries_each_arm_and_stays_with_the_better(method):
    settings = {"method": method, "exploration": 0.1}
    history, plans = [past(0, "hybrid", loss=10.0)], []
    loss = 10.0
    for round_ in range(1, 21):
        plan = load_policy(job("bandit", settings)).plan(observe(round_, history))
        plans.append(plan)
        loss -= 0.3 if plan.regime == "federated" else 0.1
        history.append(past(round_, plan.regime, loss=loss))
    assert set(initials(plans[:2])) == {"d", "f"}
    assert initials(plans).count("f") > 14


def test_the_rule_follows_the_declared_target():
    def plan(share):
        return load_policy(job("rule", target_edge_share=share)).plan(observe())

    assert plan(1.0).regime == "federated"
    assert plan(0.0).regime == "datacenter"
    mixed = plan(0.95)
    assert (mixed.regime, mixed.merge) == ("hybrid", "transfer")
    assert mixed.transfer_weight == pytest.approx(0.05 / 0.95)
    assert plan(0.5).transfer_weight == 0.1


# -- adaptive ------------------------------------------------------------------------------------

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


def test_adaptive_transfers_where_the_datacenter_holds_part_of_the_target():
    strategy = job("adaptive", target_edge_share=20 / 26)
    plans = adapt(rounds=20, strategy=strategy)
    assert {plan.regime for plan in plans} == {"hybrid"}
    assert {plan.merge for plan in plans} == {"transfer"}
    assert {plan.transfer_weight for plan in plans} == {0.05}  # half of what still settles
    nearly = job("adaptive", target_edge_share=0.97)
    assert adapt(rounds=1, strategy=nearly)[0].transfer_weight == pytest.approx(0.03 / 0.97)


@pytest.mark.parametrize(("step_price", "batches"), [(0.001, 50), (0.02, 40), (1.0, 1)])
def test_a_gradient_that_is_dear_beside_the_devices_is_of_fewer_batches(step_price, batches):
    see = {"step_price": step_price}  # eight devices cost 8, of which a tenth may go to it
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


def test_adaptive_does_nothing_while_devices_are_away():
    plans = adapt(rounds=20, see=night(), judge=lambda models: [-0.1] * (len(models) - 1))
    assert set(initials(plans)) == {"f"}


def test_adaptive_ends_edge_work_with_the_privacy_budget():
    plans = adapt(rounds=6, see=lambda round_: {"epsilon_left": 3.0 - round_})
    assert initials(plans) == "ffdddd"
    assert "privacy budget is spent" in plans[2].reason


def branching():
    return adaptive(branches=True)


def night(budget=None, seconds_left=None):
    """Devices are away in rounds 3 to 5 and 8 to 10."""

    def see(round_):
        away = round_ in (3, 4, 5, 8, 9, 10)
        edge = Forecast(ready=not away, changes_in=3.0, share=0.5)
        return {"forecast": {"federated": edge}, "budget": budget, "seconds_left": seconds_left}

    return see


@pytest.mark.parametrize(
    ("verdict", "start"),
    [([-0.1, -0.05], "current"), ([-0.01, -0.1], "day+current"), ([0.1, -0.005], "day")],
)
def test_adaptive_merges_a_branch_only_if_it_wins(verdict, start):
    plans = adapt(rounds=40, judge=lambda models: verdict, see=night(), strategy=branching())
    assert initials(plans[:6]) == "ffdddf"
    assert plans[1].keep == {"day": "served"}
    assert plans[5].start == start
    assert plans[5].step_scale == 1.0


def test_adaptive_gives_up_branches_that_lost_twice():
    plans = adapt(rounds=40, judge=lambda models: [0.1, 0.1], see=night(), strategy=branching())
    assert plans[10].start == "day"
    assert plans[10].state["losses"] == 2
    policy = load_policy(branching())
    dark = Forecast(ready=False, changes_in=3.0, share=0.5)
    again = observe(12, rounds=40, state=plans[10].state, forecast={"federated": dark})
    assert policy.plan(again).regime == "federated"  # which waits for the window


def test_adaptive_keeps_the_money_for_the_devices():
    # Ten of twenty rounds are the devices', at 8 each: nothing is left for a branch.
    plans = adapt(
        rounds=20,
        see=night(budget=80.0),
        judge=lambda models: [0.0, 0.0],
        strategy=branching(),
    )
    assert "d" not in initials(plans)


def test_every_reason_of_adaptive_has_numbers():
    runs = [
        adapt(judge=lambda models: [-0.1] * (len(models) - 1), rounds=60),
        adapt(
            judge=lambda models: [0.1] * (len(models) - 1),
            rounds=40,
            see=night(),
            strategy=branching(),
        ),
        adapt(rounds=12, strategy=job("adaptive", target_edge_share=0.5)),
    ]
    for plan in (plan for plans in runs for plan in plans):
        assert not isinstance(plan, Stop)
        assert any(letter.isdigit() for letter in plan.reason), plan.reason


def test_the_state_of_adaptive_reads_back_as_it_was_written():
    from isthmus_server.strategy.policies.adaptive import State

    state = State(phase="warm", warm=3, limit=9, proved=True, asking="warm")
    assert State.read(state.write()) == state
    assert dataclasses.asdict(State()) == State().write()
