"""Plaintext rounds whose updates are encoded by the job's codec."""

import pytest
import torch
from tests.server.regimes.replies import LAYOUT
from tests.server.regimes.test_plaintext import PreparedAttempt

from isthmus.errors import TaskError
from isthmus.transport.blobs import describe
from isthmus.wire import link_pb2
from isthmus_privacy.compression.shipped_codecs import RoundedUpdate
from isthmus_privacy.compression.single_updates import UpdateMessages
from isthmus_server.storage.records import Participants


@pytest.fixture
def prepare(network, make_job, tmp_path):
    """Prepare an attempt of two devices with a codec, and what encodes their updates."""

    async def prepare(*overrides):
        await network.listen()
        job = make_job("federated.cohort=2", "federated.codec=rounded", *overrides)
        return PreparedAttempt(network, job, LAYOUT, tmp_path), UpdateMessages.of(job, LAYOUT)

    return prepare


def sending(message, examples=10):
    async def respond(participant, request, model):
        trained = link_pb2.Trained(result=describe(message), examples=examples, steps=1)
        return link_pb2.Reply(trained=trained), bytearray(message)

    return respond


@pytest.mark.parametrize("rule", ["mean", "norm-bound", "median"])
async def test_decoded_updates_are_aggregated(prepare, network, rule):
    settings = "{norm=100.0}" if rule == "norm-bound" else "{}"
    attempt, messages = await prepare(
        f"federated.aggregation={rule}", f"federated.aggregation_settings={settings}"
    )
    sent = {"a": torch.tensor([1.0, -2.0, 3.0]), "b": torch.tensor([4.0, 5.0, -6.0])}
    encoded = {name: messages.encode(vector.clone(), 1) for name, vector in sent.items()}
    weights = {"a": 10, "b": 20}
    for name, message in encoded.items():
        await network.join(name, sending(message, weights[name]))
    result = await attempt.run("a", "b", examples=20)
    a, b = (messages.decode(memoryview(encoded[name]), 1) for name in "ab")
    expected = (a + b) / 2 if rule == "median" else (10 * a + 20 * b) / 30
    torch.testing.assert_close(result.pseudo_gradient, expected)
    assert [receipt.bytes_in for receipt in result.receipts] == [len(encoded["a"])] * 2


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda message: message + bytes(5), "its encoded update has"),
        (
            lambda message: bytes([message[0] ^ 1]) + message[1:],
            "it is not an encoded update of this exchange set",
        ),
        (lambda message: message[:-1], "federated.codec='rounded' cannot decode it: a change of"),
    ],
)
async def test_other_bytes_are_rejected_and_the_others_aggregated(
    prepare, network, wrong, sentence
):
    attempt, messages = await prepare("federated.cohort=3", "federated.quorum=2")
    message = messages.encode(torch.tensor([1.0, 2.0, 3.0]), 1)
    await network.join("a", sending(message))
    await network.join("b", sending(message))
    await network.join("bad", sending(wrong(message)))
    result = await attempt.run("bad", "a", "b")
    assert Participants.of(result.receipts).accepted == 2
    assert result.receipts[0].reason.startswith(sentence)
    torch.testing.assert_close(
        result.pseudo_gradient, messages.decode(memoryview(message), 1), rtol=1e-6, atol=1e-6
    )


async def test_a_run_with_a_codec_ends_near_one_without(deployment, tmp_path):
    await deployment.start()
    plain = ("federated.secure_aggregation=false", "rounds=2")
    exact, _ = await deployment.run("exact", *plain)
    rounded, _ = await deployment.run("rounded", *plain, "federated.codec=rounded")
    losses = [report["rounds"][-1]["metrics"]["loss"] for report in (exact, rounded)]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    assert losses[0] != losses[1]


async def test_a_codec_is_constructed_once_for_a_run(deployment, monkeypatch):
    await deployment.start()
    constructed = []
    construct = RoundedUpdate.__init__

    def counted(codec, federated):
        constructed.append(codec)
        construct(codec, federated)

    monkeypatch.setattr(RoundedUpdate, "__init__", counted)
    await deployment.run("run", "federated.secure_aggregation=false", "federated.codec=rounded")
    assert len(constructed) == 4  # by three devices and the server, for three rounds


async def test_a_device_without_the_codec_refuses_the_run(deployment, monkeypatch):
    await deployment.start()

    def missing(job, layout):
        raise TaskError("federated.codec='rounded' is unknown; installed are none")

    monkeypatch.setattr("isthmus_clients.device.active_run._messages", missing)
    with pytest.raises(Exception, match="is unknown; installed are none"):
        await deployment.run(
            "run",
            "federated.secure_aggregation=false",
            "federated.codec=rounded",
            "time.join_seconds=3",
        )
