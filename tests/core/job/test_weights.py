"""Kinds of weights: what each says of a number of examples, and who gives which."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import JobError
from isthmus.job.federated import FederatedSection
from isthmus.job.weights import agreed, weight_of

NUMBERS = st.integers(1, 1 << 42)


@given(NUMBERS)
def test_a_coarse_weight_is_the_nearest_power_of_two_by_ratio(examples):
    weight = weight_of(examples, "coarse")
    assert weight & (weight - 1) == 0
    assert weight**2 <= 2 * examples**2  # at most the square root of 2 above
    assert examples**2 <= 2 * weight**2


@given(NUMBERS)
def test_exact_and_equal_weights(examples):
    assert weight_of(examples, "exact") == examples
    assert weight_of(examples, "equal") == 1


@pytest.mark.parametrize("kind", ["exact", "coarse", "equal"])
def test_a_device_without_examples_weighs_nothing(kind):
    assert weight_of(0, kind) == 0


def test_owners_give_what_says_less_and_nothing_that_says_more():
    kinds = ["exact", "coarse", "equal"]
    for owners in kinds:
        assert agreed(None, owners) == owners
        for wanted in kinds:
            given_ = wanted if kinds.index(wanted) >= kinds.index(owners) else None
            assert agreed(wanted, owners) == given_


def test_a_job_sets_the_weights_of_all_devices():
    assert FederatedSection().weight(100) == 100
    assert FederatedSection().weight(100, "coarse") == 128
    assert FederatedSection(weights="equal").weight(100) == 1
    assert FederatedSection(weights="equal").weight(100, "coarse") == 1


def test_sums_of_equal_weights_need_no_range_of_them():
    assert FederatedSection().finds_ranges
    assert FederatedSection(clip=4.0).finds_ranges
    equal = FederatedSection(clip=4.0, weights="equal")
    assert (equal.largest_weight, equal.finds_ranges) == (1, False)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (['federated.weights="equal"', "federated.max_examples=9"], "max_examples=9 has no effect"),
        (
            ['federated.weights="coarse"', "federated.privacy={epsilon=4.0, delta=1e-5}"],
            "weights='coarse' has no effect with federated.privacy",
        ),
        (
            ['federated.weights="exact"', "federated.control_variates=8"],
            "weights='exact' has no effect with control_variates",
        ),
        (
            [
                'federated.weights="coarse"',
                'privacy={mechanism="gaussian", epsilon=4.0, delta=1e-5}',
            ],
            "federated.weights='coarse' has no effect, as every device counts the same",
        ),
        (['federated.weights="rough"'], "federated.weights='rough'"),
        (["evaluation.same_devices=true"], "evaluation.same_devices is for evaluation.devices"),
        (
            [
                "evaluation.same_devices=true",
                "evaluation.devices=8",
                "federated.secure_aggregation=false",
            ],
            "evaluation.same_devices is for evaluation.devices by secure sums",
        ),
    ],
)
def test_a_setting_without_effect_is_refused(make_job, overrides, sentence):
    with pytest.raises(JobError, match=sentence):
        make_job(*overrides)
