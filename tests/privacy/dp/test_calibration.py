"""The noise of a budget: enough, and no more."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import JobError
from isthmus.job.privacy import PrivacySection
from isthmus_privacy.dp import accounting, calibration
from isthmus_privacy.dp.accounting import Composition, SampledGaussian
from isthmus_privacy.dp.calibration import NoisePlan


def section(**changes):
    return PrivacySection(**{"mechanism": "distributed", "epsilon": 8.0, "delta": 1e-6, **changes})


@settings(max_examples=10)
@given(
    mechanism=st.sampled_from(["distributed", "gaussian", "correlated"]),
    epsilon=st.floats(0.05, 50),
    delta=st.floats(1e-12, 1e-2),
    rounds=st.integers(1, 300),
)
def test_the_whole_run_is_within_its_budget_and_uses_it(mechanism, epsilon, delta, rounds):
    plan = NoisePlan.of(section(mechanism=mechanism, epsilon=epsilon, delta=delta), rounds)
    assert 0.97 * epsilon - 2e-3 <= plan.epsilon(rounds) <= epsilon


@pytest.mark.parametrize(("mechanism", "noise"), [("gaussian", 6.52935), ("distributed", 6.89304)])
def test_known_noise(mechanism, noise):
    plan = NoisePlan.of(section(mechanism=mechanism), 100)
    assert plan.multiplier == pytest.approx(noise, rel=2e-3)


def test_fewer_participations_need_less_noise():
    often, seldom = NoisePlan.of(section(), 100), NoisePlan.of(section(participations=4), 100)
    assert seldom.multiplier == pytest.approx(often.multiplier / 5, rel=1e-3)
    assert seldom.participations == 4


def test_noise_of_the_job_is_taken_as_it_is():
    assert NoisePlan.of(section(noise=2.5), 100).multiplier == 2.5


def test_correlated_noise_uses_the_separation():
    plan = NoisePlan.of(section(mechanism="correlated", separation=25), 100)
    assert plan.participations == 4
    assert plan.correlated is not None
    assert plan.correlated.gain > 2
    assert plan.epsilon(1) == plan.epsilon(100)


def test_a_budget_that_no_noise_meets_is_refused():
    with pytest.raises(JobError, match=r"would need noise of .* raise epsilon"):
        NoisePlan.of(section(epsilon=1e-3), 100_000)


@pytest.mark.parametrize(("epsilon", "delta"), [(1000.0, 0.01), (1.0, 1e-16)])
def test_extreme_budgets_last_for_all_rounds(epsilon, delta):
    """There the accountant of the ledger says more than the exact epsilon of Gaussian noise."""
    plan = NoisePlan.of(section(mechanism="gaussian", epsilon=epsilon, delta=delta), 20)
    assert 0.97 * epsilon <= plan.epsilon(20) <= epsilon


@pytest.mark.parametrize("mechanism", ["distributed", "gaussian", "correlated"])
def test_no_budget_overflows(mechanism):
    plan = NoisePlan.of(section(mechanism=mechanism, epsilon=1e18), 2)
    assert 0 < plan.multiplier < 1e-5


@pytest.mark.parametrize("mechanism", ["distributed", "gaussian", "correlated"])
def test_noise_with_which_one_round_overspends_is_refused(mechanism):
    least = NoisePlan.of(section(mechanism=mechanism), 1).multiplier
    with pytest.raises(JobError, match=r"^privacy\.noise=.* a single round exceeds epsilon=8 at"):
        NoisePlan.of(section(mechanism=mechanism, noise=0.99 * least), 1)
    enough = NoisePlan.of(section(mechanism=mechanism, noise=least), 1)
    assert enough.epsilon(1) <= 8


# Epsilon, delta, sampling probability and steps: a usual one, with known noise, a budget below what
# few orders of the divergence reach, a large one, and a single step.
SAMPLED = [
    (2.0, 1e-6, 0.01, 1000),
    (0.02, 1e-6, 0.01, 100),
    (50.0, 1e-5, 0.5, 100),
    (2.0, 1e-4, 0.01, 1),
]


@pytest.mark.parametrize(("epsilon", "delta", "probability", "steps"), SAMPLED)
def test_the_noise_of_dp_sgd_is_found_with_few_evaluations(epsilon, delta, probability, steps):
    """One of the ledger's accountant takes a second, so that a bisection by it takes many."""
    calibration._of_sampled.cache_clear()
    before = accounting._epsilon.cache_info().misses
    noise = calibration._of_sampled(epsilon, delta, probability, steps)
    assert accounting._epsilon.cache_info().misses - before <= 4
    spent = Composition().plus(SampledGaussian(noise, probability, steps)).epsilon(delta)
    assert 0.995 * epsilon <= spent <= epsilon


def test_the_known_noise_of_dp_sgd():
    """By privacy loss distributions; by Renyi differential privacy it would be 1.09387."""
    noise = calibration._of_sampled(2.0, 1e-6, 0.01, 1000)
    assert 1.02902 <= noise <= 1.02902 * 1.005
    assert calibration._of_sampled(1e-4, 1e-6, 1.0, 1000) is None


@pytest.mark.parametrize("mechanism", ["distributed", "gaussian", "correlated"])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.9])
def test_measurements_have_their_share_of_the_budget(mechanism, share):
    """All rounds and all measurements together are within the budget, and use it."""
    planned = NoisePlan.of(
        section(mechanism=mechanism, measurement_share=share), 100, measurements=20
    )
    assert planned.epsilon(100, 20) <= 8
    assert planned.epsilon(100, 20) == pytest.approx(8, rel=0.01)
    assert planned.epsilon(100) < planned.epsilon(100, 20)
    without = NoisePlan.of(section(mechanism=mechanism), 100)
    assert planned.multiplier == pytest.approx(without.multiplier / (1 - share) ** 0.5)


def test_measurements_that_no_noise_makes_private_are_refused():
    least = NoisePlan.of(section(), 1).multiplier
    with pytest.raises(JobError, match="a single round with 5 measurements exceeds"):
        NoisePlan.of(section(noise=1.01 * least), 100, measurements=5)
    with pytest.raises(JobError, match="100 rounds and 1000000000 measurements"):
        NoisePlan.of(section(epsilon=0.1), 100, measurements=10**9)
