"""The datacenter's role in the rounds of the adaptive policy."""

import dataclasses

import pytest
from tests.server.strategy.observations import (
    HALF,
    adapt,
    comparison_of,
    gradients_of,
    initials,
    observe,
    past_round,
    strategy_of,
)

from isthmus_server.strategy import load_policy
from isthmus_server.strategy.gradients import DatacenterGradient
from isthmus_server.strategy.policies.adaptive.evidence import gradient_divergence
from isthmus_server.strategy.policies.adaptive.state import WITH_GRADIENT


def second_plan(share, ratio, **more):
    """The second plan where devices hold a share of the target, after gradients of this ratio."""
    first = past_round(1, "federated", gradients=gradients_of(ratio) if ratio else None)
    policy = load_policy(strategy_of("adaptive", target_edge_share=share))
    return policy.plan(observe(2, [first], state={"phase": "edge", "edge_rounds": 1}, **more))


def test_the_gradient_is_transferred_where_public_data_cover_part_of_the_target():
    strategy = strategy_of("adaptive", target_edge_share=20 / 26)
    first, *others = adapt(rounds=20, strategy=strategy)
    assert (first.regime, first.measure_gradients) == ("federated", True)
    assert {plan.regime for plan in others} == {"hybrid"}
    assert {plan.merge for plan in others} == {"transfer"}


@pytest.mark.parametrize(
    ("share", "ratio", "weight"),
    [
        (0.9, 1.0, 0.33 / 9),  # a third of (1 - pi)/pi
        (0.5, 2.5, 0.5 / 2.5),  # no longer than half of the devices' own gradient
        (0.5, 0.0, 0.1),  # nothing could be measured: the job's
    ],
)
def test_the_transfer_weight_follows_the_target_and_the_gradients(share, ratio, weight):
    plan = second_plan(share, ratio)
    assert plan.transfer_weight == pytest.approx(weight)
    assert f"take {weight:.3g}" in plan.reason


@pytest.mark.parametrize(
    ("lengths", "cosine", "halvings"),
    [
        ([2.9, 2.9], 1.0, 0),  # half as long again as the devices' own update, at most
        ([3.1, 2.9, 4.0], 1.0, 2),
        ([3.1, 4.0], 0.5, 0),  # another direction than the gradient's
    ],
)
def test_a_gradient_that_carries_devices_too_far_counts_half(lengths, cosine, halvings):
    own = past_round(1, "federated", gradients=gradients_of(1.0))
    history = [dataclasses.replace(own, norms={"federated": 2.0})]
    for length in lengths:
        transfer = past_round(len(history) + 1, "hybrid")
        norms = {"federated": length, "datacenter": 0.1}
        history.append(dataclasses.replace(transfer, norms=norms, cosine=cosine))
    state = {"phase": "edge", "edge_rounds": len(history)}
    plan = load_policy(HALF).plan(observe(len(history) + 1, history, state=state))
    assert plan.transfer_weight == pytest.approx(0.33 / 2**halvings)
    assert ("carried them too far" in plan.reason) == bool(halvings)


@pytest.mark.parametrize("loss_scale", [0.1, 10.0])
def test_the_scale_of_the_loss_changes_no_decision(loss_scale):
    """With a learning rate divided by it, devices make the same steps."""

    def plans(scale):
        history = [
            dataclasses.replace(
                past_round(
                    round_,
                    "hybrid",
                    gradients=gradients_of(3.0, devices=scale * 0.7**round_),
                    loss=scale * 0.8**round_,
                    public_loss=scale * 0.8**round_,
                ),
                norms={"datacenter": 0.2 * scale, "federated": 4.0},
                cosine=0.5,
                training={"federated": {"loss": scale * 0.9**round_}},
            )
            for round_ in range(1, 9)
        ]
        for share in (0.5, 1.0):
            policy = load_policy(strategy_of("adaptive", target_edge_share=share))
            for rounds in range(1, 9):
                state = {"phase": "edge", "edge_rounds": rounds}
                yield policy.plan(observe(rounds + 1, history[:rounds], state=state))

    for plan, scaled in zip(plans(1.0), plans(loss_scale), strict=True):
        assert scaled.transfer_weight == pytest.approx(plan.transfer_weight)
        assert dataclasses.replace(scaled, transfer_weight=plan.transfer_weight) == plan


def of_two(a, b, ratio=2.0):
    """A measurement of the datacenters a and b; for each, its ratio and cosine."""
    return dataclasses.replace(
        gradients_of(ratio),
        datacenters={
            name: DatacenterGradient(norm=norm, cosine=cosine, examples=10)
            for name, (norm, cosine) in {"a": a, "b": b}.items()
        },
    )


TWO = {"datacenters": 2, "datacenter_names": ("a", "b")}


def test_each_datacenter_has_the_weight_that_it_would_have_alone():
    first = past_round(1, "federated", gradients=of_two((2.5, 0.5), (0.1, 0.2)))
    state = {"phase": "edge", "edge_rounds": 1}
    plan = load_policy(HALF).plan(observe(2, [first], state=state, **TWO))
    assert plan.datacenter_weights == pytest.approx({"a": 0.5 / 2.5, "b": 0.33})
    assert "by datacenter: a 0.2, b 0.33" in plan.reason
    assert not plan.measure_gradients
    alone = load_policy(HALF).plan(observe(2, [first], state=state, datacenter_names=("a",)))
    assert alone.datacenter_weights == {}
    late = observe(2, [first], state=state, datacenters=3, datacenter_names=("a", "b", "c"))
    plan = load_policy(HALF).plan(late)
    assert plan.datacenter_weights["c"] == plan.transfer_weight
    assert plan.measure_gradients  # so that its own weight is known afterwards


def test_a_harmful_race_excludes_the_most_opposed_datacenter_first():
    policy = load_policy(strategy_of("adaptive"))
    history = [
        past_round(1, "hybrid", gradients=of_two((2.0, -0.5), (1.0, 0.4))),
        past_round(2, "hybrid", gradients=of_two((2.0, 0.5), (1.0, 0.1))),
    ]
    state = {
        "phase": "edge",
        "edge_rounds": 12,
        "probation_over": True,
        "race": {"branch": "without", "rounds": 3},
        "pending_comparison": "race",
    }
    harm = (comparison_of(("current", WITH_GRADIENT), [0.3]),)
    judged = policy.plan(observe(13, history, state=state, comparisons=harm, **TWO))
    assert "the gradient of b, the most opposed one, is not used" in judged.reason
    assert not judged.state["race"]["vetoed"]
    again = {**state, "excluded": judged.state["excluded"], "race": {"branch": "fork"}}
    plan = policy.plan(observe(14, history, state=again, **TWO))
    assert plan.datacenter_weights == {"a": 0.25 / 2.0, "b": 0.0}
    again = {**state, "excluded": ["b"]}
    judged = policy.plan(observe(15, history, state=again, comparisons=harm, **TWO))
    assert judged.state["race"]["vetoed"]  # only one was left
    gone = observe(14, history, state={**again, "race": {}}, datacenter_names=("b",))
    assert "no datacenter is available" in policy.plan(gone).reason


def transfer_rounds(rounds, cosine, gradient=2.0, device_losses=(), shrinks=0.95):
    """Committed transfer rounds with these norms, cosines and losses of the devices.

    The gradient's norm is `shrinks` times as long in each round.
    """
    losses = [*device_losses, *[1.0] * (rounds - len(device_losses))]
    return [
        dataclasses.replace(
            past_round(round_, "hybrid"),
            gradients=gradients_of(gradient),
            cosine=cosine,
            norms={"datacenter": gradient * shrinks**round_},
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


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        (transfer_rounds(6, 0.9), "twtwtw"),  # 2 x 0.9 x 1.13 = 2.0
        (transfer_rounds(6, 0.8), "twtwtw"),  # 1.8
        (transfer_rounds(6, 0.8, shrinks=1.0), "tttttt"),  # 1.6: the devices do not follow it
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
    assert gradient_divergence(observe(history=first), 0.5) == pytest.approx(0.510, abs=1e-3)
    assert merges([*first, *later], HALF) == merges(first, HALF)


@pytest.mark.parametrize(("step_price", "steps"), [(0.001, 50), (0.132, 20), (9.0, 1)])
def test_parallel_training_costs_at_most_a_third_of_the_devices_work(step_price, steps):
    observation = observe(
        8, transfer_rounds(7, 0.9), state={"phase": "edge", "edge_rounds": 7}, step_price=step_price
    )
    plan = load_policy(HALF).plan(observation)
    assert (plan.regime, plan.merge, plan.datacenter_steps) == ("hybrid", "weighted", steps)


def test_rounds_are_federated_without_a_connected_datacenter():
    plan = second_plan(0.5, 1.0, datacenter_ready=False)
    assert plan.regime == "federated"
    assert "no datacenter is available" in plan.reason


def test_devices_apply_the_gradient_while_public_data_resemble_theirs():
    """The public loss falls below two thirds of the first in the fifth round."""
    plans = adapt(rounds=50, losses=lambda round_: 3 * 0.9**round_)
    begins = initials(plans).index("h")
    assert begins == 5
    assert {plan.transfer_weight for plan in plans[begins:-1]} == {0.25 / 2.0}
    without = adapt(rounds=50, losses=lambda round_: 3 * 0.9**round_, public=False)
    assert set(initials(without[:-1])) == {"f"}  # other held-out data may be the target's
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


def forget(round_):
    """Losses of devices that have forgotten what others taught them, from the third round on."""
    return 3.8 if round_ >= 3 else 1.5


@pytest.mark.parametrize("device_losses", [forget, lambda round_: 1.5 if round_ == 1 else 3.0])
@pytest.mark.parametrize(
    ("difference", "standard_error"), [(-0.02, 0.01), (0.2, 0.01), (0.09, 0.04)]
)
def test_a_race_decides_whether_devices_that_forget_take_the_gradient(
    device_losses, difference, standard_error
):
    asked = []

    def judge(models):
        asked.append(models)
        return comparison_of(models, [difference], error=standard_error)

    plans = adapt(rounds=50, judge=judge, device_losses=device_losses)
    if device_losses is not forget:
        assert set(initials(plans[:-1])) == {"f"}
        return
    fork = next(at for at, plan in enumerate(plans) if plan.keep)
    assert plans[fork].keep == {"fork": "current"}
    assert "rose to 2.5 times the first" in plans[fork].reason
    assert initials(plans[fork : fork + 7]) == "fhhhfff"
    for branch in (fork + 1, fork + 4):
        assert (plans[branch].start, plans[branch].reset_optimizer) == ("fork", True)
    assert plans[fork + 3].keep == {"with-gradient": "current"}
    assert asked[0] == ("current", "with-gradient")
    after = plans[fork + 7]
    assert after.start == ("with-gradient" if difference < 0 else "current")
    later = initials(plans[fork + 7 : -1])
    if difference < 0:
        assert set(later) == {"h"}
    elif difference == 0.2:
        assert set(later) == {"f"}
    else:  # within the error: the race is due again after as many rounds, if there is room
        assert "decides nothing" in after.reason
        assert after.state["race"]["not_before"] == 2 * (fork + 7)
        assert any("no room to test" in plan.reason for plan in plans[fork + 8 :])
    assert after.step_scale == 0.5


@pytest.mark.parametrize(("devices", "error"), [(6, 0.05), (40, 0.05), (40, 0.01)])
def test_the_interval_of_a_comparison_is_wider_than_that_of_one_test(devices, error):
    """It holds at any number of devices; 1.64 standard errors hold at one, for 5 %."""
    result = dataclasses.replace(
        comparison_of(("current", WITH_GRADIENT), [0.0], error=1.0), devices=devices
    )
    assert 2.5 < result.radius(WITH_GRADIENT, error) < 4.5
