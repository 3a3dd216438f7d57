import asyncio
import contextlib
import datetime
import errno
import io
import os
import socket
import ssl
import stat
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import grpc.aio
import pytest
from click.testing import CliRunner
from tests.server.idle_callers import anyones_tls, idle_callers
from tests.server.scripted_participant import replying, training_request
from tests.server.waiting import wait_until

from isthmus.errors import AdmissionRefused, UserError
from isthmus.identity import joining, membership, tls
from isthmus.identity.join_channel import JOIN_PROTOCOLS, join_channel, trusting
from isthmus.identity.joining import JOIN, Token
from isthmus.identity.membership import Membership
from isthmus.identity.proxies import Road
from isthmus.wire import join_pb2
from isthmus_server.cli.server import server
from isthmus_server.fleet import joining as fleet_joining
from isthmus_server.fleet.authority import initialise
from isthmus_server.fleet.joining import MAX_CALLERS, TokenBucket
from isthmus_server.fleet.registry import Registry
from isthmus_server.service.server import ControlPlaneServer
from isthmus_server.transport import fair_port, one_port

pytestmark = pytest.mark.usefixtures("ports")


@pytest.fixture(params=[2, 1], ids=["two ports", "one port"])
def ports(request):
    """Each of these tests is run with both."""
    return request.param


async def ask(fleet, request):
    """The reply to a join request, over TLS with the right authority."""
    authority = fleet.server.members.certificate_authority.certificate
    if fleet.one_port:
        opened = join_channel(Road(fleet.url), trusting(authority), (), 20.0)
    else:  # as an earlier release does
        credentials = grpc.ssl_channel_credentials(tls.pem(authority))
        opened = grpc.aio.secure_channel(fleet.url, credentials)
    async with opened as channel:
        data = request if isinstance(request, bytes) else request.SerializeToString()
        return await channel.unary_unary(JOIN)(data, timeout=100)


def request_of(member, token, **changes):
    """A device's join request with a new key, modified after it was signed."""
    csr = tls.signing_request(tls.new_key())
    said = joining.statement(token.fingerprint, "client", token.secret, csr)
    fields = {
        "version": 1,
        "kind": "client",
        "secret": token.secret,
        "signing_request": csr,
        "identity": member.identity_public,
        "proof": member.identity.sign(said),
    }
    return join_pb2.JoinRequest(**{**fields, **changes})


async def test_a_server_without_a_name_is_joined_by_its_address(fleet):
    fleet.state = fleet.folder / "nameless"
    initialise(fleet.state, ["127.0.0.1"])
    server = await fleet.listen()
    fleet.url = f"127.0.0.1:{server.join_port}"
    fleet.address = f"127.0.0.1:{server.link_port}"
    await fleet.join("phone-0", replying(examples=5))
    assert (await fleet.link.ask("phone-0", training_request(fleet.link))).trained.examples == 5


async def test_an_address_missing_in_the_server_certificate_is_reported(fleet):
    fleet.state = fleet.folder / "named"
    initialise(fleet.state, ["localhost", "10.0.0.7"])
    server = await fleet.listen()
    sentence = r"has no certificate for '127\.0\.0\.1'; it is known as localhost, 10\.0\.0\.7; conn"
    with pytest.raises(UserError, match=sentence):
        await joining.join(
            f"127.0.0.1:{server.join_port}", fleet.token("a"), fleet.folder / "a", "client"
        )
    await joining.join(fleet.url, fleet.token("a"), fleet.folder / "a", "client")


async def test_joining_creates_a_participant_without_sending_its_private_keys(fleet):
    await fleet.listen()
    member = await fleet.member("phone-0")
    assert (member.name, member.kind, member.server) == ("phone-0", "client", fleet.address)
    assert stat.S_IMODE(member.directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in member.directory.iterdir()} == {0o600}
    subject = tls.subject_of(member.certificate)
    assert (subject.name, subject.identity) == ("phone-0", member.identity_public)
    fleet.server.members.registry.check(subject)
    kept = b"".join(path.read_bytes() for path in fleet.state.iterdir())
    assert member.identity.private_bytes_raw() not in kept
    assert member.identity.private_bytes_raw().hex().encode() not in kept
    assert tls.key_pem(member.key) not in kept


async def test_a_token_is_used_once(fleet):
    await fleet.listen()
    token = fleet.token("phone-0")
    await joining.join(fleet.url, token, fleet.folder / "one", "client")
    with pytest.raises(
        AdmissionRefused, match="this token has been used; ask the operator for another"
    ):
        await joining.join(fleet.url, token, fleet.folder / "two", "client")
    assert len(fleet.server.members.registry.participants()) == 1


async def test_a_token_is_refused_for_another_kind(fleet):
    await fleet.listen()
    for kind in ("datacenter", "operator"):
        with pytest.raises(
            AdmissionRefused,
            match=f"this token is for a participant of kind 'client', not '{kind}'",
        ):
            await joining.join(fleet.url, fleet.token("a"), fleet.folder / kind, kind)


async def test_a_server_of_another_authority_does_not_receive_the_token(
    fleet, tmp_path, monkeypatch
):
    """An impostor replies with a certificate for the server's name."""
    await fleet.listen()
    initialise(tmp_path / "thief", ["localhost", "127.0.0.1"])
    thief = ControlPlaneServer(tmp_path / "thief")
    heard = []

    async def note(data, context):
        heard.append(data)
        return b""

    monkeypatch.setattr(thief.joining, "_join", note)
    async with thief.listening("127.0.0.1", 0):
        with pytest.raises(
            AdmissionRefused, match=r"is not the one this token is for; nothing was sent"
        ):
            await joining.join(
                f"localhost:{thief.join_port}", fleet.token("a"), fleet.folder / "a", "client"
            )
    assert heard == []


async def test_a_server_that_does_not_answer_is_no_refusal(fleet, monkeypatch):
    async def silent(*_):
        await asyncio.sleep(100)

    monkeypatch.setattr(joining, "_TIMEOUT", 2.0)
    monkeypatch.setattr(fleet_joining.JoinService, "_show_authority", silent)
    await fleet.listen()
    with pytest.raises(AdmissionRefused, match=r"took the connection and did not answer within 2 "):
        await joining.join(fleet.url, fleet.token("a"), fleet.folder / "a", "client")


async def test_an_impostor_with_a_copied_authority_does_not_receive_the_token(
    fleet, tmp_path, monkeypatch
):
    await fleet.listen()
    initialise(tmp_path / "thief", ["localhost", "127.0.0.1"])
    thief = ControlPlaneServer(tmp_path / "thief")
    monkeypatch.setattr(thief.joining, "_authority", fleet.server.joining._authority)
    async with thief.listening("127.0.0.1", 0):
        with pytest.raises(
            AdmissionRefused, match=r"is not the one this token is for; nothing was sent"
        ):
            await joining.join(
                f"localhost:{thief.join_port}", fleet.token("a"), fleet.folder / "a", "client"
            )


async def test_joining_can_be_repeated_after_a_lost_reply(fleet, monkeypatch):
    await fleet.listen()
    token, folder = fleet.token("phone-0"), fleet.folder / "phone-0"

    def lose(*args, **kept):
        raise AdmissionRefused("the power went off")

    with monkeypatch.context() as patch:
        patch.setattr(Membership, "save", lose)
        with pytest.raises(AdmissionRefused, match="the power went off"):
            await joining.join(fleet.url, token, folder, "client")
    with pytest.raises(UserError, match=r"holds no membership .*server aggregator\) join"):
        Membership(folder)
    assert (await joining.join(fleet.url, token, folder, "client")).name == "phone-0"


async def test_an_unwritable_directory_is_reported_in_one_sentence(fleet, tmp_path, monkeypatch):
    await fleet.listen()

    def full(path, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(membership, "write_private_file", full)
    with pytest.raises(UserError, match=r"state cannot be written: No space left on device$"):
        await joining.join(fleet.url, fleet.token("phone-0"), tmp_path / "state", "client")


async def test_an_existing_membership_is_not_overwritten(fleet):
    await fleet.listen()
    member = await fleet.member("phone-0")
    token = fleet.token("phone-1")
    with pytest.raises(UserError, match="holds a membership already; give another --state"):
        await joining.join(fleet.url, token, member.directory, "client")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"version": 9}, "version 9 of joining is not supported, only 1"),
        ({"kind": "king"}, "this join request is invalid"),
        ({"secret": b"short"}, "this join request is invalid"),
        ({"identity": b"k" * 32}, "this join request is not signed by its identity key"),
        ({"identity": b""}, "this join request is not signed by its identity key"),
        ({"proof": b"p" * 64}, "this join request is not signed by its identity key"),
        ({"signing_request": b"x"}, "this join request is not signed by its identity key"),
        ({"kind": "operator"}, "this join request is not signed by its identity key"),
    ],
)
async def test_a_forged_or_modified_join_request_is_refused(fleet, changes, sentence):
    await fleet.listen()
    other = await fleet.member("other")
    request = request_of(other, fleet.token("phone-0"), **changes)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(fleet, request)
    assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert caught.value.details().startswith(sentence)
    assert len(fleet.server.members.registry.participants()) == 1


@pytest.mark.parametrize("data", [b"\xff" * 100, b"\x1a\xff\xff\xff\xff\x0f"])
async def test_invalid_bytes_are_refused(fleet, data):
    await fleet.listen()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(fleet, data)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_join_request_that_is_too_large_is_not_read(fleet):
    await fleet.listen()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(fleet, bytes(joining.MAX_JOIN_BYTES + 1))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_frequent_join_attempts_are_refused_for_a_while(fleet):
    await fleet.listen()
    fleet.server.joining._bucket = TokenBucket(burst=1, per_second=0.0)
    other = await fleet.member("other")  # one that succeeds is not counted
    codes = []
    for _ in range(2):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(fleet, request_of(other, fleet.token("phone-0")))
        codes.append(caught.value.code())
    assert codes == [grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.RESOURCE_EXHAUSTED]


def test_a_token_bucket_stores_a_bounded_number_of_addresses():
    bucket = TokenBucket(burst=1, per_second=0.0, addresses=10)
    for number in range(100):
        assert bucket.take(str(number), 0.0)
    assert len(bucket._left) == 10
    assert not bucket.take("99", 0.0)
    assert bucket.take("0", 0.0)  # forgotten: an attacker of many addresses has many tries


async def test_two_thousand_unfinished_joins_do_not_block_the_server(fleet):
    await fleet.listen()
    await fleet.join("phone-0", replying(examples=3))
    open_ = []
    for number in range(2000):
        caller = socket.socket()
        caller.setblocking(False)
        caller.connect_ex(("127.0.0.1", fleet.server.join_port))
        open_.append(caller)
        if number % 200 == 0:  # meanwhile
            assert (
                await fleet.link.ask("phone-0", training_request(fleet.link))
            ).trained.examples == 3
    held = 0
    try:
        assert (await fleet.link.ask("phone-0", training_request(fleet.link))).trained.examples == 3
        await wait_until(lambda: sum(map(_turned_away, open_)) >= 2000 - MAX_CALLERS)
        held = 2000 - sum(map(_turned_away, open_))
    finally:
        for caller in open_:
            caller.close()
    assert held <= MAX_CALLERS
    await fleet.join("phone-1", replying(examples=4))  # and there is room again
    assert (await fleet.link.ask("phone-1", training_request(fleet.link))).trained.examples == 4


@pytest.mark.parametrize("kind", ["nothing", "half a handshake", "TLS"])
async def test_idle_connections_of_one_address_keep_nobody_else_out(fleet, kind, monkeypatch):
    """All 200 were places of unknown callers, for ten seconds each."""
    monkeypatch.setattr(one_port, "_HELLO_SECONDS", 300.0)
    monkeypatch.setattr(fleet_joining, "_CALLER_SECONDS", 300.0)
    await fleet.listen()
    protocols = JOIN_PROTOCOLS if fleet.one_port else ["h2"]
    places = fleet.server.joining._port._callers
    if fleet.one_port and kind != "TLS":
        places = fleet.server.one_port._arriving
    crowd = idle_callers(fleet.server.join_port, kind, protocols=protocols)
    async with crowd, asyncio.timeout(60):
        assert len(places) == MAX_CALLERS
        assert (await fleet.member("phone-0")).name == "phone-0"
        assert len(places) <= MAX_CALLERS


async def test_many_devices_of_one_address_join_at_once(fleet, monkeypatch):
    """Behind one router, and more than there are places: all are admitted, some of them later."""
    places = 16
    together = places + 8
    monkeypatch.setattr(fleet_joining, "MAX_CALLERS", places)
    # Here all of them and the server share one event loop, so that it is late on a busy machine.
    monkeypatch.setattr(joining, "_TIMEOUT", 100.0)
    monkeypatch.setattr(fleet_joining, "_CALLER_SECONDS", 100.0)
    monkeypatch.setattr(fleet_joining, "_IDLE_SECONDS", 100.0)
    monkeypatch.setattr(fair_port, "_ANSWER_SECONDS", 100.0)
    await fleet.listen()
    fingerprint = tls.fingerprint(fleet.server.members.certificate_authority.certificate)
    token = Token(os.urandom(joining.SECRET_BYTES), fingerprint)
    expires = time.time() + 600
    fleet.registry().add_token(
        token.digest, name="phone", kind="client", expires=expires, uses=together
    )
    with ThreadPoolExecutor(together) as threads:
        asyncio.get_running_loop().set_default_executor(threads)
        joined = await asyncio.gather(
            *(
                joining.join(fleet.url, token, fleet.folder / str(number), "client")
                for number in range(together)
            )
        )
    assert {member.name for member in joined} == {f"phone-{n + 1}" for n in range(together)}


async def test_a_join_opens_two_connections(fleet, monkeypatch):
    """One gets the authority and sees the server's certificate; one trusts that authority."""
    await fleet.listen()
    opened = []
    take = fair_port.FairPort.admit
    monkeypatch.setattr(fair_port.FairPort, "admit", lambda *of: opened.append(1) or take(*of))
    await fleet.member("phone-0")
    assert len(opened) == 2


async def test_a_balancer_that_ends_tls_is_named(fleet, tmp_path):
    """One that has the server's own key and certificate, and offers no HTTP/2."""
    await fleet.listen()
    (tmp_path / "pair").write_bytes(b"".join(fleet.server.pair))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "pair")
    heard = []

    async def note(reader, writer):
        with contextlib.suppress(OSError):
            heard.append(await reader.read(1))
        writer.transport.abort()

    balancer = await asyncio.start_server(note, "127.0.0.1", 0, ssl=context)
    address = f"localhost:{balancer.sockets[0].getsockname()[1]}"
    with pytest.raises(UserError) as caught:
        await joining.join(address, fleet.token("a"), tmp_path / "a", "client")
    balancer.close()
    assert str(caught.value) == (
        f"what answers at {address} is not where a server is joined; check the port; a balancer "
        "between has to pass TLS on, or to forward a WebSocket at an address with wss://"
    )
    assert heard in ([], [b""])


async def test_a_handshake_that_is_not_finished_is_closed_early(fleet, timeouts):
    """Its caller was sent the server's part of it; one that has finished it stays."""
    await fleet.listen()
    port = fleet.server.join_port
    context = anyones_tls(JOIN_PROTOCOLS)
    finished, finishing = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    hello = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), hello).do_handshake()
    begun, beginning = await asyncio.open_connection("127.0.0.1", port)
    beginning.write(hello.read())
    assert await begun.read(1)
    callers = fleet.server.joining._port._callers
    await wait_until(lambda: [caller._answered for caller in callers].count(True) == 1)
    await timeouts.expire(fair_port._ANSWER_SECONDS)
    while await begun.read(1 << 16):
        pass
    assert len(callers) == 1
    assert not finished.at_eof()
    for writer in (finishing, beginning):
        writer.transport.abort()


def _turned_away(caller):
    try:
        return caller.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    "text",
    ["", "isthmus-", "hello", str(Token(bytes(16), bytes(32)))[:-1], "isthmus-" + "é" * 64],
)
def test_an_incomplete_token_is_reported(text):
    with pytest.raises(UserError, match="this join token is incomplete"):
        Token.parse(text)


@pytest.mark.parametrize("url", ["localhost", "localhost:", ":9401", "localhost:99999", "host:²"])
async def test_an_invalid_address_is_reported(tmp_path, url):
    with pytest.raises(UserError, match="is not of the form HOST:PORT"):
        await joining.join(url, Token(bytes(16), bytes(32)), tmp_path / "state", "client")


@pytest.mark.parametrize(
    ("url", "scheme"),
    [("https://10.9.2.2/isthmus", "begins with https://"), ("10.9.2.2/isthmus", "is not of the")],
)
async def test_a_page_s_address_is_repeated_and_wss_is_named(tmp_path, url, scheme):
    with pytest.raises(UserError, match=f"^the server's address '{url}' {scheme}.*, or wss://HOST"):
        await joining.join(url, Token(bytes(16), bytes(32)), tmp_path / "state", "client")


def test_the_last_port_is_refused_because_joining_needs_the_next(fleet):
    arguments = ["start", str(fleet.state), "--address", "127.0.0.1:65535"]
    result = CliRunner().invoke(server, arguments)
    assert str(result.exception) == (
        "--address '127.0.0.1:65535' has no next port, which is needed for joining; choose "
        "another, or add --one-port"
    )


@pytest.fixture
def tokyo(monkeypatch):
    """A local time nine hours ahead of UTC."""
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


async def test_participants_are_listed_in_utc(fleet, tokyo):
    await fleet.listen()
    await fleet.member("phone-0")
    (entry,) = fleet.registry().participants()
    output = CliRunner().invoke(server, ["participants", str(fleet.state)]).output
    until = datetime.datetime.fromtimestamp(entry.not_after, datetime.UTC)
    assert "certificate until (UTC)" in output
    assert f"{until:%Y-%m-%d %H:%M}" in output


@pytest.mark.parametrize(
    "words", ["participants STATE", "revoke STATE a", "token create STATE --name a"]
)
def test_a_damaged_registry_is_reported_in_one_sentence(fleet, words):
    with contextlib.closing(Registry(fleet.state)) as registry:
        registry._db.execute("DROP TABLE participants")
        registry._db.execute("CREATE TABLE participants (name TEXT)")
    arguments = words.replace("STATE", str(fleet.state)).split()
    error = CliRunner().invoke(server, arguments).exception
    assert isinstance(error, UserError)
    assert str(error).startswith(
        f"{fleet.state / 'fleet.sqlite'} was written by another version of isthmus, or is damaged"
    )


@pytest.mark.parametrize("ports", [2])
async def test_joining_at_the_port_of_the_link_mentions_the_join_port(fleet, tmp_path, monkeypatch):
    await fleet.listen()
    monkeypatch.setattr(joining, "_TRIES", 1)
    with pytest.raises(
        AdmissionRefused, match=r"^no server accepts joins at .* the one after that of"
    ):
        await joining.join(fleet.address, fleet.token("phone-0"), tmp_path / "state", "client")


@pytest.mark.parametrize("ports", [2])
async def test_a_channel_for_joins_that_the_server_has_ended_is_left_without_an_error(fleet):
    await fleet.listen()
    context = trusting(None)  # and no certificate of its own, which the link's port asks for
    async with join_channel(Road(fleet.address), context, (), 20.0) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary(joining.AUTHORITY)(b"", timeout=20.0)
        await asyncio.gather(
            *[task for task in asyncio.all_tasks() if task.get_coro().__name__ == "_copy"]
        )


async def test_an_unreachable_server_is_reported(tmp_path):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(UserError, match=f"^{url} cannot be reached: Connection refused; "):
            await joining.join(url, Token(bytes(16), bytes(32)), tmp_path / "state", "client")


@pytest.mark.parametrize("source", ["file", "standard input"])
def test_a_token_is_read_from_a_file_or_standard_input(tmp_path, monkeypatch, source):
    token = Token(bytes(16), bytes(32))
    path = tmp_path / "token"
    path.write_text(f"{token}\n")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{token}\n"))
    assert Token.given(None, str(path) if source == "file" else "-") == token


def test_a_token_must_be_given_once_and_be_readable(tmp_path):
    for text, file in ((None, None), ("isthmus-a", "b")):
        with pytest.raises(UserError, match="either as TOKEN or with --token-file, and not both"):
            Token.given(text, file)
    with pytest.raises(
        UserError, match=r"--token-file .*missing cannot be read: No such file [^:]+$"
    ):
        Token.given(None, str(tmp_path / "missing"))
