"""Rounds in which several datacenters send compressed updates."""

import pytest
import torch
from tests.server.deployment import SimulatedDatacenter
from tests.server.rounds.results import LAYOUT, read_model, training_requests

from isthmus.errors import CannotContinue, ParticipantsMissing, TaskError
from isthmus.transport.blobs import describe
from isthmus.wire import link_pb2
from isthmus_privacy.compression.block_top_k import BlockTopK
from isthmus_server.read.report.report import read_report
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.events import RoundCommitted

CODEC = BlockTopK.of(LAYOUT, 1024)
KEYS = (
    "strategy.policy=datacenter",
    "federated.clients=0",
    "datacenter.compression.keep=1024",
    "datacenter.batch_size=7",
    "rounds=3",
)
NAMES = ("dc", "east")
UPDATES = {"dc": torch.linspace(-2, 3, LAYOUT.size), "east": torch.linspace(0.1, -0.4, LAYOUT.size)}


class CompressingDatacenter(SimulatedDatacenter):
    """Sends the same update in each round, and what is left of it later."""

    def __init__(self, name):
        super().__init__(LAYOUT)
        self.update = UPDATES[name]
        self.left = {(0, 0): torch.zeros(LAYOUT.size)}
        self.sent = {}

    async def respond(self, participant, request, model):
        if request.WhichOneof("work") != "train_steps":
            return await super().respond(participant, request, model)
        self.requests.append(request)
        train = request.train_steps
        assert train.compressed
        assert train.hand_back
        assert model is not None
        about = train.round, train.attempt
        vector = self.update + self.left[train.summed_round, train.summed_attempt]
        payload = CODEC.encode(vector)
        self.left[about], self.sent[about] = vector, CODEC.decode(payload)
        result = describe(payload)
        return link_pb2.Reply(
            trained=link_pb2.Trained(result=result, examples=10, steps=50, seconds=1.0)
        ), payload


@pytest.fixture
def run_with(deployment, network):
    """A run of compressing datacenters: store, coordinator, datacenters by name."""

    async def run_with(*overrides, names=NAMES, kind=CompressingDatacenter):
        await deployment.start(names=())
        store = deployment.create_run("run", *KEYS, *overrides)
        coordinator = Coordinator(RunParts.of(store, deployment.link))
        datacenters = {name: kind(name) for name in names}
        for name, datacenter in datacenters.items():
            await network.join(name, datacenter.respond, role=link_pb2.DATACENTER)
        return store, coordinator, datacenters

    return run_with


def last_committed(datacenter):
    return [(work.summed_round, work.summed_attempt) for work in training_requests(datacenter)]


async def test_the_server_steps_on_the_mean_of_what_was_sent(run_with):
    options = "strategy.server_optimizer.options={lr=0.5}"
    store, coordinator, datacenters = await run_with(options)
    start = coordinator.model.initial()
    final = await coordinator.run()
    for round_ in range(1, 4):
        both = [datacenter.sent[round_, 1] for datacenter in datacenters.values()]
        start = start - 0.5 * (both[0] + both[1]) / 2
    torch.testing.assert_close(read_model(store.directory / final.model_path), start)
    rows = read_report(store).to_json()["rounds"]
    assert [[each["bytes_in"] for each in row["receipts"]] for row in rows] == [
        [CODEC.nbytes] * 2
    ] * 3
    for datacenter in datacenters.values():
        assert last_committed(datacenter) == [(0, 0), (1, 1), (2, 1)]


async def test_after_a_failure_and_a_restart_the_committed_round_is_named(
    run_with, deployment, network
):
    _, coordinator, _ = await run_with()
    final = await coordinator.run()
    await network.close()

    coordinator, datacenters = await run_again(deployment)
    respond = datacenters["east"].respond

    async def fail_once(participant, request, model):
        train = request.train_steps
        if (train.round, train.attempt) == (2, 1):
            raise TaskError("it is tired")
        return await respond(participant, request, model)

    for name, datacenter in datacenters.items():
        replies = fail_once if name == "east" else datacenter.respond
        await network.join(name, replies, role=link_pb2.DATACENTER)
    reopened = await deployment.run_until_killed(coordinator, RoundCommitted, 2)
    resumed = await Coordinator(RunParts.of(reopened, deployment.link)).run()
    assert resumed.model_sha256 == final.model_sha256
    assert last_committed(datacenters["dc"]) == [(0, 0), (1, 1), (1, 1), (2, 2)]


async def run_again(deployment):
    await deployment.start(names=())
    store = deployment.create_run("again", *KEYS)
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    return coordinator, {name: CompressingDatacenter(name) for name in NAMES}


async def test_one_datacenter_alone_is_refused_in_one_sentence(run_with):
    _, coordinator, datacenters = await run_with("time.join_seconds=3", names=("dc",))
    with pytest.raises(ParticipantsMissing) as refused:
        await coordinator.run()
    assert str(refused.value).startswith("datacenter.compression needs 2 datacenters")
    assert "ready: 1" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not training_requests(datacenters["dc"])


class Older(SimulatedDatacenter):
    """Does not know the job's table, as a version without the codec."""

    def __init__(self, name):
        super().__init__(LAYOUT)

    async def respond(self, participant, request, model):
        if request.HasField("open") and "compression" in request.open.job:
            raise TaskError("this version of Isthmus cannot read the job: datacenter.compression")
        return await super().respond(participant, request, model)


async def test_an_older_datacenter_is_named_with_its_reason(run_with):
    _, coordinator, _ = await run_with("time.join_seconds=3", kind=Older)
    with pytest.raises(ParticipantsMissing, match=r"dc.* declined: this version of Isthmus cannot"):
        await coordinator.run()


class WholeModels(SimulatedDatacenter):
    """Sends its new model whatever it was asked for."""

    def __init__(self, name):
        super().__init__(LAYOUT)


class Damaged(CompressingDatacenter):
    """Sends a magnitude that is not finite."""

    async def respond(self, participant, request, model):
        reply, payload = await super().respond(participant, request, model)
        if request.HasField("train_steps"):
            payload[:4] = b"\xff\xff\xff\xff"
            reply.trained.result.CopyFrom(describe(payload))
        return reply, payload


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (WholeModels, f"its compressed update has {LAYOUT.nbytes} bytes where this exchange set"),
        (Damaged, "a magnitude in its compressed update is not finite"),
    ],
)
async def test_another_result_fails_the_attempt_and_changes_nothing(run_with, kind, sentence):
    store, coordinator, _ = await run_with("attempts=1", kind=kind)
    start = coordinator.model.sha256
    with pytest.raises(CannotContinue, match=sentence) as refused:
        await coordinator.run()
    assert "\n" not in str(refused.value)
    assert coordinator.model.sha256 == start
    assert store.run_state().round == 0
