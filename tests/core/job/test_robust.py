"""Robust sums of groups that cannot be formed, or not with other settings, are refused."""

import pytest

from isthmus.errors import JobError

SECURE = "federated.secure_aggregation=true"
ROBUST = (SECURE, "federated.cohort=120", "federated.robust=median")
REFUSED = {
    "groups below the minimum": (
        (*ROBUST, "federated.robust_groups=16"),
        "robust_groups=16 of a cohort of 120 are groups of 7 devices, and the quorum of a group is "
        "10 with robust_minimum=10; raise cohort, or lower one of them",
    ),
    "two groups": ((*ROBUST, "federated.robust_groups=2"), "robust_groups=2: .* equal to 3"),
    "too many groups": (
        (*ROBUST, "federated.robust_groups=33"),
        "robust_groups=33: .* equal to 32",
    ),
    "a minimum of two": (
        (*ROBUST, "federated.robust_minimum=2"),
        "robust_minimum=2: .* equal to 3",
    ),
    "a rule for single updates": (
        (*ROBUST[:2], "federated.robust=krum"),
        "robust='krum': .*'median', 'trimmed-mean' or 'norm-bound'",
    ),
    "settings without a rule": (
        (SECURE, "federated.robust_groups=5"),
        "robust_groups has no effect without robust; remove it",
    ),
    "plain updates": (
        ("federated.secure_aggregation=false", *ROBUST[1:]),
        "secure_aggregation is off; set aggregation='median', which works on single updates",
    ),
    "declared groups": (
        (*ROBUST, "federated.groups.minimum=20"),
        "cannot be used with groups; remove one of them",
    ),
    "compression": (
        (*ROBUST, "federated.compression={}"),
        "cannot be used with compression; remove one of them",
    ),
    "buffered": (
        (*ROBUST, "federated.mode=buffered", "federated.buffer={concurrency=200}"),
        "cannot be used with mode='buffered'; remove one of them",
    ),
    "noise": (
        (*ROBUST, 'privacy={mechanism="distributed", epsilon=8.0, delta=1e-5}'),
        "privacy: federated.robust='median' sums several groups in a round",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_job_whose_groups_cannot_be_summed_is_refused(make_job, case):
    overrides, sentence = REFUSED[case]
    with pytest.raises(JobError, match=sentence):
        make_job(*overrides)


def test_groups_that_can_be_formed_are_fine(make_job):
    federated = make_job(*ROBUST, "federated.robust_groups=12").federated
    assert federated.smallest_sum == 10
