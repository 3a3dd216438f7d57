"""A server with one port behind the distribution's nginx, which passes TLS on unopened."""

import asyncio
import contextlib

import grpc.aio
import pytest
from tests.free_ports import free_ports
from tests.server.real_nginx import (
    nginx,
    passing_configuration,
    program,
    standby_configuration,
)
from tests.server.scripted_participant import payload_of, training_request
from tests.server.service.test_joining import ask, request_of

from isthmus.errors import AdmissionRefused
from isthmus.identity import joining
from isthmus.transport.blobs import describe, into
from isthmus.transport.uplink import CHANNEL_OPTIONS, METHOD
from isthmus.wire import link_pb2
from isthmus.wire import operator_pb2 as pb
from isthmus_server.cli.operators import OperatorClient

pytestmark = pytest.mark.usefixtures("ports")


@pytest.fixture
def ports():
    return 1


@contextlib.asynccontextmanager
async def passing_to(port, folder):
    """The nginx of `deploy` that passes TLS on, with other addresses; returns its port."""
    program()
    own = free_ports(1)
    async with nginx(passing_configuration(f"127.0.0.1:{own}", port), folder, own):
        yield own


@pytest.fixture
async def behind(fleet, tmp_path):
    """A fleet that is reached through nginx only."""
    await fleet.listen(queue=True)
    async with passing_to(fleet.server.link_port, tmp_path) as port:
        fleet.url = fleet.address = f"localhost:{port}"
        yield fleet
        for participant in fleet.connections:
            participant.cancel()


async def test_participants_and_operators_work_through_nginx(behind):
    payload = payload_of(700_000)
    blob = describe(payload)
    behind.link.publish(blob, payload)

    async def reverse(participant, request, model):
        result = bytearray(reversed(model))
        return link_pb2.Reply(trained=link_pb2.Trained(result=describe(result))), result

    operator = await behind.member("alice", kind="operator")
    assert operator.server == behind.address  # nginx's, of which the server knows nothing
    await behind.join("phone-0", reverse)
    reply = await behind.link.ask("phone-0", training_request(behind.link, blob))
    back = bytearray(reply.trained.result.size)
    await behind.link.fetch("phone-0", reply.trained.result, into(back))
    assert back == bytes(reversed(payload))
    jobs = await asyncio.to_thread(
        lambda: OperatorClient(operator.directory).call("Jobs", pb.JobsRequest(), pb.JobsReply)
    )
    assert list(jobs.jobs) == []


async def test_nginx_opens_nothing_to_those_without_a_certificate(behind):
    member = await behind.member("phone-0")
    credentials = grpc.ssl_channel_credentials((member.directory / "authority.pem").read_bytes())
    async with grpc.aio.secure_channel(behind.address, credentials, CHANNEL_OPTIONS) as channel:
        call = channel.stream_stream(METHOD)()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    forged = request_of(member, behind.token("phone-1"), proof=b"p" * 64)
    with pytest.raises(grpc.aio.AioRpcError, match="not signed by its identity key"):
        await ask(behind, forged)
    token = behind.token("phone-1")
    await joining.join(behind.url, token, behind.folder / "one", "client")
    with pytest.raises(AdmissionRefused, match="this token has been used"):
        await joining.join(behind.url, token, behind.folder / "two", "client")


async def test_a_revoked_participant_is_disconnected_through_nginx(behind):
    async def nothing(participant, request, model):
        return link_pb2.Reply(), None

    participant = await behind.join("phone-0", nothing)
    behind.registry().revoke("phone-0")
    with pytest.raises(AdmissionRefused, match="'phone-0' has been revoked"):
        await participant.connection


@pytest.mark.parametrize("serves", ["first", "second"])
async def test_nginx_passes_on_to_the_one_of_a_server_and_its_standby_that_listens(
    fleet, tmp_path, serves
):
    async def reply(participant, request, model):
        return link_pb2.Reply(), None

    program()
    await fleet.listen(queue=True)
    # Nobody listens at the other one's port, as a standby listens only once it serves.
    ports = [fleet.server.link_port, free_ports(1)]
    if serves == "second":
        ports.reverse()
    own = free_ports(1)
    async with nginx(standby_configuration(f"127.0.0.1:{own}", *ports), tmp_path, own):
        fleet.url = fleet.address = f"localhost:{own}"
        for number in range(3):  # the dead one is tried for each connection
            await fleet.join(f"phone-{number}", reply)
        for participant in fleet.connections:
            participant.cancel()
