"""The table `[federated.privacy]`, and jobs in which its guarantee could not hold."""

import pytest

from isthmus.errors import JobError
from isthmus.job import read_job, write_job

KEYS = ("federated.privacy.epsilon=4", "federated.privacy.delta=1e-5")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (("federated.precision=bf16",), r"precision='bf16' .* float32; remove precision"),
        (("federated.compile=true",), r"torch.compile does not compile per-example gradients"),
        (("federated.accumulate=2",), r"accumulate=2 .* already taken in parts"),
        (("federated.clip_norm=1.0",), r"clip_norm .* federated.privacy.clip already bounds"),
        (("federated.local_steps=0",), r"local_steps=0 trains nothing"),
        (("evaluation.devices=5",), r"evaluation.devices=5 would count on devices without noise"),
        (
            ("statistics.collect=true", "federated.secure_aggregation=true"),
            r"statistics.collect sums counts without noise",
        ),
        (
            ("federated.compression.bits=3", "federated.secure_aggregation=true"),
            r"federated.compression sums the devices' losses",
        ),
        (('federated.flower.app="app.py:app"',), r"federated.flower runs code of its own"),
        (
            ('exchange.low_rank.include=["weight"]', "exchange.low_rank.rank=2"),
            r"exchange.low_rank trains factors",
        ),
        (("federated.privacy.examples=20",), r"batch_size=32 is more than examples=20"),
        (
            ("federated.privacy.examples=200000",),
            r"delta=1e-05 is not below 1 / examples, with examples=200000",
        ),
        (("federated.privacy.delta=1.5",), r"federated.privacy.delta=1.5: input should be less"),
    ],
)
def test_jobs_in_which_it_cannot_hold_are_refused(make_job, changes, reason):
    with pytest.raises(JobError, match=reason):
        make_job(*KEYS, *changes)


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("federated.privacy.examples=500", "federated.privacy.participations=3"),
        ('exchange.personal=["bias"]', "federated.proximal=0.1"),
        ("privacy.mechanism=gaussian", "privacy.epsilon=8", "privacy.delta=1e-5"),
        ('federated.mode="buffered"',),
    ],
)
def test_jobs_with_it_reach_devices_unchanged(make_job, changes):
    job = make_job(*KEYS, *changes)
    assert read_job(write_job(job)) == job
    assert job.federated.weight(500) == 1


def test_jobs_without_it_are_as_before(make_job):
    job = make_job()
    assert "privacy" not in write_job(job)
    assert job.federated.weight(500) == 500
