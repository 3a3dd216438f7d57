"""The noise of a budget: enough, and no more."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import JobError
from isthmus.job.privacy import PrivacySection
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
