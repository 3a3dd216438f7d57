"""A device that protects its examples: charged before it trains, and silent about everything."""

import textwrap

import pytest
import torch

from isthmus.errors import PeerMisbehaved
from isthmus.job.federated import FederatedSection
from isthmus.job.privacy import FederatedPrivacy
from isthmus.task import Participant
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.wire import link_pb2
from isthmus_clients.device.agent import Agent
from isthmus_clients.training.examples_account import ExamplesAccount, spent_of
from isthmus_clients.training.withholding import DetailsWithheld
from isthmus_privacy.dp_sgd.device_examples import DeviceExamplesPlan

LAYOUT = TensorLayout.from_shapes({"bias": (3,), "weight": (3, 4)})
KEYS = (
    "federated.privacy.epsilon=5",
    "federated.privacy.delta=1e-3",
    "federated.privacy.participations=2",
    "federated.local_steps=3",
    "federated.batch_size=5",
)


@pytest.fixture
def device(tmp_path):
    return Agent(
        Participant(name="a", regime="federated"), None, account=ExamplesAccount(tmp_path / "state")
    )


@pytest.fixture
def opening(write_task, make_job, tmp_path):
    def opening(*overrides):
        write_task()
        job = make_job(*KEYS, *overrides).model_dump_json()
        work = link_pb2.OpenRun(run_id="run", job=job, base=str(tmp_path), layout=LAYOUT.header)
        return link_pb2.Request(id="open", open=work)

    return opening


async def train(device, progress=None, **fields):
    work = link_pb2.TrainLocal(run_id="run", round=1, attempt=1, **fields)
    request = link_pb2.Request(id="train", train_local=work)
    model = device.buffer(request, LAYOUT.nbytes)
    model[:] = LAYOUT.encode(torch.zeros(LAYOUT.size))
    return await device.work(request, model, progress or (lambda _: None))


async def test_a_plain_round_sends_an_update_and_nothing_else(device, opening):
    reply, _ = await device.work(opening(), None, None)
    assert reply.opened.examples == 1  # as all devices say
    reported = []
    reply, update = await train(device, reported.append)
    assert LAYOUT.decode(update).all()
    assert reply.trained.examples == 1
    assert dict(reply.trained.training) == {}
    assert reported == []


async def test_a_repeated_attempt_is_new_noise_and_a_new_charge(device, opening, tmp_path):
    await device.work(opening(), None, None)
    updates = [LAYOUT.decode((await train(device))[1]).clone() for _ in range(2)]
    assert not torch.equal(*updates)
    count, epsilon = spent_of(tmp_path / "state", 1e-3)[1]["run"]
    assert (count, epsilon <= 5) == (2, True)
    with pytest.raises(PeerMisbehaved, match="trained 2 times in this run, and once more would"):
        await train(device)


async def test_a_charge_is_there_before_the_training_and_after_its_failure(
    device, opening, tmp_path, monkeypatch
):
    await device.work(opening(), None, None)

    def fail(*_):
        assert spent_of(tmp_path / "state", 1e-3)[1]["run"][0] == 1
        raise RuntimeError("killed")

    monkeypatch.setattr(device.host, "train", fail)
    with pytest.raises(DetailsWithheld):
        await train(device)
    assert spent_of(tmp_path / "state", 1e-3)[1]["run"][0] == 1


async def test_the_text_of_an_exception_is_not_sent(device, opening, write_task, caplog):
    """The server chooses the model, and so perhaps which example an exception quotes."""
    request = opening()
    write_task("def loss(self, output, target):\n    raise ValueError('the patient is Ann')")
    await device.work(request, None, None)
    with pytest.raises(DetailsWithheld) as raised:
        await train(device)
    assert str(raised.value) == "the device could not do this; its own log says why"
    assert "the patient is Ann" in caplog.text


async def test_a_kept_update_is_charged_once(device, opening, tmp_path):
    buffered = ('federated.mode="buffered"', "federated.secure_aggregation=true")
    await device.work(opening(*buffered), None, None)
    await train(device, keep=True)
    assert spent_of(tmp_path / "state", 1e-3)[1]["run"][0] == 1


async def test_figures_without_noise_are_refused_and_cost_nothing(device, opening, tmp_path):
    await device.work(opening(), None, None)
    listed = [link_pb2.Candidate(of=[0])]
    score = link_pb2.Score(run_id="run", comparison=1, attempt=1, candidates=listed)
    evaluate = link_pb2.Evaluate(run_id="run", round=1, attempt=1)
    for request in (link_pb2.Request(score=score), link_pb2.Request(evaluate=evaluate)):
        model = device.buffer(request, LAYOUT.nbytes)
        with pytest.raises(PeerMisbehaved, match=r"with \[federated.privacy\], and .* no noise"):
            await device.work(request, model, None)
    with pytest.raises(PeerMisbehaved, match=r"with \[federated.privacy\], and .* no noise"):
        await train(device, gradient_scale=1.0)
    assert not (tmp_path / "state").exists()


async def test_both_kinds_of_privacy_hold_together(device, opening):
    both = ("privacy.mechanism=gaussian", "privacy.epsilon=8", "privacy.delta=1e-5")
    await device.work(opening(*both, "privacy.clip=0.01", "task.settings.lr=9.0"), None, None)
    update = LAYOUT.decode((await train(device))[1])
    assert 0.0099 < float(update.norm()) <= 0.01


def of_an_owner(tmp_path):
    """A device whose server is on another machine, with the task that was written."""
    tasks = tmp_path / "tasks"
    (tasks / "learn").mkdir(parents=True)
    (tmp_path / "task.py").rename(tasks / "learn" / "task.py")
    account = ExamplesAccount(tmp_path / "state")
    return Agent(Participant(name="a", regime="federated"), None, tasks=tasks, account=account)


SUMMED = (
    'federated.mode="buffered"',
    "federated.secure_aggregation=true",
    "task.source=learn/task.py:Learn",
)


@pytest.mark.parametrize(("batch", "fits"), [(5, True), (5000, False)])
async def test_opening_runs_does_not_tell_how_many_examples_there_are(
    opening, tmp_path, caplog, batch, fits
):
    """Fifteen runs with other sizes of batches would tell the number, without any sum."""
    request = opening(*SUMMED, f"federated.batch_size={batch}")
    device = of_an_owner(tmp_path)
    reply, _ = await device.work(request, None, None)
    assert reply.opened == link_pb2.Opened()
    reply, _ = await train(device, keep=True)
    assert reply.trained == link_pb2.Trained()
    # Zeros, which cost its examples nothing.
    assert (device._secure._kept.result is not None) == fits
    assert (tmp_path / "state").exists() == fits
    assert ("takes part in run without effect: federated.privacy" in caplog.text) != fits


async def test_the_end_of_a_budget_does_not_tell_how_many_examples_there_are(
    opening, tmp_path, caplog
):
    """With noise that a server chooses, devices with fewer examples might train less often.

    They do not train at all: a server would else have all but one spend their budgets, and the sum
    of all would be the update of that one.
    """
    table = FederatedPrivacy(epsilon=5, delta=1e-3, participations=1)
    settings = FederatedSection(batch_size=5, local_steps=3, privacy=table)
    noise = DeviceExamplesPlan.of(settings, rounds=9, examples=20).multiplier
    request = opening(*SUMMED, f"federated.privacy.noise={noise}")
    device = of_an_owner(tmp_path)
    await device.work(request, None, None)
    for _ in range(3):
        reply, _ = await train(device, keep=True)
        assert reply.trained == link_pb2.Trained()
        assert device._secure._kept.result is None
    assert not (tmp_path / "state").exists()
    assert "without effect: federated.privacy.noise=" in caplog.text


async def test_a_device_that_is_asked_more_often_than_the_job_says_refuses(opening, tmp_path):
    """The server knows how often; zeros would let it choose which devices give them."""
    request = opening(*SUMMED)
    device = of_an_owner(tmp_path)
    await device.work(request, None, None)
    for _ in range(2):
        await train(device, keep=True)
        assert device._secure._kept.result is not None
    with pytest.raises(PeerMisbehaved, match="exceed the 2 participations") as refused:
        await train(device, keep=True)
    assert refused.value.code == "examples-asked-too-often"


QUOTING = {
    "collate": """
        def collate(self, rows):
            raise ValueError('the patient is Ann')
    """,
    "local_data": """
        def local_data(self, participant):
            return float('the patient is Ann')
    """,
}


@pytest.mark.parametrize("body", QUOTING.values(), ids=QUOTING)
async def test_the_text_of_an_exception_is_not_sent_when_a_run_is_opened(
    opening, write_task, tmp_path, caplog, body
):
    """Also without secure aggregation, where the text of other failures is sent."""
    request = opening("task.source=learn/task.py:Learn")
    write_task(textwrap.dedent(body))
    with pytest.raises(DetailsWithheld) as raised:
        await of_an_owner(tmp_path).work(request, None, None)
    assert str(raised.value) == "the device could not do this; its own log says why"
    assert "the patient is Ann" in caplog.text
