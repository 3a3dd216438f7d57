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


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["privacy.mechanism=laplace"], "'distributed', 'gaussian' or 'correlated'"),
        (["privacy.epsilon=0"], "greater than 0"),
        (["privacy.delta=1"], "less than 1"),
        (["federated.clients=20", "privacy.delta=0.05"], "not below 1 / 20 devices"),
        (["privacy.noise=nan"], "finite number"),
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
        (["evaluation.devices=3"], "would count on devices without noise"),
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
