"""Which faults past one process are tried, and in which jobs."""

import pytest

from isthmus.errors import JobError, UserError
from isthmus_chaos.network_plan import (
    FAULTS,
    KINDS,
    REPEATABLE,
    faults_of,
    of_kind,
    rounds_with_aggregators,
)


def test_every_fault_is_tried_in_rounds_of_every_kind():
    faults = faults_of(1, None)
    assert [(each.kind, each.what) for each in faults] == [
        (kind, what) for kind in KINDS for _, what in FAULTS
    ]
    assert {each.target for each in faults} == {"sums-0", "sums-1", "server", "mirror"}
    assert set(KINDS) > REPEATABLE


def test_a_sample_is_a_part_of_all_and_depends_on_the_seed():
    samples = [faults_of(seed, 4) for seed in range(5)]
    for seed, sample in enumerate(samples):
        assert sample == faults_of(seed, 4)
        assert len(sample) == 4
        assert set(sample) <= set(faults_of(seed, None))
    assert len({tuple(sample) for sample in samples}) > 1


def test_each_kind_of_round_needs_all_devices(make_job):
    base = rounds_with_aggregators(make_job("federated.clients=6", "budget=3", "rounds=2"))
    jobs = {kind: of_kind(base, kind) for kind in KINDS}
    for kind, job in jobs.items():
        federated = job.federated
        assert federated.secure_aggregation == (kind in ("secure", "compressed"))
        assert (federated.codec is not None) == (kind == "encoded")
        assert (federated.compression is not None) == (kind == "compressed")
        assert federated.mode == ("buffered" if kind == "buffered" else "rounds")
        assert job.datacenter.ranks == 0
        if kind != "buffered":
            assert federated.cohort == federated.quorum == federated.clients == 6
    assert jobs["buffered"].federated.concurrency == 6
    assert base.budget > 3


def test_a_job_that_cannot_be_behind_aggregators_is_refused(make_job):
    with pytest.raises(UserError, match="give --clients 4"):
        rounds_with_aggregators(make_job("federated.clients=3"))
    with pytest.raises(JobError, match="secure_aggregation"):
        rounds_with_aggregators(make_job("federated.clients=4", "federated.codec=rounded"))
