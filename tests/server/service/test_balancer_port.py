"""What reaches the port for balancers: nothing that does not reach the one port directly."""

import asyncio
import contextlib
import gc
import socket

import grpc
import grpc.aio
import pytest
from tests.server.idle_callers import first_message
from tests.server.scripted_participant import ScriptedParticipant, replying
from tests.server.service.conftest import Fleet
from tests.server.service.test_joining import request_of
from tests.server.waiting import wait_until
from websockets.frames import BINARY, TEXT, Frame
from websockets.protocol import CLIENT, OPEN, Protocol

from isthmus.identity import joining, tls
from isthmus.identity import tunnel as tunnel_module
from isthmus.identity.join_channel import JOIN_PROTOCOLS, trusting
from isthmus.identity.joining import AUTHORITY, JOIN
from isthmus.identity.tunnel import (
    LARGEST_FRAME,
    PING_SECONDS,
    SILENT_SECONDS,
    FrameAllowance,
    Tunnel,
)
from isthmus.transport.uplink import CHANNEL_OPTIONS, METHOD
from isthmus_server.service.operator_service import SERVICE
from isthmus_server.service.server import BalancerListener
from isthmus_server.transport import balancer_port
from isthmus_server.transport.balancer_port import (
    HEAD_SECONDS,
    LARGEST_HEAD,
    BalancerPort,
    network_named,
    takes_websockets,
)
from isthmus_server.transport.one_port import OnePort

REQUEST = (
    "GET /isthmus HTTP/1.1\r\nHost: fleet.example.org\r\nUpgrade: websocket\r\n"
    "Connection: Upgrade\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: isthmus-tls\r\n"
)


@pytest.fixture
async def balanced(tmp_path):
    """A fleet with a port for balancers, of which one at 127.0.0.1 is trusted."""
    fleet = Fleet(tmp_path)
    fleet.one_port = True
    fleet.balancer = BalancerListener("127.0.0.1", 0, (network_named("127.0.0.1"),))
    await fleet.listen(queue=True)
    fleet.port = fleet.server.balancer_port
    yield fleet
    await fleet.close()


def frame(data, opcode=BINARY):
    return Frame(opcode, data).serialize(mask=True)


async def asked(port, request=REQUEST, source="127.0.0.1", caller="192.0.2.7"):
    """A connection on which a balancer has asked for a WebSocket."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
    writer.write(f"{request}X-Forwarded-For: {caller}\r\n\r\n".encode())
    return reader, writer


async def opened(port, **more):
    reader, writer = await asked(port, **more)
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 ")
    except BaseException:
        writer.transport.abort()
        raise
    return reader, writer


async def rest(reader):
    """What comes until the end of a connection."""
    with contextlib.suppress(ConnectionError):
        return await asyncio.wait_for(reader.read(), 20.0)
    return b""


@contextlib.asynccontextmanager
async def dialled(port, **more):
    """An address of this test's own, from which connections go through a WebSocket."""

    carried = []

    async def carry(near, near_writer):
        carried.append(asyncio.current_task())
        try:
            reader, writer = await opened(port, **more)
        except BaseException:
            # Python 3.11.2 leaves the connection of a callback that has failed open.
            near_writer.transport.abort()
            raise
        protocol = Protocol(CLIENT, state=OPEN, max_size=None)
        server, client = socket.socketpair()
        tunnel = Tunnel(protocol, writer.transport, kept=(reader, writer))
        await tunnel.start(server)
        far, far_writer = await asyncio.open_connection(sock=client)
        try:
            await asyncio.gather(copy(near, far_writer), copy(far, near_writer))
        except asyncio.CancelledError:
            pass
        finally:
            tunnel.abort()
            near_writer.transport.abort()
            far_writer.transport.abort()

    async def copy(source, target):
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                target.write(data)
        target.close()

    server = await asyncio.start_server(carry, "127.0.0.1", 0)
    try:
        yield f"localhost:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in carried:
            task.cancel()
        await asyncio.gather(*carried, return_exceptions=True)


async def test_nothing_is_reachable_without_a_certificate(balanced):
    member = await balanced.member("phone-0")
    roots = tls.pem(balanced.server.members.authority_certificate)
    anybody = grpc.ssl_channel_credentials(roots)
    async with dialled(balanced.port) as address:
        for method in (METHOD, AUTHORITY, JOIN, f"/{SERVICE}/Jobs", f"/{SERVICE}/Logs"):
            async with grpc.aio.secure_channel(address, anybody, CHANNEL_OPTIONS) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary(method)(b"", timeout=20.0)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        # A certificate opens what it opens directly.
        async with grpc.aio.secure_channel(address, member.channel_credentials()) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(f"/{SERVICE}/Jobs")(b"", timeout=20.0)
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        token = balanced.token("phone-1")
        forged = request_of(member, token, proof=b"p" * 64)
        authority = balanced.server.members.authority_certificate
        async with joining.join_channel(
            joining.road_to(address), trusting(authority), (), 20.0
        ) as channel:
            for method in (METHOD, f"/{SERVICE}/Jobs"):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary(method)(b"", timeout=20.0)
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            with pytest.raises(grpc.aio.AioRpcError, match="not signed by its identity key"):
                await channel.unary_unary(JOIN)(forged.SerializeToString(), timeout=20.0)
    assert balanced.link.peers == {}


ANSWERED = {
    "a page": ("GET / HTTP/1.1\r\nHost: x\r\n", b"HTTP/1.1 426 "),
    "a page of an old balancer": ("GET / HTTP/1.0\r\nHost: x\r\n", b"HTTP/1.1 505 "),
    "another method": (REQUEST.replace("GET", "POST"), b"HTTP/1.1 405 "),
    "a browser's page": (f"{REQUEST}Origin: https://example.org\r\n", b"HTTP/1.1 403 "),
    "another protocol": (REQUEST.replace("isthmus-tls", "chat"), b"HTTP/1.1 400 "),
    "a body": (f"{REQUEST}Content-Length: 9\r\n", b""),
    "no HTTP": ("\x16\x03\x01\x02\x00\r\n", b""),
    "too many headers": (REQUEST + "A: b\r\n" * 200, b""),
    "too many protocols": (REQUEST.replace("isthmus-tls", "a," * 100 + "isthmus-tls"), b""),
    "too many tokens": (f"{REQUEST}Connection: {'a,' * 100}a\r\n", b""),
    "too long a request": (f"{REQUEST}A: {'a' * LARGEST_HEAD}\r\n", b""),
}


@pytest.mark.parametrize("kind", ANSWERED)
async def test_what_asks_for_something_else_is_refused_and_closed(balanced, kind):
    request, answer = ANSWERED[kind]
    reader, writer = await asked(balanced.port, request)
    found = await rest(reader)
    assert found.startswith(answer)
    assert (b"101" in found, b"Server:" in found) == (False, False)
    writer.transport.abort()
    await wait_until(lambda: not balanced.server.balancer._arriving)


SENT = {
    "no TLS": frame(b"GET /metrics HTTP/1.1\r\n\r\n"),
    "text": frame(b"hello", TEXT),
    "a frame that is not masked": Frame(BINARY, b"x").serialize(mask=False),
    "a frame that is too large": b"\x82\xff" + (LARGEST_FRAME + 1).to_bytes(8, "big"),
    "an unknown protocol": frame(first_message(["isthmus-joi"])),
    "metrics, which are elsewhere": frame(first_message(["http/1.1"])),
    "a frame for which no first message is long enough": b"\x82\xfe\x40\x06",
    "a goodbye": b"\x88\x80\0\0\0\0",
}


@pytest.mark.parametrize("kind", SENT)
async def test_what_is_within_and_for_no_listener_is_closed_at_once(balanced, kind):
    reader, writer = await opened(balanced.port)
    writer.write(SENT[kind])
    await rest(reader)
    writer.transport.abort()
    await wait_until(lambda: not balanced.server.balancer._arriving)
    await wait_until(lambda: not balanced.server.balancer._tunnels)


@pytest.mark.parametrize("behind", ["\x88\x80abcd", "\x7f\x7f\x7f\x7f", "\x81\x80abcd"])
@pytest.mark.parametrize("protocol", ["isthmus-tls", "chat"])
async def test_what_comes_right_behind_a_request_is_read_after_the_answer(
    balanced, caplog, protocol, behind
):
    reader, writer = await asyncio.open_connection("127.0.0.1", balanced.port)
    request = REQUEST.replace("isthmus-tls", protocol).encode()
    writer.write(request + b"\r\n" + behind.encode("latin-1"))
    found = await rest(reader)
    status = b"101" if protocol == "isthmus-tls" else b"400"
    assert found == b"" or found.startswith(b"HTTP/1.1 " + status)
    writer.transport.abort()
    await wait_until(lambda: not balanced.server.balancer._arriving)
    assert caplog.messages == []


EMPTY = {
    "frames": b"\x82\x80abcd",
    "parts of a message": b"\x00\x80abcd",
    "pings": b"\x89\x80abcd",
    "pongs": b"\x8a\x80abcd",
}


@pytest.mark.parametrize("kind", EMPTY)
@pytest.mark.parametrize("begun", [False, True])
async def test_who_sends_thousands_of_empty_frames_is_closed(balanced, begun, kind):
    """Each costs the event loop microseconds, and their sender six bytes."""
    reader, writer = await opened(balanced.port)
    if begun:
        writer.write(frame(first_message(JOIN_PROTOCOLS)))
        await wait_until(lambda: balanced.server.balancer._tunnels)
    first = b"\x02\x80abcd" if kind == "parts of a message" else b""
    writer.write(first + EMPTY[kind] * 2000)
    await rest(reader)
    writer.transport.abort()
    await wait_until(lambda: not balanced.server.balancer._arriving)
    await wait_until(lambda: not balanced.server.balancer._tunnels)


def test_small_frames_are_allowed_among_large_ones(monkeypatch):
    """As many as gRPC sends to tell what it has taken of a model: one for some kilobytes."""
    now = 1000.0
    monkeypatch.setattr(tunnel_module.time, "monotonic", lambda: now)
    allowance = FrameAllowance()
    for _ in range(10_000):
        allowance.earn(4096)
        assert allowance.spend(8)
    idle = FrameAllowance()
    now += 3600.0
    assert idle.spend(1000)
    assert not idle.spend(100)


@pytest.mark.parametrize("begins", ["a request", "a first message"])
async def test_who_does_not_go_on_is_closed_soon(balanced, timeouts, begins):
    if begins == "a request":
        reader, writer = await asyncio.open_connection("127.0.0.1", balanced.port)
        writer.write(REQUEST.encode()[:50])
    else:
        reader, writer = await opened(balanced.port)
        writer.write(frame(first_message()[:100]))
    await wait_until(lambda: balanced.server.balancer._arriving)
    await timeouts.expire(HEAD_SECONDS)
    assert await rest(reader) == b""
    writer.transport.abort()
    assert not balanced.server.balancer._arriving


@pytest.mark.parametrize("protocols", [JOIN_PROTOCOLS, ["h2"]])
async def test_a_first_message_may_come_in_small_frames(balanced, protocols):
    reader, writer = await opened(balanced.port)
    message = first_message(protocols)
    for place in range(0, len(message), 16):
        writer.write(frame(message[place : place + 16]))
    assert (await asyncio.wait_for(reader.readexactly(2), 20.0))[0] == 0x82
    writer.transport.abort()


@pytest.mark.parametrize(
    "kind", ["nothing", "a request", "half a first message", "a first message"]
)
async def test_idle_connections_keep_nobody_out(balanced, kind):
    """More than there are places, of a balancer that does not say who its callers are."""
    balanced.server.balancer._trusted = ()
    held = []

    async def hold():
        while True:
            with contextlib.suppress(OSError, EOFError):
                if kind == "nothing":
                    reader, writer = await asyncio.open_connection("127.0.0.1", balanced.port)
                else:
                    reader, writer = await opened(balanced.port)
                held.append(kind)
                try:
                    if "first" in kind:
                        whole = first_message(JOIN_PROTOCOLS)
                        writer.write(frame(whole[:100] if "half" in kind else whole))
                    while await reader.read(1 << 16):
                        pass
                finally:
                    writer.transport.abort()
            # All of them together come back more slowly than connections become idle (128 in a
            # second), so that there is a place for the newcomer at any time, and not by chance.
            await asyncio.sleep(0.5)

    callers = [asyncio.create_task(hold()) for _ in range(150)]
    try:
        await wait_until(lambda: len(held) >= 128)
        async with dialled(balanced.port) as address:
            member = await joining.join(
                address, balanced.token("phone-0"), balanced.folder / "phone-0", "client"
            )
            balanced.address = address
            balanced.dial(member, ScriptedParticipant(replying(examples=5)))
            await wait_until(lambda: "phone-0" in balanced.link.peers)
    finally:
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)


FORWARDED = {
    "a trusted balancer names its caller": ("10.0.0.5", ["192.0.2.7"], "192.0.2.7"),
    "what the caller wrote itself is before": ("10.0.0.5", ["1.1.1.1, 192.0.2.7"], "192.0.2.7"),
    "in a header of its own, too": ("10.0.0.5", ["1.1.1.1", "192.0.2.7:99"], "192.0.2.7"),
    "two trusted balancers": ("10.0.0.5", ["1.1.1.1, 192.0.2.7, 10.0.0.6"], "192.0.2.7"),
    "an IPv6 network": ("::ffff:10.0.0.5", ["[2001:db8::7]:443"], "2001:db8::/64"),
    "a balancer that is not trusted": ("10.1.0.5", ["192.0.2.7"], "balancer 10.1.0.5"),
    "no header": ("10.0.0.5", [], "balancer 10.0.0.5"),
    "what is no address": ("10.0.0.5", ["192.0.2.7, unknown"], "balancer 10.0.0.5"),
    "balancers only": ("10.0.0.5", ["10.0.0.6"], "balancer 10.0.0.5"),
}


@pytest.mark.parametrize("kind", FORWARDED)
async def test_a_trusted_balancer_says_who_calls(kind):
    peer, headers, network = FORWARDED[kind]
    port = BalancerPort(OnePort(), (network_named("10.0.0.0/24"),))
    assert port.network_of(peer, headers) == network


async def test_attempts_to_join_are_counted_by_the_forwarded_address(balanced, caplog):
    member = await balanced.member("phone-0")
    forged = request_of(member, balanced.token("phone-1"), proof=b"p" * 64)
    authority = balanced.server.members.authority_certificate
    balanced.server.joining._bucket.burst = 1.0
    balanced.server.joining._bucket.per_second = 0.0

    async def attempt(caller):
        async with (
            dialled(balanced.port, caller=caller) as address,
            joining.join_channel(
                joining.road_to(address), trusting(authority), (), 20.0
            ) as channel,
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(JOIN)(forged.SerializeToString(), timeout=20.0)
            return caught.value.code()

    assert await attempt("192.0.2.7") is grpc.StatusCode.PERMISSION_DENIED
    assert await attempt("192.0.2.7") is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await attempt("192.0.2.8") is grpc.StatusCode.PERMISSION_DENIED
    balanced.server.balancer._trusted = ()
    for _ in range(3):  # as one, it has many more
        assert await attempt("192.0.2.7") is grpc.StatusCode.PERMISSION_DENIED


async def test_a_health_check_finds_the_port(balanced):
    port = balanced.port
    assert await asyncio.to_thread(takes_websockets, "127.0.0.1", port)
    other = balanced.server.link_port
    with contextlib.suppress(OSError):
        assert not await asyncio.to_thread(takes_websockets, "127.0.0.1", other)


@contextlib.asynccontextmanager
async def quiet_link(fleet):
    """A participant's end of a tunnel to the joining service, on which nothing happens."""
    reader, writer = await opened(fleet.port)
    protocol = Protocol(CLIENT, state=OPEN, max_size=None)
    near, far = socket.socketpair()
    ends = []
    tunnel = Tunnel(protocol, writer.transport, ends.append, kept=(reader, writer))
    await tunnel.start(far)
    near.sendall(first_message())
    await wait_until(lambda: fleet.server.balancer._tunnels)
    (other,) = fleet.server.balancer._tunnels
    yield tunnel, other, ends, near
    tunnel.abort()
    near.close()


async def test_pings_keep_a_quiet_link_and_silence_ends_it(balanced):
    async with quiet_link(balanced) as (tunnel, other, ends, _):
        for end in (tunnel, other):
            end._received -= PING_SECONDS
        before = (tunnel._received, other._received)
        tunnel._watch()  # as after that time
        await wait_until(lambda: (tunnel._received > before[0]) and (other._received > before[1]))
        assert ends == []
        tunnel._received -= SILENT_SECONDS + 1
        tunnel._watch()
        assert ends == [f"has passed nothing on for {SILENT_SECONDS:.0f} s"]
    end = other = None  # the test does not keep it

    def is_forgotten():
        gc.collect()
        return not balanced.server.balancer._tunnels

    await wait_until(is_forgotten)


@pytest.mark.parametrize("place", ["server", "participant"])
async def test_silence_ends_only_what_is_read(balanced, place):
    """An end that reads nothing, because its own receiver takes nothing, cannot know."""
    async with quiet_link(balanced) as (tunnel, other, _, _):
        end = other if place == "server" else tunnel
        await wait_until(lambda: end._inner is not None)
        end.pause_outer()
        end._received -= SILENT_SECONDS + 1
        end._watch()
        assert end._is_open
        end.resume_outer()
        end._received -= SILENT_SECONDS + 1
        end._watch()
        assert not end._is_open


async def test_what_was_closed_with_something_left_to_send_can_be_ended_again(balanced):
    """As it is after some seconds, when it may have sent it."""

    def received(near):
        return sum(len(data) for data in iter(lambda: near.recv(1 << 20), b""))

    async with quiet_link(balanced) as (tunnel, _, _, near):
        await wait_until(lambda: tunnel._inner is not None)
        tunnel._inner.write(bytes(5_000_000))
        tunnel._finish("")
        assert await asyncio.to_thread(received, near) >= 5_000_000
        tunnel.abort()


async def test_who_does_not_take_pongs_is_closed(balanced, monkeypatch):
    monkeypatch.setattr(balancer_port, "_MOST_WAITING", 4 << 10)
    _, writer = await opened(balanced.port)
    writer.transport.pause_reading()
    ping = b"\x89\xfd\0\0\0\0" + b"x" * 125
    with contextlib.suppress(ConnectionError):
        while not writer.transport.is_closing() and balanced.server.balancer._arriving:
            writer.write(ping * 1000)
            await asyncio.sleep(0)
    writer.transport.abort()
    await wait_until(lambda: not balanced.server.balancer._arriving)
