"""Version N - 1 of the link, as it was recorded (see `recordings/record.py`), with ours of today.

One side is the real thing; the other says what it said then, and may say nothing else.
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
from isthmus.requests import model_of
from isthmus.task import Participant
from isthmus.uplink import CHANNEL_OPTIONS, METHOD, OLDEST_VERSION, VERSION, Uplink
from isthmus.wire import link_pb2
from isthmus_clients.agent import Agent
from isthmus_server.coordinator import Coordinator
from isthmus_server.link import Link
from isthmus_server.store import Store

BEFORE = VERSION - 1


@pytest.fixture
def recorded():
    """Who spoke, and the envelope."""
    path = Path(__file__).parent / f"recordings/link-{BEFORE}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        (line["from"], link_pb2.Envelope.FromString(base64.b64decode(line["envelope"])))
        for line in lines
    ]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    return tmp_path


class Actor:
    """One side of a recording, played to the other; names that the other side draws are its own."""

    def __init__(self, call):
        self.call = call
        self.names = {}
        self.unheard = []

    async def hear(self, recorded):
        """The other side's message in the place of a recorded one, whatever came before it."""
        kind = recorded.WhichOneof("body")
        while True:
            for message in self.unheard:
                if message.WhichOneof("body") == kind:
                    self.unheard.remove(message)
                    self.learn(kind, recorded, message)
                    return message
            message = link_pb2.Envelope.FromString(await self.call.read())
            if message.WhichOneof("body") not in ("ping", "progress"):
                self.unheard.append(message)

    def learn(self, kind, recorded, message):
        if kind == "request":
            old, new = recorded.request, message.request
            assert new.WhichOneof("work") == old.WhichOneof("work")
            self.names[old.id] = new.id
            if (model := model_of(old)) is not None:
                assert model_of(new).size == model.size
                self.names[model.sha256] = model_of(new).sha256
        elif kind == "reply":
            old, new = recorded.reply, message.reply
            assert new.WhichOneof("outcome") == old.WhichOneof("outcome")
            assert new.id == old.id
            self.names[old.trained.result.sha256] = new.trained.result.sha256
        elif kind == "want":
            assert message.want.sha256 == self.name(recorded.want.sha256)

    def name(self, recorded):
        return self.names.get(recorded, recorded)

    async def say(self, recorded):
        said = link_pb2.Envelope.FromString(recorded.SerializeToString())
        kind = said.WhichOneof("body")
        if kind in ("reply", "progress"):
            getattr(said, kind).id = self.name(getattr(said, kind).id)
        elif kind == "want":
            said.want.sha256 = self.name(said.want.sha256)
        await self.call.write(said.SerializeToString())


def test_both_versions_are_spoken():
    assert OLDEST_VERSION <= BEFORE


async def test_a_device_of_the_version_before_takes_part_in_our_rounds(recorded, folder):
    link = Link(100.0)
    port = await link.start()
    store = Store.create(folder / "run", parse_job(JOB), folder)
    running = asyncio.create_task(Coordinator(store, link).run())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", CHANNEL_OPTIONS) as channel:
        device = Actor(channel.stream_stream(METHOD)())
        for speaker, envelope in recorded:
            if speaker == "device":
                await device.say(envelope)
                continue
            heard = await device.hear(envelope)
            if envelope.HasField("welcome"):
                assert heard.welcome.version == BEFORE
            if envelope.HasField("receipt"):
                assert heard.receipt.accepted
                assert heard.receipt.id == device.name(envelope.receipt.id)
        final = await running
        # The server says nothing to it that a device of that version would not have heard then.
        assert [message.WhichOneof("body") for message in device.unheard] in ([], ["receipt"])
        device.call.cancel()
    ended = [(state, row["round"]) for _, state, row in store.ended(0, most=9)]
    store.close()
    await link.stop()
    assert ended == [("committed", 1), ("committed", 2)]
    assert final


async def test_our_device_takes_part_in_the_rounds_of_a_server_of_the_version_before(
    recorded, folder
):
    done = asyncio.get_running_loop().create_future()

    async def connect(_requests, context):
        server = Actor(context)
        try:
            for speaker, envelope in recorded:
                if speaker == "server":
                    if envelope.request.HasField("open"):
                        envelope.request.open.base = str(folder)
                    await server.say(envelope)
                elif not envelope.HasField("progress"):
                    compare(envelope, await server.hear(envelope))
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)
            raise

    def compare(old, new):
        if old.HasField("hello"):
            hello = new.hello
            assert hello.version_min <= BEFORE <= hello.version_max
            assert (hello.name, hello.role) == (old.hello.name, old.hello.role)
        elif old.HasField("reply") and old.reply.HasField("trained"):
            for field in ("examples", "steps"):
                assert getattr(new.reply.trained, field) == getattr(old.reply.trained, field)
            loss = old.reply.trained.training["loss"]
            assert new.reply.trained.training["loss"] == pytest.approx(loss, rel=1e-4)
            assert new.reply.trained.result.size == old.reply.trained.result.size
        elif old.HasField("reply") and old.reply.HasField("opened"):
            assert new.reply.opened.examples == old.reply.opened.examples
        elif old.HasField("chunk"):
            then, now = (
                torch.frombuffer(bytearray(m.chunk.data)[-60:], dtype=torch.float32)
                for m in (old, new)
            )
            assert torch.allclose(then, now, atol=1e-5)

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


def test_a_job_that_uses_nothing_new_has_nothing_new_in_it(recorded):
    """Devices refuse keys that they do not know: so those are sent that the job needs."""
    (old,) = [e.request.open for _, e in recorded if e.request.HasField("open")]
    job = parse_job(JOB)
    assert read_job(old.job) == job  # what was sent then
    assert json.loads(write_job(job)).keys() <= json.loads(old.job).keys()

    def check(new, known):
        assert new.keys() <= known.keys()
        for key, value in new.items():
            if isinstance(value, dict) and key != "settings":
                check(value, known[key])

    check(json.loads(write_job(job)), json.loads(old.job))
    assert read_job(write_job(job)) == job
