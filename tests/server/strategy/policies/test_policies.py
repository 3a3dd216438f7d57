"""The simpler built-in policies, over simulated rounds."""

import pytest
from tests.server.strategy.observations import observe, past_round, simulate

from isthmus.errors import JobError
from isthmus.job import StrategySection
from isthmus_server.strategy import Wait, load_policy
from isthmus_server.strategy.policies import BUILT_IN
from isthmus_server.strategy.policy import Forecast


def strategy_of(policy, settings=None, **more):
    return StrategySection(policy=policy, settings=settings or {}, **more)


def initials(plans):
    return "".join(plan.regime[0] for plan in plans)


@pytest.mark.parametrize("policy", sorted(BUILT_IN))
def test_unknown_settings_of_a_policy_are_reported(policy):
    strategy = strategy_of(policy, {"patiance": 3}, schedule=[{"regime": "federated"}])
    with pytest.raises(JobError, match=r"^unknown key strategy\.settings\.patiance; (known|did) "):
        load_policy(strategy)


def test_a_setting_out_of_range_is_reported():
    with pytest.raises(JobError, match=r"^strategy\.settings\.patience=0: input should be greater"):
        load_policy(strategy_of("plateau", {"patience": 0}))


def test_plateau_switches_the_regime_when_the_loss_stalls():
    falling = [1.0, 0.9, 0.9, 0.9, 0.89, 0.8, 0.7, 0.7, 0.7, 0.7]
    plans = simulate(
        strategy_of("plateau", {"patience": 2}), 10, losses=lambda round_: falling[round_ - 1]
    )
    assert initials(plans) == "ddddfffffd"
    assert plans[4].reason == "loss has not fallen below 0.9 by 1% in 2 evaluated datacenter rounds"


def test_budget_switches_the_regime_at_its_reserve():
    plans = simulate(strategy_of("budget", {"reserve": 0.5}), 6, lambda round_: {"budget": 40.0})
    # A round of 8 devices costs 8, so 40, 32, 24 and then 16 are left.
    assert initials(plans) == "fffddd"
    assert plans[3].reason == "16 of 40 is left of the budget, and 50% is kept back"
    nearly = simulate(strategy_of("budget"), 3, lambda round_: {"bytes_left": 4.0 - 2 * round_})
    assert initials(nearly) == "fdd"


def test_availability_selects_the_available_side():
    policy = load_policy(strategy_of("availability", {"both": "hybrid"}))
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
    history, plans = [past_round(0, "hybrid", loss=10.0)], []
    loss = 10.0
    for round_ in range(1, 21):
        plan = load_policy(strategy_of("bandit", settings)).plan(observe(round_, history))
        plans.append(plan)
        loss -= 0.3 if plan.regime == "federated" else 0.1
        history.append(past_round(round_, plan.regime, loss=loss))
    assert set(initials(plans[:2])) == {"d", "f"}
    assert initials(plans).count("f") > 14


def test_the_rule_follows_the_declared_target():
    def plan(share):
        return load_policy(strategy_of("rule", target_edge_share=share)).plan(observe())

    assert plan(1.0).regime == "federated"
    assert plan(0.0).regime == "datacenter"
    mixed = plan(0.95)
    assert (mixed.regime, mixed.merge) == ("hybrid", "transfer")
    assert mixed.transfer_weight == pytest.approx(0.05 / 0.95)
    assert plan(0.5).transfer_weight == 0.1
