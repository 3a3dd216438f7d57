"""What comes from the network is read or refused: no crash, no memory on a stranger's word."""

import asyncio
import contextlib
import tracemalloc

import grpc
import grpc.aio
import pytest
import torch
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import IsthmusError
from isthmus.identity import tls
from isthmus.identity.joining import Token, statement
from isthmus.job import parse_job, read_job
from isthmus.task import Participant
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.stream import Stream
from isthmus.transport.uplink import Uplink
from isthmus.wire import join_pb2, link_pb2
from isthmus_clients.device.agent import Agent
from isthmus_server.fleet.authority import CertificateAuthority, initialise
from isthmus_server.fleet.joining import JoinService
from isthmus_server.fleet.members import Members
from tests.privacy.protocol import ProtocolRound, enrolment, make_config
from tests.server.loopback import LoopbackNetwork
from tests.server.scripted_participant import replying, training_request
from tests.server.waiting import wait_until

LAYOUT = TensorLayout.from_shapes({"bias": (3,), "weight": (3, 4)})


@st.composite
def damaged(draw, sample):
    """Bytes that were a message: cut, repeated, or with something else written over a part."""
    data = bytearray(sample)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        end = draw(st.integers(at, min(len(data), at + 40)))
        part = draw(
            st.one_of(
                st.binary(max_size=16),
                st.sampled_from([b"", b"\xff" * 4, b"\xff" * 8, b"\x00" * 8, b"\x7f" + bytes(7)]),
                st.just(bytes(data[at:end]) * 3),
            )
        )
        data[at:end] = part
    return bytes(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("decoders")


@pytest.fixture(scope="module")
def decoders(folder):
    """Name to (decoder, something it takes)."""
    initialise(folder / "server", ["localhost"])
    members = Members(folder / "server", CertificateAuthority(folder / "server"))
    joining, authority = JoinService(members), members.certificate_authority
    request = tls.signing_request(tls.new_key())
    certificate, _ = authority.issue(request, kind="client", name="a", identity=bytes(32))
    protocol = ProtocolRound(3).advertise_keys().share_keys().mask_inputs().check_consistency()
    runner = asyncio.Runner()

    class Call:
        def __init__(self, data):
            self.data = data

        async def read(self):
            return self.data

    def admit(data):
        with contextlib.suppress(DecodeError):
            runner.run(joining.admit(join_pb2.JoinRequest.FromString(data)))

    ask = join_pb2.JoinRequest(
        version=1, kind="client", secret=bytes(16), signing_request=request, identity=bytes(32)
    )
    ask.proof = statement(bytes(32), "client", bytes(16), request)[:64]
    job = parse_job('name = "table"\n[task]\nsource = "task.py:Learn"')
    hello = link_pb2.Envelope(
        hello=link_pb2.Hello(name="a", version_min=2, version_max=2, instance="one")
    )
    vector = LAYOUT.encode(torch.zeros(LAYOUT.size))
    found = {
        "envelope": (
            lambda data: runner.run(Stream(Call(data)).receive(1.0)),
            hello.SerializeToString(),
        ),
        "layout": (TensorLayout.from_header, LAYOUT.header),
        "vector": (lambda data: LAYOUT.decode(bytearray(data)), bytes(vector)),
        "certificate": (lambda data: tls.subject_of(tls.read_certificate(data)), certificate),
        "signing request": (
            lambda data: authority.issue(data, kind="client", name="a", identity=bytes(32)),
            request,
        ),
        "join": (admit, ask.SerializeToString()),
        "token": (
            lambda data: Token.parse(data.decode("latin-1")),
            str(Token(bytes(16), bytes(32))).encode(),
        ),
        "job": (lambda data: read_job(data.decode("latin-1")), job.model_dump_json().encode()),
    }
    for message in (
        make_config(),
        enrolment("c00000"),
        protocol.roster,
        protocol.inboxes["c00000"],
        protocol.masked["c00000"][0],
        protocol.survivors,
        protocol.consistency_signatures,
        protocol.reveal("c00000"),
    ):
        found[type(message).__name__] = (type(message).from_bytes, message.to_bytes())
    yield found
    members.close()
    runner.close()


NAMES = (
    *("envelope", "layout", "vector", "certificate", "signing request", "join", "token", "job"),
    *(
        "RoundConfig",
        "Enrolment",
        "Roster",
        "Inbox",
        "MaskedInput",
        "Survivors",
        "ConsistencySignatures",
    ),
    "UnmaskingShares",
)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_read_or_refused_in_bounded_memory(name, decoders):
    decode, sample = decoders[name]
    if name != "join":  # its proof is nobody's
        decode(sample)
    tracemalloc.start()

    @settings(max_examples=30)
    @given(damaged(sample) | st.binary(max_size=64))
    def one(data):
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        with contextlib.suppress(IsthmusError):
            decode(data)
        assert tracemalloc.get_traced_memory()[1] - before < (1 << 20) + 64 * len(data)

    try:
        one()
    finally:
        tracemalloc.stop()


def arbitrary(descriptor):
    """Any message of a protobuf type."""
    scalars = {
        FieldDescriptor.TYPE_STRING: st.sampled_from(["", "run", "r1", "x" * 200, "é"]),
        FieldDescriptor.TYPE_BYTES: st.binary(max_size=64) | st.just(LAYOUT.header),
        FieldDescriptor.TYPE_BOOL: st.booleans(),
        FieldDescriptor.TYPE_DOUBLE: st.floats(),
        FieldDescriptor.TYPE_FLOAT: st.floats(width=32),
        FieldDescriptor.TYPE_UINT32: st.sampled_from([0, 1, 2**32 - 1]),
        FieldDescriptor.TYPE_UINT64: st.sampled_from([0, 1, 2**40, 2**64 - 1]),
        FieldDescriptor.TYPE_SINT64: st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63)]),
        FieldDescriptor.TYPE_ENUM: st.integers(0, 2),
    }
    made = GetMessageClass(descriptor)

    @st.composite
    def draw_one(draw):
        message = made()
        for field in descriptor.fields:
            if draw(st.booleans()):
                continue
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                value = field.message_type.fields_by_name["value"]
                if value.message_type is None:
                    getattr(message, field.name)["loss"] = draw(scalars[value.type])
                else:
                    filled = draw(arbitrary(value.message_type))
                    getattr(message, field.name)["loss"].MergeFrom(filled)
            elif field.message_type is not None and field.is_repeated:
                getattr(message, field.name).add().MergeFrom(draw(arbitrary(field.message_type)))
            elif field.message_type is not None:
                getattr(message, field.name).MergeFrom(draw(arbitrary(field.message_type)))
            elif field.is_repeated:
                getattr(message, field.name).append(draw(scalars[field.type]))
            else:
                setattr(message, field.name, draw(scalars[field.type]))
        return message

    return draw_one()


ENVELOPES = st.lists(arbitrary(link_pb2.Envelope.DESCRIPTOR), min_size=1, max_size=5)


def test_whatever_a_caller_says_the_others_are_served():
    with asyncio.Runner() as runner:
        network = LoopbackNetwork()
        runner.run(network.listen())
        participant = runner.run(network.join("phone", replying(examples=7)))

        async def say(said):
            async with network.raw_stream(name=f"raw-{len(network.link.peers)}") as (
                call,
                _,
                receive,
            ):
                await receive("welcome")
                with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                    for message in said:
                        await call.write(message.SerializeToString())
                    await call.done_writing()
                with contextlib.suppress(grpc.RpcError):
                    while await call.read() is not grpc.aio.EOF:
                        pass
                assert await call.code() != grpc.StatusCode.UNKNOWN, await call.details()
            request = training_request(network.link)
            assert (await network.link.ask("phone", request)).trained.examples == 7
            network.link.acknowledge("phone", request.id, True)

        @settings(max_examples=30)
        @given(ENVELOPES)
        def one(said):
            runner.run(say(said))

        one()
        assert participant.cancelled == []
        runner.run(network.close())


def test_whatever_a_server_says_a_device_comes_back(folder, caplog):
    """What it is asked to load is refused: its owner has put no task there."""
    (folder / "tasks").mkdir()
    welcome = link_pb2.Envelope(welcome=link_pb2.Welcome(version=1, lease_seconds=2.0))
    with asyncio.Runner() as runner:
        script, seen = [], []

        async def connect(_, context):
            await context.read()
            seen.append(None)
            for message in (welcome, *script):
                await context.write(message.SerializeToString())

        async def start():
            server = grpc.aio.server()
            method = grpc.stream_stream_rpc_method_handler(connect)
            service = grpc.method_handlers_generic_handler(
                "isthmus.link.v1.Link", {"Connect": method}
            )
            server.add_generic_rpc_handlers((service,))
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            agent = Agent(Participant(name="a", regime="federated"), None, tasks=folder / "tasks")
            address = f"127.0.0.1:{port}"
            uplink = Uplink(address, "a", link_pb2.CLIENT, agent, longest_pause=0.02)
            return server, asyncio.create_task(uplink.run())

        async def say(said):
            script[:] = said
            count = len(seen) + 2  # one that hears all of it, and one that comes after
            await wait_until(lambda: len(seen) >= count or running.done())
            assert not running.done()

        async def stop():
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await server.stop(0)

        server, running = runner.run(start())

        @settings(max_examples=15)
        @given(ENVELOPES)
        def one(said):
            runner.run(say(said))

        one()
        runner.run(stop())
    # gRPC polls once for a process: what it says of the closed loops of earlier tests is not ours.
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    ours = [r.getMessage() for r in errors if "Event loop is closed" not in str(r.exc_info)]
    assert ours == []
