"""`isthmus privacy audit` finds faults of the real steps, and has nothing against honest ones."""

import asyncio
import itertools
import math

import pytest
from tests.simulation import audit_faults as faults

from isthmus.errors import UserError
from isthmus.task import load_task
from isthmus_clients.training.examples_account import ExamplesAccount
from isthmus_privacy.dp.accounting import Gaussian, SampledGaussian
from isthmus_privacy.dp.auditing import Claim
from isthmus_simulation.audit.audit import Audit
from isthmus_simulation.audit.membership import membership_run, report_of
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
SURE = 1 - 1e-9
"""Confidence of audits of honest jobs, as at the usual one some of 10,000 raise an alarm."""
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


FAULTS = [
    (faults.weaker_sum, GAUSSIAN, 800),
    (faults.weaker_shares, DISTRIBUTED, 1900),  # all devices are there: more noise than is promised
    (faults.long_updates, GAUSSIAN, 800),
    (faults.repeated_devices, (*GAUSSIAN, "rounds=4", "privacy.participations=1"), 700),
    (faults.repeated_noise, (*GAUSSIAN, "rounds=2"), 100),
    (faults.partial_noise, GAUSSIAN, 700),
    (faults.round_without_noise, (*GAUSSIAN, "rounds=8"), 100),
    (faults.weaker_steps, EXAMPLES, 1100),
    (faults.repeated_steps, EXAMPLES, 300),
    (faults.step_without_noise, (*EXAMPLES, "federated.batch_size=100"), 3000),
    (faults.long_gradients, EXAMPLES, 1900),
    (faults.unlimited_devices, (*EXAMPLES, "rounds=4", "federated.privacy.noise=0.85"), 1500),
    (faults.frequent_examples, EXAMPLES, 1100),
    (faults.repeated_examples, EXAMPLES, 2000),
]
"""With canaries so many that an audit in 10^8 misses the fault: noise has no seed."""
HONEST = [
    GAUSSIAN,
    DISTRIBUTED,
    (*DEVICES, "privacy.mechanism=correlated", "rounds=3"),
    EXAMPLES,
]


@pytest.mark.parametrize(
    ("fault", "job", "canaries"), FAULTS, ids=lambda each: getattr(each, "__name__", "")
)
def test_a_fault_of_the_real_steps_is_found(audit, fault, job, canaries):
    with fault():
        report = audit(*job, canaries=canaries)
    assert report.measurement.is_alarm
    if fault not in (faults.frequent_examples, faults.repeated_examples):  # another mechanism
        assert report.measurement.epsilon > report.measurement.claimed
    assert "ALARM" in dict(report.lines())["verdict"]


def test_layers_that_are_each_clipped_to_the_bound_of_the_whole_are_found(audit, write_task):
    """Each canary has some elements of every large layer."""
    write_task(WIDER.replace("64", "512"))
    with faults.layers_clipped():
        assert audit(*EXAMPLES, canaries=2000).measurement.is_alarm


@pytest.mark.parametrize("job", HONEST, ids=["gaussian", "distributed", "correlated", "dp-sgd"])
def test_an_honest_job_gives_no_alarm_and_is_guessed_nearly_as_often_as_it_allows(audit, job):
    report = audit(*job, canaries=1500, confidence=SURE)
    found = report.measurement
    assert not report.is_alarm
    assert found.epsilon <= found.claimed
    assert found.right / found.guesses > found.allowed - 0.1  # which is 0.08 above coins


def test_a_budget_that_the_noise_was_not_made_for_is_an_alarm(audit):
    """The budget alone would ask nobody, so both are out of order here."""
    with faults.too_little_noise(), faults.repeated_devices():
        report = audit(*GAUSSIAN, canaries=100)
    assert report.is_over_budget
    assert report.is_alarm
    assert "more than the budget of 4.4" in dict(report.lines())["verdict"]


def test_a_ledger_that_charges_too_little_is_an_alarm(audit):
    with faults.small_charges():
        report = audit(*GAUSSIAN, "rounds=2", canaries=100)
    assert report.undercharged is not None
    assert report.is_alarm
    assert "a ledger has an epsilon of" in dict(report.lines())["verdict"]


def test_a_ledger_that_charges_one_device_for_all_is_an_alarm(audit):
    with faults.charged_to_one():
        report = audit(*GAUSSIAN, canaries=100)
    assert report.undercharged is not None
    assert "a ledger has an epsilon of 0.000" in dict(report.lines())["verdict"]


def test_a_few_more_rounds_than_the_noise_was_made_for_are_an_alarm(audit):
    """Six in place of four hardly change how many guesses are right."""
    with faults.repeated_devices():
        report = audit(*GAUSSIAN, "rounds=6", "privacy.participations=4", canaries=100)
    assert report.repeated == (6, 4)
    assert report.is_alarm
    assert "one device took part 6 times" in dict(report.lines())["verdict"]


def test_examples_that_take_part_after_their_budget_is_spent_are_an_alarm(audit):
    """Also where too few guesses are made to find it by these, which is a matter of chance."""
    with faults.unlimited_devices():
        report = audit(*EXAMPLES, "rounds=4", "federated.privacy.noise=0.85", canaries=100)
    times, claimed = report.repeated
    assert times == 4 > claimed
    assert report.is_alarm


def test_a_device_that_does_not_charge_what_it_trains_is_an_alarm(audit, monkeypatch):
    monkeypatch.setattr(ExamplesAccount, "charge", lambda *_: None)
    report = audit(*EXAMPLES, canaries=100)
    assert report.undercharged is not None
    assert "a ledger has an epsilon of 0.000" in dict(report.lines())["verdict"]


# -- what is claimed and what is allowed ----------------------------------------------------------


def test_devices_that_are_asked_in_some_rounds_are_compared_with_what_those_cost(audit):
    """A cohort that rotates asks no canary in all rounds: then fewer guesses are right."""
    rotating = ("rounds=6", "federated.clients=40", "federated.cohort=8")
    found = audit(*GAUSSIAN, *rotating, canaries=300, confidence=SURE).measurement
    assert found.allowed < Claim(Gaussian(1.0), 1, 1e-5).right() - 0.05
    assert not found.is_alarm


def test_weaker_noise_of_devices_that_are_asked_in_some_rounds_is_found(audit):
    rotating = ("rounds=2", "federated.clients=40", "federated.cohort=20")
    with faults.weaker_sum():
        assert audit(*GAUSSIAN, *rotating, canaries=1200).measurement.is_alarm


def test_the_claim_of_a_job_with_its_own_noise_ends_with_its_budget(audit):
    """The ledger ends a run of ten rounds after those that the budget allows."""
    own = ("privacy.noise=2.1", "privacy.epsilon=4.4", "rounds=10")
    report = audit(*GAUSSIAN, *own, canaries=100, confidence=SURE)
    assert report.measurement.claimed <= 4.4
    assert "for 4 rounds of a device" in report.mechanism
    assert not report.is_alarm


def test_examples_of_attempts_that_fail_count_for_what_is_claimed(audit):
    """A job may leave room for them; what their steps reveal was charged."""
    failing = ("federated.quorum=4", "simulation.dropout=0.3", "attempts=30")
    participations = "federated.privacy.participations=16"
    report = audit(*EXAMPLES, participations, *failing, canaries=720, confidence=SURE)
    assert "for 16 x 10 steps" in report.mechanism
    assert not report.is_alarm


def test_a_bound_that_holds_whatever_is_wrong_is_at_most_that_of_any_mechanism():
    """More guesses are right than without any noise: the sampling is wrong, who knows how."""
    sampled = Claim(SampledGaussian(1.0, 0.1, 3), times=1, delta=1e-5)
    assert sampled.right(64.0) < 0.7
    found = sampled.measured(right=800, guesses=1000, confidence=0.9999)
    assert found.is_alarm
    assert (
        found.epsilon
        == found.least
        == pytest.approx(math.log((found.probability - 1e-5) / (1 - found.probability)))
    )
    gaussian = Claim(Gaussian(1.0), times=1, delta=1e-5)
    found = gaussian.measured(right=800, guesses=1000, confidence=0.9999)
    assert found.least < found.epsilon < gaussian.epsilon(2.0)
    assert gaussian.measured(right=510, guesses=1000, confidence=0.9999).least == 0


def test_shares_of_the_participations_allow_fewer_right_guesses():
    claim = Claim(Gaussian(2.0), times=4, delta=1e-5)
    of_one = Claim(Gaussian(2.0), times=1, delta=1e-5)
    assert claim.right(1.0, {0.25: 10}) == pytest.approx(of_one.right())
    assert claim.right(1.0, {0.25: 10, 1.0: 10}) == pytest.approx(
        (of_one.right() + claim.right()) / 2
    )
    sampled = Claim(SampledGaussian(1.0, 0.1, 5), times=4, delta=1e-5)
    assert sampled.right(1.0, {0.5: 1}) == Claim(sampled.event, 2, 1e-5).right()
    # A third of the participations counts as a half: that excludes less, and gives no alarm.
    assert sampled.right(1.0, {0.3: 1}) == sampled.right(1.0, {0.5: 1})


# -- models and data ------------------------------------------------------------------------------

TINY = """
def model(self):
    return nn.Linear(1, 1)

def local_data(self, participant):
    inputs = torch.randn(60, 1)
    return TensorDataset(inputs, 3 * inputs[:, 0])

def loss(self, output, target):
    return (output[:, 0] - target) ** 2

def metrics(self, output, target):
    return {}

def eval_data(self):
    return None
"""
HALF = """
def model(self):
    return nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3)).bfloat16()

def forward(self, model, inputs):
    return model(inputs.bfloat16()).float()

def local_data(self, participant):
    return rows(200, seed=sum(participant.name.encode()))
"""
FROZEN = """
def model(self):
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 500), nn.Linear(500, 3))
    model[2:].requires_grad_(False)
    return model

def local_data(self, participant):
    return rows(200, seed=sum(participant.name.encode()))
"""
TIED = """
def model(self):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    model[1].weight = model[0].weight
    return model

def local_data(self, participant):
    return rows(200, seed=sum(participant.name.encode()))
"""
ODD = """
def model(self):
    return nn.Linear(4, 3)

def local_data(self, participant):
    inputs, labels = rows(200, seed=sum(participant.name.encode())).tensors
    return [{"x": x.tolist(), "label": "abc"[int(y)]} for x, y in zip(inputs, labels)]

def collate(self, rows):
    return {"x": [torch.tensor([each["x"] for each in rows])], "y": [row["label"] for row in rows]}

def inputs_and_target(self, batch):
    return batch["x"], batch["y"]

def forward(self, model, inputs):
    return {"scores": model(inputs[0])}

def loss(self, output, target):
    numbers = torch.tensor(["abc".index(each) for each in target])
    return nn.functional.cross_entropy(output["scores"], numbers, reduction="none")

def metrics(self, output, target):
    return {}

def eval_data(self):
    return None
"""


@pytest.mark.parametrize("task", [TINY, HALF, FROZEN, TIED, ODD])
@pytest.mark.parametrize("job", [GAUSSIAN, EXAMPLES], ids=["device", "example"])
def test_models_and_data_of_all_kinds_are_audited(audit, write_task, task, job):
    write_task(task)
    few = ("federated.batch_size=20", "federated.local_steps=3")
    report = audit(*job, *few, canaries=60, confidence=SURE)
    found = report.measurement
    assert not report.is_alarm
    assert found.guesses >= 60


def test_each_canary_is_in_what_is_trained_where_most_of_a_model_is_frozen(audit, write_task):
    write_task(FROZEN)
    with faults.no_steps_noise():
        found = audit(*EXAMPLES, "federated.batch_size=100", canaries=1400).measurement
    # What others contribute hides some, in most runs a tenth and in some a fifth: this is the mean
    # of four. Of canaries in frozen layers half would be guessed.
    assert found.right / found.guesses > 0.6


# -- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "canaries", "sentence"),
    [
        ((*GAUSSIAN, "privacy.epsilon=500"), 100, "not even 1,000,000 canaries could find"),
        (GAUSSIAN, 10, "nothing could be found; at least 26 are needed"),
        (GAUSSIAN, 1_000_000, "200 runs for 102,400; lower --canaries"),
    ],
)
def test_an_audit_that_could_find_nothing_is_refused(audit, overrides, canaries, sentence):
    with pytest.raises(UserError, match=sentence):
        audit(*overrides, canaries=canaries)


def test_a_refusal_has_all_digits_of_the_confidence(audit):
    with pytest.raises(UserError, match=r"with confidence 99\.9999999 %, and"):
        audit(*GAUSSIAN, canaries=10, confidence=SURE)


# -- without noise --------------------------------------------------------------------------------

MEMORISED = """
def model(self):
    return nn.Sequential(nn.Linear(40, 256), nn.ReLU(), nn.Linear(256, 2))

def local_data(self, participant):
    return noise(40, seed=1 + participant.shard[0])

def eval_data(self):
    return noise(200, seed=0)
"""
RANDOM_LABELS = """

def noise(count, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 40, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 2, (count,), generator=generator))
"""


@pytest.fixture
def membership(write_task, make_job, tmp_path):
    """What membership inference gets from a run that learns labels by heart."""
    path = write_task(MEMORISED)
    path.write_text(path.read_text() + RANDOM_LABELS)
    numbers = itertools.count()

    def run(*overrides):
        usual = (
            "federated.clients=4",
            "federated.cohort=4",
            "strategy.policy=federated",
            "simulation.processes=1",
            "simulation.training=one-by-one",
            "rounds=12",
            "federated.batch_size=20",
            "federated.local_steps=30",
            "task.settings.lr=0.2",
        )
        job = make_job(*usual, *overrides)
        simulation = membership_run(job, tmp_path, tmp_path / f"run-{next(numbers)}")
        simulated(simulation)
        task = load_task(job.task.source, job.task.settings, base=tmp_path)
        return report_of(simulation, task, job.federated.clients, 0.9999)

    return run


def test_what_was_learned_by_heart_is_found_by_its_loss(membership):
    report = membership()
    assert report.example.area > 0.7
    assert report.device.area > 0.65


def test_what_was_learned_with_noise_is_not_found_by_its_loss(membership):
    private = ("federated.privacy.epsilon=1", "federated.privacy.delta=1e-3")
    # The noise has no seed: one area deviates by 0.05, and is 0.85 without noise.
    areas = [membership(*private).example.area for _ in range(4)]
    assert abs(sum(areas) / 4 - 0.5) < 0.15


def test_the_sums_of_random_groups_are_attacked_and_not_their_median(membership):
    """What is opened is a sum of three devices, which says more than a median of four groups."""
    robust = (
        "federated.secure_aggregation=true",
        "federated.clients=12",
        "federated.cohort=12",
        "federated.robust=median",
        "federated.robust_groups=4",
        "federated.robust_minimum=3",
        "rounds=6",
    )
    assert membership(*robust).device.area > 0.9


def test_a_device_that_is_alone_in_a_sum_is_always_found(audit):
    # A coin in each round: all of them fall on one side once in 10^8 runs.
    report = audit("federated.clients=1", "federated.cohort=1", "rounds=28")
    assert report.right == 28
    assert report.epsilon > 0.5
