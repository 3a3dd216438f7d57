"""What a sum that is precise enough says of the one device whose weight has no common factor."""

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.privacy.protocol import AUTHORITY, FAR_FUTURE

from isthmus.job import parse_job
from isthmus.task import Participant
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import describe
from isthmus.wire import link_pb2
from isthmus_clients.device.active_run import ActiveRun
from isthmus_clients.device.agent import Agent
from isthmus_clients.device.secure_sessions import SecureSessions
from isthmus_privacy.purpose import TrainingPurpose
from isthmus_privacy.secagg.config import WIDE_LEVELS, RoundConfig
from isthmus_privacy.slots import TRAINING_SLOTS

COMMON = 40
VICTIM = "e"
WEIGHTS = dict.fromkeys("abcd", COMMON) | {VICTIM: COMMON - 1}
LAYOUT = TensorLayout.from_shapes({"bias": (3,), "weight": (3, 4)})
SPACING = 2.0**-24
"""Of float32 numbers from 0.5 to 1, as the elements of the model are."""
SHARES = f"""
def local_data(self, participant):
    count = {COMMON} - (participant.name == {VICTIM!r})
    return rows(count, seed=sum(participant.name.encode()))
"""
START = torch.linspace(0.55, 0.95, LAYOUT.size)


def trained(job, directory, name):
    """A device that has joined a sum, whose vector is about to be masked; and its update."""
    key = Ed25519PrivateKey.generate()
    agent = Agent(Participant(name=name, regime="federated"), None, signing_key=key)
    enrolment = AUTHORITY.enrol(name, agent.identity, not_after=FAR_FUTURE).to_bytes()
    agent.welcomed(link_pb2.Welcome(authority=AUTHORITY.public, enrolment=enrolment))
    opening = link_pb2.OpenRun(
        run_id="run", job=job.model_dump_json(), base=str(directory), layout=LAYOUT.header
    )
    agent._open(opening, None)
    model = LAYOUT.encode(START)
    config = RoundConfig(
        run_id="run",
        round=1,
        attempt=1,
        model_hash=describe(model).sha256,
        purpose=TrainingPurpose(ActiveRun.of(opening).secure_purpose).hash,
        size=LAYOUT.size,
        slots=TRAINING_SLOTS,
        clients_max=len(WEIGHTS),
        clients_min=4,
        corrupt_permille=0,
        clip=job.federated.clip,
        weight_max=job.federated.max_examples,
        bits=64,
        levels=WIDE_LEVELS,
    )
    work = link_pb2.TrainLocal(run_id="run", round=1, attempt=1, model=describe(model))
    plain = agent.host.buffer(len(model))
    plain[:] = model
    agent.host.run.train(work, plain, lambda _: None, lambda: False)
    work.secure = config.to_bytes()
    agent._train(link_pb2.Request(id="x", train_local=work), model, lambda _: None)
    return config, agent._secure._current._encoded.vector, LAYOUT.decode(plain).double()


def summed(job, directory):
    """The sum of weight x update in spacings, float64 (N), and the devices' updates in these."""
    total = 0
    updates = {}
    for name in WEIGHTS:
        config, vector, update = trained(job, directory, name)
        total = total + vector[: LAYOUT.size]
        updates[name] = update / SPACING
    centred = (2 * total - len(WEIGHTS) * (config.levels - 1)).double()
    return centred * (config.clip * config.weight_max / (config.levels - 1) / SPACING), updates


def remainder(total):
    """What the remainder of a sum modulo the other devices' weights says of the victim's update."""
    # Its weight is -1 modulo theirs.
    return torch.remainder(-total.round(), COMMON)


@pytest.fixture
def job(write_task):
    write_task(SHARES)
    settings = ["task.settings.lr=2e-6", "federated.local_steps=1", "federated.cohort=20"]
    limits = ["federated.clip=4.0", "federated.max_examples=1000"]
    return parse_job('name = "t"\n[task]\nsource = "task.py:Learn"', [*settings, *limits])


def test_the_remainder_of_a_sum_says_nothing_of_one_update(job, tmp_path):
    total, updates = summed(job, tmp_path)
    own = updates[VICTIM]
    assert 2 < own.abs().max() < COMMON / 2  # so that the remainder is all of it
    found = remainder(total) == torch.remainder(own, COMMON)
    assert float(found.double().mean()) < 0.5  # one in 40 by chance
    plain = sum(weight * updates[name] for name, weight in WEIGHTS.items())
    # Half a spacing for each device at most.
    assert 0 < float((total - plain).abs().max()) / sum(WEIGHTS.values()) < 0.5


def test_otherwise_it_is_the_update_of_one_device(job, tmp_path, monkeypatch):
    monkeypatch.setattr(SecureSessions, "exponents", lambda *_: None)
    total, updates = summed(job, tmp_path)
    assert torch.equal(remainder(total), torch.remainder(updates[VICTIM], COMMON))


def test_a_repeated_vector_is_hidden_in_the_same_way(job, tmp_path, monkeypatch):
    """Else the mean of many sums would be the update again."""
    key = Ed25519PrivateKey.generate()
    monkeypatch.setattr(Ed25519PrivateKey, "generate", lambda: key)
    first, second = (trained(job, tmp_path, "a")[1] for _ in range(2))
    assert torch.equal(first, second)
