"""A server with one port behind the distribution's nginx, which passes TLS on unopened."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
from pathlib import Path

import grpc.aio
import pytest
from tests.server.scripted_participant import payload_of, training_request
from tests.server.service.test_joining import ask, request_of
from tests.server.waiting import wait_until

from isthmus.errors import AdmissionRefused
from isthmus.identity import joining
from isthmus.transport.blobs import describe, into
from isthmus.transport.uplink import CHANNEL_OPTIONS, METHOD
from isthmus.wire import link_pb2
from isthmus.wire import operator_pb2 as pb
from isthmus_server.cli.operators import OperatorClient

CONFIGURATION = Path(__file__).parents[3] / "deploy" / "nginx" / "pass-through.conf"
MODULE = Path("/usr/lib/nginx/modules/ngx_stream_module.so")

AROUND = """
load_module {module};
daemon off;
master_process off;
pid {folder}/pid;
error_log {folder}/log;
events {{}}
"""


pytestmark = pytest.mark.usefixtures("ports")


@pytest.fixture
def ports():
    return 1


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def prepared():
    """The program and the text of its configuration."""
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None or not MODULE.exists():
        pytest.skip("there is no nginx with streams; install nginx-light and libnginx-mod-stream")
    return program, CONFIGURATION.read_text()


@contextlib.asynccontextmanager
async def passing_to(port, folder):
    """The nginx of `deploy`, with other addresses; returns its port."""
    program, text = prepared()
    own = free_port()
    for there, here in (
        ("listen 443;", f"listen 127.0.0.1:{own};"),
        ("listen [::]:443;", ""),
        ("127.0.0.1:9402", f"127.0.0.1:{port}"),
    ):
        assert there in text
        text = text.replace(there, here)
    file = folder / "nginx.conf"
    file.write_text(AROUND.format(module=MODULE, folder=folder) + text)
    process = await asyncio.create_subprocess_exec(
        program, "-e", str(folder / "log"), "-c", str(file), stderr=asyncio.subprocess.PIPE
    )
    try:
        await wait_until(lambda: process.returncode is not None or listens(own))
        assert process.returncode is None, await process.stderr.read()
        yield own
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.communicate()


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


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
