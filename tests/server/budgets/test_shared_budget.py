"""What runs with the same data would spend together, before any of them begins."""

import re

import pytest

from isthmus.errors import UserError
from isthmus.job import with_changes
from isthmus_privacy.dp.accounting import Composition
from isthmus_privacy.dp.calibration import NoisePlan
from isthmus_server.budgets.shared_budget import SharedBudget, SharedRun

PRIVATE = (
    "strategy.policy=federated",
    "federated.clients=10",
    "federated.cohort=10",
    "federated.quorum=8",
    "rounds=4",
    "privacy.mechanism=gaussian",
    "privacy.epsilon=8",
    "privacy.delta=0.01",
)
EXAMPLES = (
    "strategy.policy=datacenter",
    "datacenter.ranks=1",
    "datacenter.zero_stage=0",
    "datacenter.batch_size=8",
    "datacenter.steps=5",
    "rounds=2",
    "datacenter.privacy.delta=1e-4",
    "datacenter.privacy.examples=200",
    "datacenter.privacy.epsilon=8",
)


def refusal(tmp_path, jobs, devices=10):
    """Why the runs of some jobs are refused; empty if they are not."""
    try:
        SharedBudget(tmp_path, [SharedRun(job, devices) for job in jobs]).check()
    except UserError as error:
        return str(error)
    return ""


def test_the_total_is_that_of_all_runs_and_the_number_that_fits_is_said(make_job, tmp_path):
    job = make_job(*PRIVATE, "privacy.participations=12")
    event = NoisePlan.of_job(job).event("run")
    assert refusal(tmp_path, [job] * 3) == ""
    told = refusal(tmp_path, [job] * 5)
    total = Composition().plus(event, 20).epsilon(0.01)
    assert f"these 5 runs have the same data, and would spend epsilon {total:.4g} of it" in told
    assert "is 8, so only the first 3 fit: train fewer runs" in told
    assert "privacy.participations=60" in told


@pytest.mark.parametrize(
    ("change", "fit"),
    [
        ({}, 3),
        ({"federated.cohort": 5, "federated.quorum": 5}, 6),
        ({"federated.cohort": 4, "federated.quorum": 4}, 12),
        ({"strategy.policy": "alternate", "datacenter.ranks": 1}, 6),
        ({"budget": 25.0}, 6),
        ({"budget": 1e9}, 3),
    ],
)
def test_the_device_that_is_asked_most_is_asked_at_least_as_often_as_the_mean(
    make_job, tmp_path, change, fit
):
    job = with_changes(make_job(*PRIVATE, "privacy.participations=12"), change)
    assert refusal(tmp_path, [job] * fit) == ""
    assert f"only the first {fit} fit" in refusal(tmp_path, [job] * (fit + 1))


@pytest.mark.parametrize(
    "change",
    [
        {"strategy.policy": "adaptive", "datacenter.ranks": 1},
        {"strategy.policy": "alternate", "datacenter.ranks": 1, "budget": 1e9},
        {"seconds": 1e9},
        {"device_bytes": 10**15},
    ],
)
def test_runs_whose_rounds_are_not_certain_are_not_refused(make_job, tmp_path, change):
    job = with_changes(make_job(*PRIVATE), change)
    assert refusal(tmp_path, [job] * 9) == ""


def test_a_run_with_another_budget_is_measured_by_what_all_before_it_have_spent(make_job, tmp_path):
    job = make_job(*PRIVATE, "privacy.noise=6", "privacy.epsilon=20")
    of_one = Composition().plus(NoisePlan.of_job(job).event(""), 4).epsilon(0.01)
    of_two = Composition().plus(NoisePlan.of_job(job).event(""), 8).epsilon(0.01)
    small = with_changes(job, {"privacy.epsilon": (of_one + of_two) / 2})
    assert refusal(tmp_path, [small, job, job]) == ""
    told = refusal(tmp_path, [job, small, job])
    assert "so only the first 1 fits: train fewer runs, or raise privacy.noise, which is 6" in told


def test_one_run_by_itself_ends_when_its_budget_is_spent(make_job, tmp_path):
    job = make_job(*PRIVATE, "privacy.noise=1", "privacy.epsilon=4")
    assert refusal(tmp_path, [job]) == ""
    assert "so none fits" in refusal(tmp_path, [job, job])


def test_the_examples_of_a_datacenter_are_added_up_apart(make_job, tmp_path):
    job = make_job(*EXAMPLES)
    told = refusal(tmp_path, [job] * 2)
    assert re.search(r"the budget \(datacenter\.privacy\.epsilon\) is 8, so only the first 1", told)
    assert "with datacenter.privacy.steps=20" in told
    enough = with_changes(job, {"datacenter.privacy.steps": 20})
    assert refusal(tmp_path, [enough] * 2) == ""


def test_jobs_without_privacy_have_no_ledger(make_job, tmp_path):
    job = make_job("strategy.policy=federated", "federated.clients=4")
    budget = SharedBudget(tmp_path, [SharedRun(job, 4)] * 9)
    budget.check()
    with budget.held():
        assert budget.spent() == []
    assert list(tmp_path.iterdir()) == []
