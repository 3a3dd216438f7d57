"""The results of the rules, each compared with a computation by hand; and their settings."""

import itertools

import numpy as np
import pytest
import torch

from isthmus.errors import JobError, RoundFailed, UserError
from isthmus.job import read_job, with_changes, write_job
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_server.model.fixed_point_sum import TILE
from isthmus_server.regimes.aggregation.coordinate_wise import Median, TrimmedMean
from isthmus_server.regimes.aggregation.krum import Krum, MultiKrum
from isthmus_server.regimes.aggregation.norm_bound import NormBound
from isthmus_server.regimes.aggregation.rule import AggregatedRound, SingleUpdate
from isthmus_server.regimes.run_aggregation import aggregation_of
from isthmus_server.runs.jobs.checks import check_job

LAYOUT = TensorLayout.from_shapes({"bias": (1,), "weight": (2,)})
SIZE = TILE + 5
"""More than one tile."""


def settings(make_job, name, **table):
    """The `[federated]` of a job with seven devices that uses a rule."""
    job = make_job("federated.cohort=7", "federated.quorum=7")
    changes = {"federated.aggregation": name, "federated.aggregation_settings": table}
    return with_changes(job, changes).federated


def random_updates(count=7):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, SIZE, generator=generator)


def aggregate(rule, vectors, examples=None):
    """The rule's result for one round of these updates."""
    examples = examples or [10] * len(vectors)
    names = [f"device-{i}" for i in range(len(vectors))]
    facts = AggregatedRound(
        round=1,
        size=vectors.shape[1],
        cohort=dict(zip(names, examples, strict=True)),
        quorum=len(vectors),
        max_updates=len(vectors),
    )
    round_ = rule.begin(facts)
    for name, weight, vector in zip(names, examples, vectors, strict=True):
        round_.add(SingleUpdate(device=name, examples=weight, vector=vector.clone()))
    return round_.result()


@pytest.mark.parametrize("count", [7, 8])
def test_the_median_is_that_of_each_element(make_job, count):
    updates = random_updates(count)
    found = aggregate(Median(settings(make_job, "median")), updates)
    np.testing.assert_allclose(found, np.median(updates.numpy(), axis=0), rtol=1e-6)


def test_the_trimmed_mean_leaves_out_the_ends_of_each_element(make_job):
    updates = random_updates()
    found = aggregate(TrimmedMean(settings(make_job, "trimmed-mean", share=0.3)), updates)
    inner = np.sort(updates.numpy().astype(np.float64), axis=0)[2:-2]
    np.testing.assert_allclose(found, inner.mean(axis=0), rtol=1e-5, atol=1e-7)


def scores_by_hand(updates, faulty):
    """The paper's scores, with a loop over all pairs."""
    n = len(updates)
    scores = []
    for i in range(n):
        distances = sorted(
            float(((updates[i] - updates[j]).double() ** 2).sum()) for j in range(n) if j != i
        )
        scores.append(sum(distances[: n - faulty - 2]))
    return scores


def test_krum_takes_the_update_that_is_closest_to_most_others(make_job):
    updates = random_updates()
    updates[:2] += 50
    found = aggregate(Krum(settings(make_job, "krum", faulty=2)), updates)
    best = int(np.argmin(scores_by_hand(updates, 2)))
    assert best >= 2
    assert torch.equal(found, updates[best])


@pytest.mark.parametrize(("table", "count"), [({}, 5), ({"selected": 3}, 3)])
def test_multi_krum_is_the_mean_of_the_best(make_job, table, count):
    updates = random_updates()
    rule = MultiKrum(settings(make_job, "multi-krum", faulty=2, **table))
    best = np.argsort(scores_by_hand(updates, 2), kind="stable")[:count]
    expected = updates[best.tolist()].double().mean(dim=0).float()
    torch.testing.assert_close(aggregate(rule, updates), expected)


def test_krum_scores_are_exact_for_updates_far_from_zero(make_job):
    """Squares of the updates would differ by less than float32 resolves."""
    near = torch.tensor([[0.0], [1.0], [2.0], [3.0], [30.0], [60.0], [90.0]]) + 4000
    found = aggregate(Krum(settings(make_job, "krum", faulty=2)), near)
    assert found.item() == 4001.0


def test_the_norm_bound_scales_long_updates_and_keeps_short_ones(make_job):
    updates = torch.tensor([[3.0, 4.0], [0.0, 0.5], [300.0, 400.0]])
    found = aggregate(NormBound(settings(make_job, "norm-bound", norm=1)), updates, [10, 20, 30])
    expected = (
        10 * np.array([0.6, 0.8]) + 20 * np.array([0.0, 0.5]) + 30 * np.array([0.6, 0.8])
    ) / 60
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_the_norm_bound_gives_the_same_bytes_in_any_order(make_job):
    rule = NormBound(settings(make_job, "norm-bound", norm=2))
    updates = random_updates(3)
    found = [
        aggregate(rule, updates[list(order)], [[7, 8, 9][i] for i in order])
        for order in itertools.permutations(range(3))
    ]
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("median", {}),
        ("trimmed-mean", {"share": 0.3}),
        ("krum", {"faulty": 2}),
        ("multi-krum", {"faulty": 2}),
        ("norm-bound", {"norm": 1.0}),
    ],
)
def test_two_dishonest_devices_of_seven_move_the_result_little(make_job, name, table):
    federated = settings(make_job, name, **table)
    rule = aggregation_of(federated, LAYOUT)._rule
    honest = torch.tensor([1.0, 2.0, 3.0]) + 0.1 * random_updates()[:, :3]
    attacked = honest.clone()
    attacked[[1, 4]] = torch.tensor([-900.0, 900.0, -900.0])
    assert (attacked.mean(dim=0) - honest.mean(dim=0)).norm() > 400
    moved = aggregate(rule, attacked) - aggregate(rule, honest)
    assert moved.norm() < 1.0


@pytest.mark.parametrize(
    ("name", "table", "sentence"),
    [
        ("trimmed-mean", {"share": 0.5}, r"share=0\.5 is left out at each end, which leaves noth"),
        ("trimmed-mean", {"share": 0.1}, r"share=0\.1 of a quorum of 7 updates is less than one u"),
        (
            "krum",
            {"faulty": 3},
            r"faulty=3 needs at least 2 x 3 \+ 3 = 9 updates, and a round of federated\.cohort=7 "
            r"may have its quorum of 7; raise federated\.cohort or federated\.quorum, or lower it",
        ),
        ("multi-krum", {"faulty": 3}, r"faulty=3 needs at least 2 x 3 \+ 3 = 9 updates"),
        ("multi-krum", {"faulty": 2, "selected": 6}, r"selected=6 is above 5, the updates of a q"),
        ("krum", {"selected": 2}, r"unknown key federated\.aggregation_settings\.selected"),
        ("norm-bound", {}, r"federated\.aggregation_settings\.norm is missing"),
        ("norm-bound", {"norm": -1}, r"federated\.aggregation_settings\.norm=-1: .* greater than"),
        ("median", {"share": 0.2}, r"unknown key federated\.aggregation_settings\.share"),
        ("medain", {}, r"aggregation='medain' is unknown; did you mean median\? installed are k"),
    ],
)
def test_settings_that_cannot_be_used_are_one_sentence(make_job, name, table, sentence):
    with pytest.raises(UserError, match=sentence):
        aggregation_of(settings(make_job, name, **table), LAYOUT)


def test_a_policy_s_smaller_cohort_fails_the_round_and_not_the_check(make_job):
    rule = Krum(settings(make_job, "krum", faulty=2))
    facts = AggregatedRound(round=1, size=3, cohort={}, quorum=5, max_updates=6)
    with pytest.raises(RoundFailed, match=r"needs at least 2 x 2 \+ 3 = 7 updates.*cohort=6"):
        rule.begin(facts)


def test_a_rule_that_needs_all_updates_is_refused_beyond_its_memory(make_job):
    changes = {"federated.aggregation": "median", "federated.aggregation_max_bytes": 900}
    federated = with_changes(make_job("federated.cohort=7"), changes).federated
    with pytest.raises(JobError, match=r"'median' needs all updates .* 7 of this model take \d+ b"):
        aggregation_of(federated, LAYOUT)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            ["federated.secure_aggregation=true"],
            r"aggregation='median' needs single updates, and federated\.secure_aggregation is on; "
            r"set secure_aggregation = false if the server may see each of them",
        ),
        (["federated.mode=buffered"], r"'median' compares updates to one model, and those of mode"),
        (["federated.flower.strategy.name=FedAvg"], r"and flower both replace the mean; remove"),
        (["federated.groups={}"], r"groups needs secure_aggregation = true"),
        (["federated.compression={}"], r"compression needs secure_aggregation = true"),
        (
            ["privacy={mechanism='gaussian', epsilon=8.0, delta=1e-6}"],
            r"privacy: federated\.aggregation='median' is no mean of clipped updates",
        ),
        (
            ["federated.aggregation=mean", "federated.aggregation_settings.share=0.2"],
            r"aggregation_settings has no effect on aggregation='mean'",
        ),
    ],
)
def test_what_does_not_go_with_a_rule_is_refused(make_job, changes, sentence):
    with pytest.raises(JobError, match=sentence):
        make_job("federated.aggregation=median", *changes)


def test_devices_see_the_rule_in_the_job_and_no_other_job_changes(make_job):
    assert '"aggregation' not in write_job(make_job())
    job = make_job("federated.aggregation=krum", "federated.aggregation_settings.faulty=1")
    assert '"aggregation":"krum","aggregation_settings":{"faulty":1}' in write_job(job)
    assert read_job(write_job(job)) == job


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["federated.aggregation=medain"], r"aggregation='medain' is unknown"),
        (["federated.aggregation=norm-bound"], r"aggregation_settings\.norm is missing"),
        (["federated.codec=ruonded"], r"codec='ruonded' is unknown"),
        (["federated.selection=nearest"], r"selection='nearest' is unknown"),
    ],
)
def test_a_submitted_job_names_what_the_server_has(
    make_job, write_task, tmp_path, overrides, sentence
):
    write_task()
    check_job(make_job("federated.aggregation=median"), tmp_path, 10.0)
    with pytest.raises(UserError, match=sentence):
        check_job(make_job(*overrides), tmp_path, 10.0)
