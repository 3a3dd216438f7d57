"""`isthmus privacy audit` finds faults of the real steps, and has nothing against honest ones."""

import asyncio

import pytest

from isthmus_clients.training.steps import private_steps
from isthmus_privacy.dp import clipping, noisy_vector
from isthmus_privacy.dp.calibration import NoisePlan
from isthmus_privacy.dp_sgd import examples, gradients
from isthmus_server.budgets.budget import PrivacyBudget
from isthmus_simulation.audit.audit import Audit
from isthmus_simulation.virtual_time import VirtualTimeLoop

WIDER = """
def model(self):
    return nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3))

def local_data(self, participant):
    return rows(200, seed=sum(participant.name.encode()))
"""
DEVICES = ("privacy.epsilon=4.4", "privacy.delta=1e-5", "privacy.clip=0.5", "rounds=1")
EXAMPLES = (
    "federated.privacy.epsilon=6",
    "federated.privacy.delta=1e-3",
    "federated.batch_size=40",
    "federated.local_steps=10",
    "rounds=1",
)
GAUSSIAN = (*DEVICES, "privacy.mechanism=gaussian")
DISTRIBUTED = (*DEVICES, "privacy.mechanism=distributed", "federated.secure_aggregation=true")


def simulated(simulation):
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(simulation.run())


@pytest.fixture
def audit(write_task, make_job, tmp_path):
    """Audits a job of the table task."""
    write_task(WIDER)

    def run(*overrides, canaries=500, confidence=0.9999, unit=None):
        usual = (
            "federated.clients=4",
            "federated.cohort=4",
            "strategy.policy=federated",
            "simulation.processes=1",
            "simulation.training=one-by-one",
        )
        job = make_job(*usual, *overrides)
        planned = Audit(
            job, tmp_path, unit=unit, canaries=canaries, confidence=confidence, run=simulated
        )
        return planned.report()

    return run


def weaker_sum(monkeypatch):
    """Half of the noise of a server that adds it."""
    deviation = NoisePlan.deviation.fget
    monkeypatch.setattr(NoisePlan, "deviation", property(lambda plan: deviation(plan) / 2))


def weaker_shares(monkeypatch):
    """Half of the noise of each device of a secure sum."""
    add = noisy_vector.add_noise
    monkeypatch.setattr(
        noisy_vector, "add_noise", lambda out, sigma, source: add(out, sigma / 2, source)
    )


def weaker_steps(monkeypatch):
    """Half of the noise of each step on a device."""
    add = private_steps.add_noise
    monkeypatch.setattr(
        private_steps, "add_noise", lambda total, deviation: add(total, deviation / 2)
    )


def long_updates(monkeypatch):
    """Updates that are not clipped."""
    monkeypatch.setattr(clipping, "clip_to_norm", lambda vector, bound: False)


def long_gradients(monkeypatch):
    """Gradients that are not clipped."""
    clipped = gradients.clipped_sum
    monkeypatch.setattr(gradients, "clipped_sum", lambda parts, clip: clipped(parts, 1e9))


def frequent_examples(monkeypatch):
    """Examples that are in a step with three times the probability."""
    sample = examples.poisson_sample
    monkeypatch.setattr(
        examples, "poisson_sample", lambda own, probability: sample(own, 3 * probability)
    )


def repeated_examples(monkeypatch):
    """Examples that take part twice in each step that has them."""
    sample = examples.poisson_sample
    monkeypatch.setattr(
        examples, "poisson_sample", lambda own, probability: 2 * sample(own, probability)
    )


def repeated_devices(monkeypatch):
    """Devices that are asked again after the rounds that the noise was made for."""
    monkeypatch.setattr(PrivacyBudget, "allows", lambda budget, device: True)


FAULTS = [
    (weaker_sum, GAUSSIAN, 500),
    (weaker_shares, DISTRIBUTED, 1500),  # all devices are there: more noise than is counted on
    (long_updates, GAUSSIAN, 500),
    (repeated_devices, (*GAUSSIAN, "rounds=4", "privacy.participations=1"), 700),
    (weaker_steps, EXAMPLES, 700),
    (long_gradients, EXAMPLES, 700),
    (frequent_examples, EXAMPLES, 700),
    (repeated_examples, EXAMPLES, 2000),
]
"""With canaries so many that an audit in 100,000 misses the fault."""
HONEST = [
    GAUSSIAN,
    DISTRIBUTED,
    (*DEVICES, "privacy.mechanism=correlated", "rounds=3"),
    EXAMPLES,
]


@pytest.mark.parametrize(
    ("fault", "job", "canaries"), FAULTS, ids=lambda each: getattr(each, "__name__", "")
)
def test_a_fault_of_the_real_steps_is_found(audit, monkeypatch, fault, job, canaries):
    fault(monkeypatch)
    report = audit(*job, canaries=canaries)
    assert report.is_alarm
    assert report.measurement.epsilon > report.measurement.claimed
    assert "ALARM" in dict(report.lines())["verdict"]


@pytest.mark.parametrize("job", HONEST, ids=["gaussian", "distributed", "correlated", "dp-sgd"])
def test_an_honest_job_gives_no_alarm_and_is_guessed_nearly_as_often_as_it_allows(audit, job):
    found = audit(*job, canaries=1000).measurement
    assert not found.is_alarm
    assert found.epsilon <= found.claimed
    assert found.right / found.guesses > found.allowed - 0.1  # which is 0.08 above coins
