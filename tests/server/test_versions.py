"""Recorded transcripts of the link (see `recordings/record.py`) replayed against both sides.

Every supported version has a recording. In each test one side is the real implementation and the
other replays its recorded messages, so a change that breaks the wire format of a supported version
fails here.
"""

import asyncio
import base64
import json
from pathlib import Path

import grpc
import grpc.aio
import pytest
import torch
from tests.server.recordings.record import JOB, TASK

from isthmus.job import parse_job, read_job, write_job
from isthmus.task import Participant
from isthmus.transport.requests import model_of
from isthmus.transport.uplink import CHANNEL_OPTIONS, METHOD, OLDEST_VERSION, VERSION, Uplink
from isthmus.wire import link_pb2
from isthmus_clients.device.agent import Agent
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.records import RoundRecord
from isthmus_server.storage.store import Store
from isthmus_server.transport.link import Link

RECORDINGS = Path(__file__).parent / "recordings"


@pytest.fixture(params=range(OLDEST_VERSION, VERSION + 1), ids="version-{}".format)
def version(request):
    """Every version of the link that this release supports."""
    return request.param


@pytest.fixture
def recording(version):
    """The transcript of a version: pairs of the sender and the envelope."""
    lines = map(json.loads, (RECORDINGS / f"link-{version}.jsonl").read_text().splitlines())
    return [
        (line["from"], link_pb2.Envelope.FromString(base64.b64decode(line["envelope"])))
        for line in lines
    ]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    return tmp_path


class Replay:
    """Plays one side of a recording against a real other side.

    Request ids and the SHA-256 of blobs that the real side chooses replace the recorded ones in
    what is sent.
    """

    def __init__(self, call):
        self.call = call
        self.replacements = {}
        self.pending = []

    async def receive(self, recorded):
        """The real side's message of the recorded one's kind; the order of kinds may differ."""
        kind = recorded.WhichOneof("body")
        while True:
            for message in self.pending:
                if message.WhichOneof("body") == kind:
                    self.pending.remove(message)
                    self.match(kind, recorded, message)
                    return message
            message = link_pb2.Envelope.FromString(await self.call.read())
            if message.WhichOneof("body") not in ("ping", "progress"):
                self.pending.append(message)

    def match(self, kind, recorded, received):
        """Compare a message with the recorded one and note the names that replace recorded ones."""
        if kind == "request":
            old, new = recorded.request, received.request
            assert new.WhichOneof("work") == old.WhichOneof("work")
            self.replacements[old.id] = new.id
            if (model := model_of(old)) is not None:
                assert model_of(new).size == model.size
                self.replacements[model.sha256] = model_of(new).sha256
        elif kind == "reply":
            old, new = recorded.reply, received.reply
            assert new.WhichOneof("outcome") == old.WhichOneof("outcome")
            assert new.id == old.id
            self.replacements[old.trained.result.sha256] = new.trained.result.sha256
        elif kind == "pull":
            assert received.pull.sha256 == self.replaced(recorded.pull.sha256)

    def replaced(self, name):
        return self.replacements.get(name, name)

    async def send(self, recorded):
        """Send a recorded message with the real side's names."""
        message = link_pb2.Envelope.FromString(recorded.SerializeToString())
        kind = message.WhichOneof("body")
        if kind in ("reply", "progress"):
            getattr(message, kind).id = self.replaced(getattr(message, kind).id)
        elif kind == "pull":
            message.pull.sha256 = self.replaced(message.pull.sha256)
        await self.call.write(message.SerializeToString())


def test_the_current_and_at_most_the_previous_version_are_supported():
    assert VERSION - 1 <= OLDEST_VERSION <= VERSION


async def test_a_recorded_device_takes_part_in_rounds_of_a_real_server(version, recording, folder):
    link = Link(100.0)
    port = await link.start()
    store = Store.create(folder / "run", parse_job(JOB), folder)
    running = asyncio.create_task(Coordinator(RunParts.of(store, link)).run())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", CHANNEL_OPTIONS) as channel:
        device = Replay(channel.stream_stream(METHOD)())
        for sender, envelope in recording:
            if sender == "device":
                await device.send(envelope)
                continue
            message = await device.receive(envelope)
            if envelope.HasField("welcome"):
                assert message.welcome.version == version
            if envelope.HasField("receipt"):
                assert message.receipt.accepted
                assert message.receipt.id == device.replaced(envelope.receipt.id)
        final = await running
        # The server sends nothing that is not in the recording, but the receipt of the last reply.
        assert [message.WhichOneof("body") for message in device.pending] in ([], ["receipt"])
        device.call.cancel()
    ended = [(type(record), record.round) for _, record in store.ended_since(0, 9)]
    store.close()
    await link.stop()
    assert ended == [(RoundRecord, 1), (RoundRecord, 2)]
    assert final


def assert_equivalent(recorded, received):
    """Check the fields of a device's message that do not depend on the machine."""
    if recorded.HasField("hello"):
        assert received.hello.version_max == VERSION
        assert (received.hello.name, received.hello.role) == (
            recorded.hello.name,
            recorded.hello.role,
        )
    elif recorded.HasField("reply") and recorded.reply.HasField("trained"):
        expected, trained = recorded.reply.trained, received.reply.trained
        assert (trained.examples, trained.steps) == (expected.examples, expected.steps)
        assert trained.training["loss"] == pytest.approx(expected.training["loss"], rel=1e-4)
        assert trained.result.size == expected.result.size
    elif recorded.HasField("reply") and recorded.reply.HasField("opened"):
        assert received.reply.opened.examples == recorded.reply.opened.examples
    elif recorded.HasField("chunk"):
        expected, values = (
            torch.frombuffer(bytearray(message.chunk.data)[-60:], dtype=torch.float32)
            for message in (recorded, received)
        )
        assert torch.allclose(expected, values, atol=1e-5)


async def test_a_real_device_takes_part_in_rounds_of_a_recorded_server(version, recording, folder):
    done = asyncio.get_running_loop().create_future()

    async def connect(_requests, context):
        server = Replay(context)
        try:
            for sender, envelope in recording:
                if sender == "server":
                    if envelope.request.HasField("open"):
                        envelope.request.open.base = str(folder)
                    await server.send(envelope)
                elif not envelope.HasField("progress"):
                    message = await server.receive(envelope)
                    if message.HasField("hello"):
                        assert message.hello.version_min <= version <= message.hello.version_max
                    assert_equivalent(envelope, message)
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)
            raise

    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(connect)
    service = grpc.method_handlers_generic_handler("isthmus.link.v1.Link", {"Connect": handler})
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    agent = Agent(Participant(name="phone", regime="federated"), None)
    address = f"127.0.0.1:{port}"
    uplink = Uplink(address, "phone", link_pb2.CLIENT, agent, on_welcome=agent.welcomed)
    running = asyncio.create_task(uplink.run())
    try:
        async with asyncio.timeout(300):
            await done
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(0)


def test_a_job_is_sent_without_keys_that_an_earlier_release_does_not_know(recording):
    """Devices refuse unknown keys, so a job contains only the keys that it sets."""
    (opening,) = [e.request.open for _, e in recording if e.request.HasField("open")]
    job = parse_job(JOB)
    assert read_job(opening.job) == job

    def assert_keys_known(table, known):
        assert table.keys() <= known.keys()
        for key, value in table.items():
            if isinstance(value, dict) and key != "settings":
                assert_keys_known(value, known[key])

    assert_keys_known(json.loads(write_job(job)), json.loads(opening.job))
    assert read_job(write_job(job)) == job
