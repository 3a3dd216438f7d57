"""What a sum that is precise enough says of the one device whose weight has no common factor."""

import dataclasses

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
from isthmus_privacy.compression.update_codec import UpdateCodec, value_of
from isthmus_privacy.purpose import TrainingPurpose
from isthmus_privacy.secagg.config import WIDE_LEVELS, RoundConfig
from isthmus_privacy.secagg.spacing import DIGITS_OF
from isthmus_privacy.slots import COMPRESSED_SLOTS, PRIVATE_SLOTS, TRAINING_SLOTS

COMMON = 40
VICTIM = "e"
WEIGHTS = dict.fromkeys("abcd", COMMON) | {VICTIM: COMMON - 1}
LAYOUT = TensorLayout.from_shapes({"bias": (3,), "weight": (3, 4)})
WITH_STATISTICS = TensorLayout.from_shapes(
    {"0.bias": (3,), "0.weight": (3, 4)}
    | {f"1.{name}": (3,) for name in ("bias", "running_mean", "running_var", "weight")},
    ["1.running_mean", "1.running_var"],
)
SPACING = 2.0**-24
"""Of float32 numbers from 0.5 to 1, as the elements of the model are."""
SHARES = f"""
def local_data(self, participant):
    count = {COMMON} - (participant.name == {VICTIM!r})
    return rows(count, seed=sum(participant.name.encode()))
"""
STATISTICS = """
def model(self):
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=1e-5))
"""
ONE_HOT = f"""
def local_data(self, participant):
    count = {COMMON} - (participant.name == {VICTIM!r})
    chance = torch.Generator().manual_seed(sum(participant.name.encode()))
    features, labels = (torch.randint(0, most, (count,), generator=chance) for most in (4, 3))
    return TensorDataset(torch.eye(4)[features], labels)
"""
ONE_STEP = ["task.settings.lr=2e-6", "federated.local_steps=1", "federated.cohort=20"]
WEIGHTED = [*ONE_STEP, "federated.clip=4.0", "federated.max_examples=1000"]
COMPRESSED = [
    *ONE_STEP,
    "federated.clip=1e-4",
    f"federated.max_examples={COMMON}",
    "federated.compression={one_in=1}",
]
NORMALISED_STEPS = [
    *WEIGHTED[3:],
    "federated.cohort=20",
    "federated.batch_size=40",
    "federated.local_epochs=100",
    "federated.normalized_steps=1",
    "task.settings.lr=1e-6",
]
HALF = [*ONE_STEP, *WEIGHTED[3:], "task.settings.lr=0.0009765625", "federated.batch_size=40"]
BOUNDED = [
    # Each device makes a step for each of its examples, and its update is divided by their number.
    "federated.cohort=20",
    "federated.batch_size=1",
    f"federated.normalized_steps={COMMON}",
    "task.settings.lr=5e-8",
    'privacy={mechanism="gaussian", epsilon=8.0, delta=1e-5, clip=1e-4}',
]


def config_of(job, opening, model, layout):
    """The configuration of a sum of `WEIGHTS`, as a server chooses it."""
    config = RoundConfig(
        run_id="run",
        round=1,
        attempt=1,
        model_hash=describe(model).sha256,
        purpose=TrainingPurpose(ActiveRun.of(opening).secure_purpose).hash,
        size=layout.size,
        slots=TRAINING_SLOTS,
        clients_max=len(WEIGHTS),
        clients_min=4,
        corrupt_permille=0,
        clip=job.federated.clip or job.privacy.clip,
        weight_max=job.federated.max_examples or 1,
        bits=64,
        levels=WIDE_LEVELS,
    )
    if job.federated.compression is not None:  # in the first round
        codec = UpdateCodec(one_in=1, bits=24, seed=job.seed)
        ring = codec.ring_bits(len(WEIGHTS))
        slots = COMPRESSED_SLOTS
        return dataclasses.replace(
            config, codec=codec, bits=ring, levels=codec.highest, slots=slots
        )
    if job.privacy is not None:
        return dataclasses.replace(config, bits=32, levels=0, slots=PRIVATE_SLOTS)
    return config


def trained(job, directory, name, layout=LAYOUT, values=None):
    """A device that has joined a sum, whose vector is about to be masked; and its update."""
    key = Ed25519PrivateKey.generate()
    agent = Agent(Participant(name=name, regime="federated"), None, signing_key=key)
    enrolment = AUTHORITY.enrol(name, agent.identity, not_after=FAR_FUTURE).to_bytes()
    agent.welcomed(link_pb2.Welcome(authority=AUTHORITY.public, enrolment=enrolment))
    opening = link_pb2.OpenRun(
        run_id="run", job=job.model_dump_json(), base=str(directory), layout=layout.header
    )
    agent._open(opening, None)
    model = layout.encode(torch.linspace(0.55, 0.95, layout.size) if values is None else values)
    config = config_of(job, opening, model, layout)
    work = link_pb2.TrainLocal(run_id="run", round=1, attempt=1, model=describe(model))
    plain = agent.host.buffer(len(model))
    plain[:] = model
    agent.host.run.train(work, plain, lambda _: None, lambda: False)
    work.secure = config.to_bytes()
    agent._train(link_pb2.Request(id="x", train_local=work), model, lambda _: None)
    return config, agent._secure._current._encoded.vector, layout.decode(plain).double()


def summed(job, directory, layout=LAYOUT, values=None):
    """The sum of weight x update in spacings, float64 (N), and the devices' updates in these."""
    total = 0
    updates = {}
    for name in WEIGHTS:
        config, vector, update = trained(job, directory, name, layout, values)
        total = total + vector[: layout.size].to(torch.int64)
        updates[name] = update / SPACING
    if config.codec is not None:
        values = value_of(total, len(WEIGHTS), config.clip, config.codec.levels)
    else:
        centred = (2 * total - len(WEIGHTS) * (config.levels - 1)).double()
        values = centred * (config.clip / (config.levels - 1))
    return values * (config.weight_max / SPACING), updates


def remainder(total):
    """What the remainder of a sum modulo the other devices' weights says of the victim's update."""
    # Its weight is -1 modulo theirs.
    return torch.remainder(-total.round(), COMMON)


def remainder_of_means(total):
    """The same for updates divided by numbers of steps, of which the victim has made one less."""
    return torch.remainder((total * (COMMON - 1)).round(), COMMON - 1)


@pytest.fixture
def parse(write_task):
    def parse(*settings, methods=""):
        write_task(SHARES + methods)
        return parse_job('name = "t"\n[task]\nsource = "task.py:Learn"', settings)

    return parse


@pytest.fixture
def job(parse):
    return parse(*WEIGHTED)


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


@pytest.mark.parametrize("hidden", [True, False])
def test_nor_does_that_of_compressed_updates(parse, tmp_path, monkeypatch, hidden):
    """The first sum of a job, before a magnitude is known, has as many levels as its ring."""
    if not hidden:
        monkeypatch.setattr(SecureSessions, "exponents", lambda *_: None)
    total, updates = summed(parse(*COMPRESSED), tmp_path)
    found = remainder(total) == torch.remainder(updates[VICTIM], COMMON)
    share = float(found.double().mean())
    assert share < 0.5 if hidden else share == 1


@pytest.mark.parametrize("hidden", [True, False])
def test_nor_does_that_of_running_statistics(parse, tmp_path, monkeypatch, hidden):
    """Which are not divided by the number of steps, as parameters are."""
    if not hidden:
        monkeypatch.setattr(SecureSessions, "exponents", lambda *_: None)
    job = parse(*NORMALISED_STEPS, methods=STATISTICS)
    found = []
    # There are six, and three of them have the right remainder by chance once in 3,000 runs.
    for number in range(4 if hidden else 1):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "task.py").write_bytes((tmp_path / "task.py").read_bytes())
        total, updates = summed(job, tmp_path / str(number), WITH_STATISTICS)
        own = updates[VICTIM][WITH_STATISTICS.trained_size :]
        assert own.abs().min() > COMMON
        found.append(remainder(total)[-len(own) :] == torch.remainder(own, COMMON))
    share = float(torch.cat(found).double().mean())
    assert share < 0.5 if hidden else share == 1


@pytest.mark.parametrize("hidden", [True, False])
def test_nor_does_that_of_updates_of_bounded_norms(parse, tmp_path, monkeypatch, hidden):
    """All weights are 1 with [privacy], and updates still have factors of their own."""
    if not hidden:
        monkeypatch.setattr(SecureSessions, "exponents", lambda *_: None)
    total, updates = summed(parse(*BOUNDED), tmp_path)
    own = (updates[VICTIM] * (COMMON - 1) / COMMON).round()
    assert 2 < own.abs().max() < COMMON / 2
    found = remainder_of_means(total) == torch.remainder(own, COMMON - 1)
    share = float(found.double().mean())
    assert share < 0.5 if hidden else share == 1


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("hidden", [True, False])
def test_nor_does_that_of_updates_in_half_precision(
    parse, tmp_path, monkeypatch, precision, hidden
):
    """Those of parameters that were 0 have no more digits than the gradients."""
    if not hidden:
        monkeypatch.setattr(SecureSessions, "exponents", lambda *_: None)
    job = parse(*HALF, f"federated.precision={precision}")
    total, updates = summed(job, tmp_path, values=torch.zeros(LAYOUT.size))
    least = torch.stack([update.abs() for update in updates.values()]).min(0).values
    unit = torch.exp2(torch.frexp(least).exponent.double() - DIGITS_OF[precision])
    own = updates[VICTIM] / unit
    assert torch.equal(own, own.round())
    found = remainder(total / unit) == torch.remainder(own, COMMON)
    share = float(found.double().mean())
    assert share < 0.5 if hidden else share == 1


def test_that_of_updates_of_few_values_is_the_update_of_one_device(parse, tmp_path):
    """What does not hide them, as the threat model says: whole multiples of one large number."""
    rate = 0.1
    job = parse(*WEIGHTED, f"task.settings.lr={rate}", "federated.batch_size=10", methods=ONE_HOT)
    total, updates = summed(job, tmp_path, values=torch.zeros(LAYOUT.size))
    # From zeros, each of the three classes has the same probability.
    unit = rate / (3 * 10) / SPACING
    own = (updates[VICTIM] / unit).round()
    assert 0 < own.abs().max() < COMMON / 2
    assert torch.equal(remainder(total / unit), torch.remainder(own, COMMON))


def test_a_repeated_vector_is_hidden_in_the_same_way(job, tmp_path, monkeypatch):
    """Else the mean of many sums would be the update again."""
    key = Ed25519PrivateKey.generate()
    monkeypatch.setattr(Ed25519PrivateKey, "generate", lambda: key)
    first, second = (trained(job, tmp_path, "a")[1] for _ in range(2))
    assert torch.equal(first, second)
