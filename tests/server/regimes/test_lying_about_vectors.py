"""A server that has the same devices give another vector for one model: each device refuses."""

import dataclasses
import types

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.privacy.mutation import disabled
from tests.server.regimes.secure_run import LAYOUT, NAMES

from isthmus.job import vector_settings, with_changes
from isthmus.job.learning_rate import RoundPosition
from isthmus_clients.device import secure_sessions
from isthmus_clients.device.active_run import ActiveRun
from isthmus_clients.device.secure_sessions import SecureSessions
from isthmus_privacy.secagg.ranges import LADDER, Ranges
from isthmus_server.regimes import federated
from isthmus_server.regimes.base import AttemptFailed, AttemptSpec
from isthmus_server.regimes.context import FederatedContext
from isthmus_server.regimes.federated import FederatedRegime
from isthmus_server.storage.range_log import SummedRanges
from isthmus_server.storage.unmasking_log import UnmaskingLog

CODE = "another-vector-for-model"
SENTENCE = "gives no other one"


def ranges_of(largest, weight):
    """Ranges of five devices with that exponent, and that many examples."""
    exponents = [0] * 256
    exponents[largest + 127] = len(NAMES)
    weights = [0] * len(LADDER)
    weights[next(step for step, limit in enumerate(LADDER) if weight <= limit)] = len(NAMES)
    return Ranges(exponents, exponents, exponents, weights)


class Attempts:
    """Attempts of a server that chooses the ranges, the job and the position of each."""

    def __init__(self, server):
        self.server = server
        self.opened = "run", server.run.job
        self.opening = server.run.opening(server.run.job)
        self.number = 0
        self.unmaskings = UnmaskingLog()
        """What an honest server would store."""

    async def open(self, job=None, run_id="run"):
        self.opened = run_id, job or self.server.run.job
        for name in NAMES:
            self.opening = await self.server.open(name, self.opened[1], run_id)

    async def sum(
        self, *, largest=1, weight=20, round_=1, model=0.5, gradient=None, cohort=NAMES, **spec
    ):
        """The sum of one attempt, or the failed attempt.

        `gradient`: each element of a datacenter's gradient that is sent with the model.
        """
        self.number += 1
        job = self.opened[1]
        vector = torch.linspace(-model, model, LAYOUT.size)
        blob = self.server.published(vector)
        run = self.server.run
        name = blob.sha256
        if gradient is not None:
            blob = self.server.published(vector, torch.full_like(vector, gradient))
            spec.update(with_gradient=True, first_model=name)
        context = FederatedContext(
            self.server.link, job, self.opening, LAYOUT, run.directory, unmaskings=self.unmaskings
        )
        if job.finds_ranges:
            known = SummedRanges(
                round=round_,
                model_hash=name,
                group="",
                devices=frozenset(NAMES),
                ranges=ranges_of(largest, weight),
            )
            context.ranges.add(known)
        attempt = AttemptSpec(
            round=round_,
            attempt=self.number,
            model=blob,
            cohort=dict.fromkeys(cohort, 20),
            settings=job.federated,
            **spec,
        )
        return await FederatedRegime(context).train(attempt)

    async def refused(self, **changes):
        """The reasons why an attempt was refused by all devices."""
        with pytest.raises(AttemptFailed) as failed:
            await self.sum(**changes)
        reasons = [receipt.reason for receipt in failed.value.receipts]
        assert {receipt.status for receipt in failed.value.receipts} == {"rejected"}
        return reasons


@pytest.fixture
def attempts(server):
    return Attempts(server)


@pytest.mark.parametrize("changes", [{"largest": 9}, {"weight": 5000}], ids=["range", "weight"])
async def test_one_model_is_summed_in_one_encoding(attempts, changes):
    await attempts.sum()
    assert all(SENTENCE in reason for reason in await attempts.refused(**changes))
    # The ranges are made up, and not those of the devices' numbers of examples.
    with disabled(CODE), disabled("weight-not-of-ranges"):
        other = await attempts.sum(**changes)
    assert other.training["range"] != 4 or other.training["weight_max"] != 1000
    await attempts.sum()  # the first encoding is still given


IN_ORDER = """
def local_data(self, participant):
    inputs, target = rows(20, seed=sum(participant.name.encode())).tensors
    for rule, limit in self.settings["rules"].items():
        inputs = inputs.clamp(max=limit) if rule == "cap" else inputs.where(inputs < limit, 0.0)
    return TensorDataset(inputs, target)
"""


async def test_the_order_of_a_tasks_settings_is_one_of_them(attempts, server, write_task):
    """The hash of the job is the same for all devices of a sum, and another in the next one."""
    write_task(IN_ORDER)
    changes = [{"task.settings": {"rules": dict(rules)}} for rules in (RULES, RULES[::-1])]
    jobs = [with_changes(server.run.job, each) for each in changes]
    await attempts.open(jobs[0])
    await attempts.sum()
    await attempts.open(jobs[1])
    assert all(SENTENCE in reason for reason in await attempts.refused())
    await attempts.open(jobs[0])
    await attempts.sum()


RULES = [("cap", 1.5), ("drop", 1.5)]

JOBS = {
    "max_examples": {"federated.max_examples": 10},
    "clip": {"federated.clip": 0.001, "federated.max_clipped": 1.0},
    "batch size": {"federated.batch_size": 3},
    "local steps": {"federated.local_steps": 2},
    "settings of the task": {"task.settings": {"lr": 0.01}},
}


@pytest.mark.parametrize("run_id", ["run", "another"])
@pytest.mark.parametrize("changes", JOBS.values(), ids=JOBS)
async def test_one_model_is_trained_by_one_job(attempts, changes, run_id):
    """Also by an honest server, whose operator submits jobs that differ a little."""
    await attempts.open()
    await attempts.sum()
    await attempts.open(with_changes(attempts.server.run.job, changes), run_id)
    assert all(SENTENCE in reason for reason in await attempts.refused())
    with disabled(CODE):
        await attempts.sum()


async def test_a_device_that_was_started_again_refuses_too(attempts, server):
    await attempts.sum()
    for device in server.run.devices.values():
        device.agent._secure._credentials = None  # as after a restart: the history is on disk
    assert all(SENTENCE in reason for reason in await attempts.refused(largest=9))


async def test_the_position_in_a_schedule_stays_that_of_the_first_sum(attempts):
    schedule = {
        "learning_rate.schedule": "inverse_sqrt",
        "learning_rate.warmup_steps": 4,
        "federated.local_steps": 2,
    }
    await attempts.open(with_changes(attempts.server.run.job, schedule))
    await attempts.sum(position=RoundPosition(10, 5, 5))
    reasons = await attempts.refused(position=RoundPosition(20, 5, 5))
    assert all(SENTENCE in reason for reason in reasons)
    await attempts.sum(position=RoundPosition(10, 5, 5))


OWN_SCHEDULE = """
def optimizer(self, parameters, participant):
    sgd = torch.optim.SGD(parameters, lr=0.5)
    return sgd, torch.optim.lr_scheduler.StepLR(sgd, 1, 0.5)
"""


@pytest.mark.parametrize("other", [RoundPosition(12, 5, 5), RoundPosition(10, 8, 5)])
async def test_the_position_in_a_schedule_of_the_task_stays_too(attempts, other, write_task):
    """With a longer round, only devices that make several steps would give another vector."""
    write_task(OWN_SCHEDULE)
    await attempts.open(with_changes(attempts.server.run.job, {"federated.local_steps": 3}))
    first = await attempts.sum(position=RoundPosition(10, 5, 5))
    assert all(SENTENCE in reason for reason in await attempts.refused(position=other))
    with disabled(CODE):
        changed = await attempts.sum(position=other)
    assert not torch.equal(first.pseudo_gradient, changed.pseudo_gradient)
    await attempts.sum(position=RoundPosition(10, 5, 5))


async def test_without_a_schedule_an_exact_repetition_has_the_position_of_before(attempts):
    first = await attempts.sum(position=RoundPosition(10, 5, 5))
    second = await attempts.sum(exact=True, round_=2, position=RoundPosition(20, 5, 4))
    assert torch.equal(first.pseudo_gradient, second.pseudo_gradient)


async def test_another_model_may_be_trained_and_encoded_in_another_way(attempts):
    await attempts.sum()
    await attempts.sum(round_=2, model=0.25, largest=9)


async def test_the_same_model_in_a_later_round_gives_the_same_sum(attempts):
    """Devices train with the examples of the first round: a server learns nothing new."""
    await attempts.open(with_changes(attempts.server.run.job, {"federated.local_steps": 1}))
    first = await attempts.sum()
    second = await attempts.sum(round_=2)
    assert torch.equal(first.pseudo_gradient, second.pseudo_gradient)
    third = await attempts.sum(round_=3, model=0.25)
    assert not torch.equal(first.pseudo_gradient, third.pseudo_gradient)


@pytest.mark.parametrize("gradient", [0.0, 1e-30, 0.25])
@pytest.mark.parametrize("first", [None, 0.5], ids=["without", "with another"])
async def test_a_gradient_that_follows_a_model_does_not_name_it_anew(attempts, first, gradient):
    await attempts.open()
    await attempts.sum(gradient=first)
    assert all(SENTENCE in reason for reason in await attempts.refused(gradient=gradient))
    await attempts.open(run_id="another")
    fewer = {"gradient": gradient, "cohort": NAMES[:4]}
    assert all(SENTENCE in reason for reason in await attempts.refused(**fewer))
    with disabled(CODE), pytest.raises(AttemptFailed) as failed:
        await attempts.sum(**fewer)
    said = [receipt.reason for receipt in failed.value.receipts]
    assert any("only with exactly the same devices" in reason for reason in said)


async def test_named_by_its_gradient_too_a_model_gives_one_device_away(attempts, monkeypatch):
    """What that rule prevents: five devices in one run, four in another, and zeros as gradient."""
    monkeypatch.setattr(secure_sessions, "model_name", lambda run, work, _: work.model.sha256)
    monkeypatch.setattr(AttemptSpec, "name", property(lambda spec: spec.model.sha256))
    await attempts.open()
    whole = await attempts.sum(model=1.0)
    await attempts.open(run_id="another")
    fewer = await attempts.sum(model=1.0, gradient=0.0, cohort=NAMES[:4])
    run = attempts.server.run
    run.model = LAYOUT.encode(torch.linspace(-1, 1, LAYOUT.size))
    own = (await run.plain_mean(NAMES[4:])).float()
    difference = 5 * whole.pseudo_gradient - 4 * fewer.pseudo_gradient
    torch.testing.assert_close(difference, own, rtol=0, atol=1e-4)


@pytest.mark.parametrize("gradient", [None, 0.5])
async def test_a_model_and_its_gradient_are_summed_again_as_before(attempts, gradient):
    """The server's log names the model alone, so that it knows who may be asked for it."""
    await attempts.open()
    first = await attempts.sum(gradient=gradient)
    name = attempts.server.published(torch.linspace(-0.5, 0.5, LAYOUT.size)).sha256
    (entry,) = attempts.unmaskings.about("other", 9, name)
    assert entry.devices == frozenset(NAMES)
    again = await attempts.sum(gradient=gradient, exact=True, round_=2, largest=9)
    assert torch.equal(first.pseudo_gradient, again.pseudo_gradient)


async def test_a_run_that_collects_statistics_trains_nothing(attempts, monkeypatch):
    """What statistics depend on is the task alone, and nothing else may be asked as if it did."""
    collects = {"statistics.collect": True}
    other = collects | {"federated.batch_size": 3}
    job = attempts.server.run.job
    await attempts.open(with_changes(job, collects))
    with pytest.raises(AttemptFailed) as failed:
        await attempts.sum()
    reasons = {r.reason for r in failed.value.receipts if r.status == "rejected"}
    assert reasons
    assert all("statistics.collect" in reason for reason in reasons)
    monkeypatch.setattr(ActiveRun, "check_uses_models", lambda _: None)
    await attempts.sum()
    await attempts.open(with_changes(job, other))
    assert all(SENTENCE in reason for reason in await attempts.refused())
    monkeypatch.setattr(vector_settings, "vector_settings", vector_settings.statistics_settings)
    await attempts.open(with_changes(job, collects))
    first = await attempts.sum(model=0.25)
    await attempts.open(with_changes(job, other))
    second = await attempts.sum(model=0.25)
    assert not torch.equal(first.pseudo_gradient, second.pseudo_gradient)


@pytest.mark.parametrize("run_id", ["run", "another"])
async def test_the_same_vectors_are_given_again(attempts, run_id):
    await attempts.open()
    first = await attempts.sum()
    other = {"rounds": 77, "name": "renamed", "time.round_seconds": 99.0}
    await attempts.open(with_changes(attempts.server.run.job, other), run_id)
    second = await attempts.sum()
    assert torch.equal(first.pseudo_gradient, second.pseudo_gradient)


@pytest.mark.parametrize("levels", [2, 1 << 20])
async def test_a_device_refuses_coarser_rounding_than_the_ring_needs(attempts, levels, monkeypatch):
    original = federated.training_config

    def coarse(*args, **kwargs):
        return dataclasses.replace(original(*args, **kwargs), levels=levels)

    monkeypatch.setattr(federated, "training_config", coarse)
    monkeypatch.setattr(Ranges, "refusal", lambda *_, **__: "")  # an honest server would not ask
    monkeypatch.setattr(Ranges, "are_lost", lambda *_, **__: False)
    clipped = {"federated.clip": 4.0, "federated.max_clipped": 1.0}
    await attempts.open(with_changes(attempts.server.run.job, clipped))
    reasons = await attempts.refused()
    assert all(f"{levels} levels" in reason for reason in reasons)
    with disabled("encoding-not-of-job"):
        await attempts.sum()


# -- an honest server ------------------------------------------------------------------------------


async def test_an_exact_repetition_has_the_encoding_and_the_position_of_before(attempts):
    """Whatever the ranges are by then, and wherever the run is in its schedules."""
    schedule = {
        "learning_rate.schedule": "inverse_sqrt",
        "learning_rate.warmup_steps": 4,
        "federated.local_steps": 2,
    }
    await attempts.open(with_changes(attempts.server.run.job, schedule))
    first = await attempts.sum(position=RoundPosition(10, 5, 5))
    again = await attempts.sum(
        exact=True, round_=2, largest=9, weight=5000, position=RoundPosition(20, 5, 5)
    )
    assert (again.training["range"], again.training["weight_max"]) == (4, 1000)
    assert torch.equal(first.pseudo_gradient, again.pseudo_gradient)


async def test_a_sum_of_another_vector_is_not_repeated(attempts, server):
    """The server then knows that its devices can be in no sum of this model."""
    await attempts.sum()
    changes = {"federated.local_steps": 2}
    await attempts.open(with_changes(server.run.job, changes))
    await attempts.refused(exact=True)
    name = server.published(torch.linspace(-0.5, 0.5, LAYOUT.size)).sha256
    refused = {
        device
        for entry in attempts.unmaskings.about("run", 1, name)
        for device in entry.devices
        if entry.refused
    }
    assert refused == set(NAMES)


# -- rounding --------------------------------------------------------------------------------------


def test_a_device_with_an_identity_rounds_by_a_secret(server):
    """The server knows all but the identity; without one, the device is on its machine."""
    first, other = (types.SimpleNamespace(rounding=bytes([number]) * 32) for number in range(2))
    run = server.run.devices["a"].agent.host.run
    keys = [Ed25519PrivateKey.generate() for _ in range(2)]

    def seed(key, attempt, round_=1):
        return SecureSessions("a", key, None, None, 1).seed(run, round_, attempt)

    assert seed(keys[0], first) == seed(keys[0], first, round_=2)
    assert len({seed(key, attempt) for key in keys for attempt in (first, other)}) == 4
    assert seed(None, first) == seed(None, other)
