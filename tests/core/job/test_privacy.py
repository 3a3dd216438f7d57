"""The tables `[privacy]` and `[datacenter.privacy]`: what is refused, and with which sentence."""

import pytest

from isthmus.errors import JobError
from isthmus.job import load_job

DEVICES = ("privacy.mechanism=gaussian", "privacy.epsilon=8", "privacy.delta=1e-5")


@pytest.fixture
def load(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('name = "table"\n[task]\nsource = "task.py:Learn"\n')
    return lambda *changes: load_job(path, changes)


def test_a_simulated_population_is_not_what_a_run_starts(load):
    settings = ("federated.clients=6", "federated.cohort=100", "simulation.clients=200")
    assert load(*DEVICES, *settings).simulation.clients == 200


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["privacy.mechanism=laplace"], "'distributed', 'gaussian' or 'correlated'"),
        (["privacy.epsilon=0"], "greater than 0"),
        (["privacy.delta=1"], "less than 1"),
        (["federated.clients=20", "privacy.delta=0.05"], "not below 1 / 20 devices"),
        (["simulation.clients=2000", "privacy.delta=0.01"], "not below 1 / 2000 devices"),
        (["privacy.noise=nan"], "finite number"),
        (["privacy.noise=1e5"], "privacy.noise=100000.0: input should be less than or equal"),
        (["privacy.clip=1e30"], "privacy.clip: 1e+30 is not in the range"),
        (["privacy.clip=1e-10"], "clipping bounds, 1e-09 to 1e+09"),
        (["privacy.delta=0.125"], "not below 1 / 8 devices"),
        (["privacy.delta=0.1", "federated.over_selection=1.5"], "not below 1 / 12 devices"),
        (["privacy.mechanism=correlated", "rounds=100001"], "is for up to 100000 rounds"),
        (["privacy.separation=2"], "is for mechanism='correlated'"),
        (
            ["privacy.mechanism=correlated", "privacy.separation=4", "federated.clients=20"],
            "4 rounds, 24 for a quorum of 6, and there are 20",
        ),
        (
            ["privacy.mechanism=distributed", "privacy.clip_quantile=0.5"],
            "is for mechanism='gaussian'",
        ),
        (
            ["privacy.clip_quantile=0.5", "federated.secure_aggregation=false"],
            "counts the devices within the bound in the secure sum",
        ),
        (
            ["privacy.mechanism=distributed", "federated.secure_aggregation=false"],
            "adds the noise inside the secure sum",
        ),
        (
            ["evaluation.devices=3", "privacy.measurements=0"],
            "leaves nothing for evaluation.devices=3",
        ),
        (["evaluation.devices=200", "privacy.delta=0.01"], "not below 1 / 200 devices"),
        (["privacy.measurements=2000000"], "less than or equal to 1000000"),
        (
            [
                "privacy.measurements=2",
                "federated.privacy.epsilon=1",
                "federated.privacy.delta=1e-5",
            ],
            "would get no noise for these",
        ),
        (["statistics.collect=true"], "sums counts without noise"),
        (["federated.mode=buffered"], "sums updates to different models"),
        (["federated.compression.bits=3"], "rounds updates after they are clipped"),
        (["federated.groups.minimum=5"], "sums several groups in a round"),
        (
            ["federated.flower.app=app:client", "federated.secure_aggregation=false"],
            "runs code that Isthmus does not clip",
        ),
    ],
)
def test_a_table_whose_guarantee_would_not_hold_is_refused(load, changes, sentence):
    load(*DEVICES)
    with pytest.raises(JobError, match="privacy") as refused:
        load(*DEVICES, *changes)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("steps=9", "datacenter.privacy: steps=9 is below datacenter.steps=10, those of one"),
        ("clip=1e30", "datacenter.privacy.clip: 1e+30 is not in the range of clipping bounds"),
        ("noise=1e5", "datacenter.privacy.noise=100000.0: input should be less than or equal"),
    ],
)
def test_dp_sgd_with_values_that_would_fail_later_is_refused(load, change, sentence):
    privacy = ("epsilon=4", "delta=1e-5", "examples=1000", "steps=10", "clip=1e9", "noise=1e4")
    layout = ("data_parallel=1", "batch_size=5", "steps=10", "zero_stage=0")
    changes = (*layout, *(f"privacy.{each}" for each in privacy[: 4 if "steps" in change else 6]))
    load(*(f"datacenter.{each}" for each in changes))
    with pytest.raises(JobError) as refused:
        load(*(f"datacenter.{each}" for each in (*changes, f"privacy.{change}")))
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)
