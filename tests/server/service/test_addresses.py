"""Servers with IPv6 addresses, and names with several addresses of which one is dead."""

import asyncio
import contextlib
import socket
import time

import grpc.aio
import pytest
from tests.connect_proxy import ConnectProxy
from tests.server.scripted_participant import ScriptedParticipant, replying, training_request
from tests.server.service.conftest import Fleet
from tests.server.waiting import wait_until

from isthmus.identity import joining, tls
from isthmus.identity.obstacles import presented
from isthmus.identity.proxies import ProxyChoice, Road
from isthmus.transport.uplink import CHANNEL_OPTIONS, METHOD
from isthmus.wire import link_pb2

SOON = 8.0
"""Seconds within which a dead address is passed over; a connection to it would take 20 or more."""

pytestmark = pytest.mark.usefixtures("ports")


@pytest.fixture(params=[2, 1], ids=["two ports", "one port"])
def ports(request):
    """Each of these tests is run with both."""
    return request.param


@pytest.mark.skipif(
    not socket.has_dualstack_ipv6(), reason="there is no IPv6; load its kernel module"
)
@pytest.mark.parametrize("through_a_proxy", [False, True])
async def test_a_server_with_an_ipv6_address(tmp_path, ports, through_a_proxy):
    fleet = Fleet(tmp_path, ["::1"])
    fleet.one_port = ports == 1
    await fleet.listen(host="[::1]")
    url, address = (f"[::1]:{port}" for port in (fleet.server.join_port, fleet.server.link_port))
    try:
        async with ConnectProxy({"[::1]": "::1"}) as proxy:
            choice = ProxyChoice(url=proxy.url) if through_a_proxy else None
            token = fleet.token("phone")
            member = await joining.join(url, token, tmp_path / "phone", "client", choice)
            assert member.server == address
            fleet.address = address
            fleet.dial(member, ScriptedParticipant(replying(examples=5)))
            await wait_until(lambda: "phone" in fleet.link.peers)
            reply = await fleet.link.ask("phone", training_request(fleet.link))
            assert reply.trained.examples == 5
            asked = {head.split()[1] for head in proxy.requests}
            assert asked == ({url, address} if through_a_proxy else set())
    finally:
        await fleet.close()


@contextlib.contextmanager
def swallowing(address, port):
    """An address that answers no request for a connection, as behind a firewall that drops."""
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(socket.socket())
        listener.bind((address, port))
        listener.listen(0)
        for _ in range(6):  # the queue is full, and nobody takes a connection out of it
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex((address, port))
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex((address, port)) == 0:
                pytest.skip("this kernel accepts connections beyond a listener's queue")
        yield


async def test_joining_passes_over_a_dead_address(fleet, monkeypatch):
    await fleet.listen()
    port = fleet.server.join_port
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port))
        for address in ("127.0.0.2", "127.0.0.1")
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with swallowing("127.0.0.2", port):
        began = time.monotonic()
        certificate = await presented(Road(f"hub.invalid:{port}"))
        assert time.monotonic() - began < SOON
    assert tls.issued_by(certificate, fleet.server.members.certificate_authority.certificate)


async def test_the_link_passes_over_a_dead_address(fleet):
    await fleet.listen()
    member = await fleet.member("phone")
    port = fleet.server.link_port
    options = (*CHANNEL_OPTIONS, ("grpc.default_authority", "localhost"))
    with swallowing("127.0.0.2", port):
        target = f"ipv4:127.0.0.2:{port},127.0.0.1:{port}"
        credentials = member.channel_credentials()
        async with (
            grpc.aio.secure_channel(target, credentials, options) as channel,
            asyncio.timeout(SOON),
        ):
            call = channel.stream_stream(METHOD)()
            hello = link_pb2.Hello(name="phone", role=link_pb2.CLIENT, instance="one")
            hello.version_min = hello.version_max = 2
            hello.identity = member.identity_public
            await call.write(link_pb2.Envelope(hello=hello).SerializeToString())
            assert link_pb2.Envelope.FromString(await call.read()).HasField("welcome")
            call.cancel()
