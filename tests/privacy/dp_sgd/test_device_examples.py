"""The noise of a device's own examples: enough for its participations, and no more."""

import pytest

from isthmus.errors import JobError
from isthmus.job.federated import FederatedSection
from isthmus.job.privacy import FederatedPrivacy
from isthmus_privacy.dp_sgd.device_examples import DeviceExamplesPlan


def plan_of(examples=1000, rounds=10, batch_size=32, work=None, **privacy):
    table = FederatedPrivacy(**{"epsilon": 4.0, "delta": 1e-5, **privacy})
    settings = FederatedSection(batch_size=batch_size, privacy=table, **(work or {}))
    return DeviceExamplesPlan.of(settings, rounds, examples)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("examples", [64, 5000])
def test_all_participations_use_the_budget_and_one_more_exceeds_it(epsilon, examples):
    plan = plan_of(examples, epsilon=epsilon)
    assert 0.998 * epsilon < plan.epsilon(plan.participations) <= epsilon
    assert plan.epsilon(plan.participations + 1) > epsilon


def test_steps_and_probability_are_those_of_the_device():
    epochs, steps = plan_of(1000, work={"local_epochs": 3}), plan_of(64, work={"local_steps": 7})
    assert (epochs.steps, epochs.probability) == (3 * 32, 0.032)
    assert (steps.steps, steps.probability) == (7, 0.5)


def test_fewer_participations_and_more_examples_need_less_noise():
    assert plan_of(participations=2).multiplier < plan_of().multiplier
    assert plan_of(10_000).multiplier < plan_of().multiplier


def test_the_noise_of_the_job_is_taken_as_it_is():
    plan = plan_of(noise=3.0)
    assert plan.multiplier == 3.0
    assert plan.epsilon(10) < 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"examples": 31}, r"batch_size=32 is more than the number of examples .* 31"),
        ({"delta": 1e-3}, r"delta=0.001 is not below 1 / examples, with .* 1000.*use 0.0001"),
        ({"epsilon": 1e-3}, r"epsilon=0.001 .* in 10 participations of 32 steps would need noise"),
        ({"noise": 0.3}, r"noise=0.3 is too little: a single participation of 32 steps has"),
    ],
)
def test_what_does_not_fit_is_refused(changes, reason):
    with pytest.raises(JobError, match=reason):
        plan_of(**changes)
