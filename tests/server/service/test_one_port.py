"""Everything at one port: who reaches which listener, by what the first message of TLS offers."""

import asyncio
import contextlib
import errno
import io
import os
import socket

import grpc
import grpc.aio
import pytest
from rich.console import Console
from tests.server.idle_callers import first_message, idle_callers
from tests.server.scripted_participant import payload_of, replying, training_request
from tests.server.service.test_leaving import join, started
from tests.server.service.test_metrics_access import read
from tests.server.waiting import wait_until

from isthmus.identity import tls
from isthmus.identity.join_channel import JOIN_PROTOCOLS, join_channel, trusting
from isthmus.identity.joining import AUTHORITY
from isthmus.identity.proxies import Road
from isthmus.transport.blobs import describe, into
from isthmus.transport.uplink import CHANNEL_OPTIONS, METHOD
from isthmus.wire import link_pb2
from isthmus.wire import operator_pb2 as pb
from isthmus_server.cli.operators import OperatorClient
from isthmus_server.fleet.authority import initialise
from isthmus_server.observability.listener import MetricsListener
from isthmus_server.observability.metrics import RunMetrics
from isthmus_server.observability.observers import Observers
from isthmus_server.service.operator_service import SERVICE, ObservedServer
from isthmus_server.transport import link as links
from isthmus_server.transport import one_port

pytestmark = pytest.mark.usefixtures("ports")


@pytest.fixture
def ports():
    return 1


async def test_participants_operators_and_metrics_share_the_port(fleet):
    await fleet.listen(queue=True)
    port = fleet.server.link_port
    listener = MetricsListener("127.0.0.1", port, RunMetrics(), certified=True, shared=True)
    fleet.server.one_port.metrics = listener.taking(port)
    observers = Observers(Console(file=io.StringIO()), metrics=listener)
    operator = await fleet.member("alice", kind="operator")
    assert operator.server == fleet.address == fleet.url
    payload = payload_of(3_000_000)
    blob = describe(payload)
    fleet.link.publish(blob, payload)

    async def reverse(participant, request, model):
        result = bytearray(reversed(model))
        return link_pb2.Reply(trained=link_pb2.Trained(result=describe(result))), result

    async with observers.serving(ObservedServer(fleet.server, fleet.runner)):
        await fleet.join("phone-0", reverse)
        await fleet.join("hall", replying(examples=9), kind="datacenter")
        reply = await fleet.link.ask("phone-0", training_request(fleet.link, blob))
        back = bytearray(reply.trained.result.size)
        await fleet.link.fetch("phone-0", reply.trained.result, into(back))
        assert back == bytes(reversed(payload))
        jobs = await asyncio.to_thread(
            lambda: OperatorClient(operator.directory).call("Jobs", pb.JobsRequest(), pb.JobsReply)
        )
        assert list(jobs.jobs) == []
        assert listener.url == f"https://127.0.0.1:{port}/metrics"
        authority = fleet.server.members.authority_certificate
        status, text = await asyncio.to_thread(read, listener.url, authority, operator)
        assert (status, "isthmus_link_lag_seconds" in text) == (200, True)
        device = await fleet.member("phone-1")
        for stranger in ((), (device,)):  # on loopback, too
            with pytest.raises(OSError, match=r"certificate required|closed|EOF|reset|Broken pipe"):
                await asyncio.to_thread(read, listener.url, authority, *stranger)
    with pytest.raises(OSError, match=r"closed|EOF|reset"):
        await asyncio.to_thread(read, listener.url, authority, operator)


async def test_who_offers_joining_reaches_nothing_but_joining(fleet):
    """Neither without a certificate nor with one, which joining does not ask for."""
    await fleet.listen(queue=True)
    authority = fleet.server.members.authority_certificate
    operator = await fleet.member("alice", kind="operator")
    certified = trusting(authority)
    certified.load_cert_chain(operator.directory / "credentials.pem")
    for context in (trusting(authority), certified):
        async with join_channel(Road(fleet.url), context, (), 20.0) as channel:
            for method in (METHOD, f"/{SERVICE}/Jobs", f"/{SERVICE}/Logs"):
                call = channel.stream_stream(method)()
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert await channel.unary_unary(AUTHORITY)(b"", timeout=20.0)
    assert fleet.link.peers == {}


async def test_who_offers_the_link_reaches_nothing_without_a_certificate(fleet):
    await fleet.listen(queue=True)
    roots = tls.pem(fleet.server.members.authority_certificate)
    credentials = grpc.ssl_channel_credentials(roots)
    for method in (METHOD, AUTHORITY, "/isthmus.join.v1.Join/Join", f"/{SERVICE}/Jobs"):
        async with grpc.aio.secure_channel(fleet.url, credentials, CHANNEL_OPTIONS) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(method)(b"", timeout=20.0)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    member = await fleet.member("phone-0")
    async with grpc.aio.secure_channel(fleet.url, member.channel_credentials()) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(AUTHORITY)(b"", timeout=20.0)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


REFUSED = {
    "no TLS": b"GET /metrics HTTP/1.1\r\n\r\n",
    "HTTP/2 without TLS": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a size that TLS forbids": b"\x16\x03\x01\xff\xff",
    "an unknown protocol": first_message(["isthmus-joi"]),
    "metrics, which are elsewhere": first_message(["h2", "http/1.1"]),
    "nothing, as for metrics": first_message([]),
    "a damaged message": first_message()[:5] + b"\x02" + first_message()[6:],
}


@pytest.mark.parametrize("kind", REFUSED)
async def test_what_no_listener_is_for_is_closed_at_once(fleet, kind, monkeypatch):
    monkeypatch.setattr(one_port, "_HELLO_SECONDS", 300.0)
    await fleet.listen()
    reader, writer = await asyncio.open_connection("127.0.0.1", fleet.server.link_port)
    writer.write(REFUSED[kind])
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 60.0) == b""
    writer.transport.abort()
    assert not fleet.server.one_port._arriving


@pytest.mark.parametrize("protocols", [JOIN_PROTOCOLS, ["h2"]])
async def test_a_first_message_may_come_in_small_parts(fleet, protocols, monkeypatch):
    """The kernel is asked to wait for the rest, so that nobody keeps this process busy."""
    looked = []
    look = one_port._Arriving._look
    monkeypatch.setattr(one_port._Arriving, "_look", lambda self: looked.append(look(self)))
    await fleet.listen()
    message = first_message(protocols)
    reader, writer = await asyncio.open_connection("127.0.0.1", fleet.server.link_port)
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for place in range(0, len(message), 16):
        writer.write(message[place : place + 16])
        await writer.drain()
        for _ in range(5):  # the event loop looks for what has come
            await asyncio.sleep(0)
    assert (await asyncio.wait_for(reader.read(1), 20.0)) == b"\x16"  # the server's part
    assert len(looked) <= 4
    writer.transport.abort()


@pytest.mark.parametrize("length", [0, 3, 100])
async def test_a_caller_that_leaves_within_its_first_message_is_forgotten(fleet, length):
    await fleet.listen()
    _, writer = await asyncio.open_connection("127.0.0.1", fleet.server.link_port)
    await wait_until(lambda: fleet.server.one_port._arriving)
    writer.write(first_message()[:length])
    writer.close()
    await wait_until(lambda: not fleet.server.one_port._arriving)


async def test_a_caller_that_says_nothing_is_closed_soon(fleet, timeouts):
    await fleet.listen()
    reader, writer = await asyncio.open_connection("127.0.0.1", fleet.server.link_port)
    writer.write(first_message()[:100])
    await wait_until(lambda: fleet.server.one_port._arriving)
    await timeouts.expire(one_port._HELLO_SECONDS)
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 20.0) == b""
    writer.transport.abort()


async def test_a_connection_that_cannot_be_watched_ends_no_other(fleet, monkeypatch, caplog):
    """The kernel watches a bounded number (fs.epoll.max_user_watches)."""
    await fleet.listen()

    loop = asyncio.get_running_loop()
    add_reader = loop.add_reader

    def watch(file, callback, *args):
        if getattr(callback, "__func__", None) is one_port._Arriving._look:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return add_reader(file, callback, *args)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "add_reader", watch)
        reader, writer = await asyncio.open_connection("127.0.0.1", fleet.server.link_port)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 20.0) == b""
        writer.transport.abort()
    assert "a connection cannot be watched: No space left on device" in caplog.text
    assert (await fleet.member("phone-0")).name == "phone-0"


async def test_a_caller_of_the_link_that_leaves_has_no_place(fleet):
    await fleet.listen()
    _, writer = await asyncio.open_connection("127.0.0.1", fleet.server.link_port)
    writer.write(first_message())
    await wait_until(lambda: len(fleet.link._passing) == 1)
    writer.close()
    await wait_until(lambda: len(fleet.link._passing) == 0)


@pytest.mark.parametrize("own", [False, True], ids=["one port", "fair link"])
async def test_who_stops_in_the_handshake_keeps_no_participant_out(fleet, monkeypatch, own):
    """One address holds as many connections of the link as there are, and opens them again."""
    monkeypatch.setattr(links, "CONNECTIONS", 64)
    fleet.one_port = not own
    fleet.fair_link = own
    await fleet.listen()
    assert fleet.link._passing.places == 64
    async with idle_callers(fleet.server.link_port, "a first message", count=90):
        await wait_until(lambda: len(fleet.link._passing) == 64)
        for name in ("phone-0", "phone-1"):
            await fleet.join(name, replying(examples=3))
        known = fleet.link._passing._connections - set(fleet.link._passing._unknown.values())
        assert len(known) == 2


async def test_the_command_has_everything_at_one_address(tmp_path):
    state = tmp_path / "server"
    initialise(state, ["localhost", "127.0.0.1"])
    async with started(state, "--one-port", "--metrics", "127.0.0.1:0") as server:
        assert server.link == server.joining
        url = (await server.line(r"metrics at (https://127.0.0.1:\d+)/metrics"))[1]
        assert url.rpartition(":")[2] == server.link.rpartition(":")[2]
        operator = await join(server, state, "alice", "operator")
        assert operator.server == server.link
        for path, expected in (("/readyz", "ready\n"), ("/metrics", "isthmus_")):
            status, text = await asyncio.to_thread(read, url + path, operator.authority, operator)
            assert status == 200
            assert expected in text
        with pytest.raises(OSError, match=r"certificate required|closed|EOF|reset|Broken pipe"):
            await asyncio.to_thread(read, url + "/metrics", operator.authority)
