"""Participants behind an HTTP proxy, over real TLS; only the proxy knows where the server is."""

import asyncio
import logging
import re

import pytest
from click.testing import CliRunner
from tests.connect_proxy import INSPECTOR, ConnectProxy
from tests.server.runs.operations.test_doctor import examined
from tests.server.scripted_participant import (
    ScriptedParticipant,
    payload_of,
    replying,
    training_request,
)
from tests.server.service.conftest import Fleet
from tests.server.waiting import wait_until

from isthmus.doctor import checks
from isthmus.errors import AdmissionRefused, UserError
from isthmus.identity import joining
from isthmus.identity.membership import Membership
from isthmus.identity.obstacles import presented
from isthmus.identity.proxies import ProxyChoice, RoadBlocked, road_to
from isthmus.transport import dial_order, refused_logins
from isthmus.transport.blobs import describe, into
from isthmus.wire import link_pb2
from isthmus.wire import operator_pb2 as pb
from isthmus_clients.commands import client
from isthmus_datacenter.commands import datacenter
from isthmus_server.cli.operators import OperatorClient

HUB = "hub.invalid"
SECRET = "s3cret:pa ss"


@pytest.fixture
async def hub(tmp_path, monkeypatch):
    """A server whose name is known to the proxy only, and the proxy."""
    for name in ("https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    hub = Fleet(tmp_path, [HUB])
    await hub.listen(queue=True)
    hub.url = hub.url.replace("localhost", HUB)
    hub.address = hub.address.replace("localhost", HUB)
    async with ConnectProxy({HUB: "127.0.0.1"}) as proxy:
        hub.proxy = proxy
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        yield hub
        await hub.close()


def login_file(folder, text=f"device:{SECRET}"):
    file = folder / "login"
    file.write_text(f"{text}\n")
    file.chmod(0o600)
    return file


def joined(hub, name="phone", kind="client", choice=None):
    return joining.join(hub.url, hub.token(name, kind), hub.folder / name, kind, choice)


def no_link(caplog):
    """The sentences of the log that say why there is no link."""
    return [text for text in caplog.messages if text.startswith("no link to")]


async def first_complaint(hub, member, caplog, **more):
    """What a device logs that gets no link."""
    caplog.clear()
    task = hub.dial(member, ScriptedParticipant(replying(examples=5)), **more)
    await wait_until(lambda: no_link(caplog))
    task.cancel()
    return no_link(caplog)[0]


async def test_a_device_joins_and_works_through_the_proxy_of_the_variable(hub, caplog):
    caplog.set_level(logging.INFO)
    member = await joined(hub)
    assert member.server == hub.address
    way = f"through the proxy {hub.proxy.url} (HTTPS_PROXY)"
    assert f"connections to {hub.url} go {way}" in caplog.messages
    hub.dial(member, ScriptedParticipant(replying(examples=5)))
    await wait_until(lambda: "phone" in hub.link.peers)
    assert (await hub.link.ask("phone", training_request(hub.link))).trained.examples == 5
    assert caplog.messages.count(f"connections to {hub.address} go {way}") == 1
    await joined(hub, "me", "operator")
    caplog.clear()
    await asyncio.to_thread(OperatorClient, hub.folder / "me")
    assert not [line for line in caplog.messages if line.startswith("connections to ")]
    asked = {head.split()[1] for head in hub.proxy.requests}
    assert asked == {hub.url, hub.address}
    assert not any("Authorization" in head for head in hub.proxy.requests)


async def test_a_login_from_a_file_is_remembered_and_in_no_log(hub, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    monkeypatch.delenv("HTTPS_PROXY")
    hub.proxy.login = f"device:{SECRET}"
    choice = ProxyChoice.given(hub.proxy.url, login_file(hub.folder))
    await joined(hub, choice=choice)
    member = Membership(hub.folder / "phone")  # as `start` reads it
    hub.dial(member, ScriptedParticipant(replying(examples=5)))
    await wait_until(lambda: "phone" in hub.link.peers)
    way = f"through the proxy {hub.proxy.url} (--proxy when it joined)"
    assert f"connections to {hub.address} go {way}" in caplog.messages
    stored = b"".join(path.read_bytes() for path in (hub.folder / "phone").iterdir())
    for secret in ("s3cret", "czNjcmV0"):  # in Base64 too
        assert secret not in caplog.text
        assert secret.encode() not in stored


async def test_a_password_in_the_variable_is_used_and_in_no_log(hub, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    hub.proxy.login = f"device:{SECRET}"
    url = hub.proxy.url.replace("//", "//device:s3cret%3Apa%20ss@")
    monkeypatch.setenv("HTTPS_PROXY", url)
    member = await joined(hub)
    hub.dial(member, ScriptedParticipant(replying(examples=5)))
    await wait_until(lambda: "phone" in hub.link.peers)
    hub.proxy.login = "device:another"
    hub.proxy.break_tunnels()
    refused = "does not accept the user name and the password of HTTPS_PROXY"
    # The tunnel that broke may be told first.
    await wait_until(lambda: any(refused in each for each in no_link(caplog)))
    assert "s3cret" not in caplog.text
    assert "s3cret" not in repr(member.road())


FAULTS = {
    "asks for a login": (
        {"login": f"device:{SECRET}"},
        "the proxy {url} asks for a user name and a password; write USER:PASSWORD into a file of "
        "mode 0600 and give it with --proxy-login",
    ),
    "asks for Windows' login": (
        {"login": f"device:{SECRET}", "schemes": ["NTLM", "Negotiate"]},
        "the proxy {url} asks for a login by NTLM or Negotiate, and only Basic is supported; ask "
        "the network's owner to permit {hub} without a login",
    ),
    "asks for a login of several kinds": (
        {
            "login": f"device:{SECRET}",
            "schemes": ['Negotiate, Basic realm="a, b", charset="UTF-8"'],
        },
        "the proxy {url} asks for a user name and a password; write USER:PASSWORD into a file of "
        "mode 0600 and give it with --proxy-login",
    ),
    "asks for too many kinds": (
        {"login": f"device:{SECRET}", "schemes": [f"X{n}" for n in range(100)]},
        "the proxy {url} asks for a login by X0 or X1 or X2, and only Basic is supported; ask the "
        "network's owner to permit {hub} without a login",
    ),
    "has no end of headers": (
        {"login": f"device:{SECRET}", "schemes": [f"X{n}" for n in range(500)]},
        "the proxy {url} answers with more than 128 lines; check HTTPS_PROXY",
    ),
    "refuses": (
        {"status": "403 Forbidden by policy"},
        "the proxy {url} refuses connections to {hub} (403 Forbidden by policy); compare address "
        "and port with the operator's; if they are right, ask the network's owner to permit "
        "CONNECT to them",
    ),
    "does not know the server": (
        {"names": {}},
        "the proxy {url} cannot connect to {hub} (503 Service Unavailable); check the address, and "
        "that the server runs",
    ),
    "is no proxy": (
        {"raw_answer": b"SSH-2.0-OpenSSH_9.2\r\n\r\n"},
        "what answers at {url} is no HTTP proxy; check HTTPS_PROXY",
    ),
    "says nothing": (
        {"raw_answer": b""},
        "the proxy {url} closed the connection without an answer; check HTTPS_PROXY",
    ),
    "inspects TLS": (
        {"inspects": True},
        "the certificate that {hub} shows through the proxy {url} (HTTPS_PROXY) was issued by "
        f"'{INSPECTOR}', and not by the authority of an Isthmus server: something on the way "
        "inspects TLS or ends it, as some balancers do, or another service answers; ask the "
        "network's owner to exempt {hub} from TLS inspection; behind a balancer, give its address "
        "with wss://",
    ),
}


async def test_a_malformed_certificate_on_the_way_ends_no_device(hub, caplog):
    caplog.set_level(logging.INFO)
    member = await joined(hub)
    hub.proxy.inspects = hub.proxy.is_malformed = True
    sentence = f"through the proxy {hub.proxy.url} has no usable certificate"
    with pytest.raises(UserError, match=sentence):
        await joined(hub, "other")
    assert sentence in await first_complaint(hub, member, caplog)
    hub.proxy.inspects = False
    hub.dial(member, ScriptedParticipant(replying(examples=5)))
    await wait_until(lambda: "phone" in hub.link.peers)


@pytest.mark.parametrize("host", ["hub..invalid", ".hub.invalid", "a" * 70])
async def test_what_can_be_no_name_is_one_sentence(hub, host):
    hub.proxy.names[host] = "127.0.0.1"
    address = f"{host}:{hub.server.join_port}"
    with pytest.raises(
        UserError, match=f"^'{host}' can be no name of a server; check the address$"
    ):
        await joining.join(address, hub.token("phone"), hub.folder / "phone", "client")


@pytest.mark.parametrize("fault", FAULTS)
async def test_each_fault_of_a_proxy_is_one_sentence(hub, fault, caplog):
    """When a device joins, when it connects, for an operator, and for `isthmus doctor device`."""
    caplog.set_level(logging.INFO)
    member = await joined(hub)
    await joined(hub, "me", "operator")
    changes, sentence = FAULTS[fault]
    for name, value in changes.items():
        setattr(hub.proxy, name, value)
    with pytest.raises(UserError) as caught:
        await joined(hub, "other")
    assert str(caught.value) == sentence.format(url=hub.proxy.url, hub=hub.url)
    expected = sentence.format(url=hub.proxy.url, hub=hub.address)
    detour = f"through the proxy {hub.proxy.url} (HTTPS_PROXY)"
    complaint = await first_complaint(hub, member, caplog)
    assert complaint == f"no link to {hub.address} {detour}: {expected}"
    with pytest.raises(AdmissionRefused) as refused:
        await asyncio.to_thread(
            lambda: OperatorClient(hub.folder / "me").call("Jobs", pb.JobsRequest(), pb.JobsReply)
        )
    assert str(refused.value) == (
        f"the server at {hub.address} cannot be reached {detour}: {expected}"
    )
    code, found = await asyncio.to_thread(examined, "device", hub.folder / "phone")
    assert code == 1
    assert found["road"]["found"] == f"connections to {hub.address} go {detour}"
    server = found["server"]
    assert (server["level"], f"{server['found']}; {server['remedy']}") == ("FAIL", expected)
    assert "clock" not in found


async def test_another_reason_is_told_at_once_and_from_the_fourth_try_on_as_a_warning(hub, caplog):
    caplog.set_level(logging.INFO)
    member = await joined(hub)
    caplog.clear()
    hub.proxy.status = "403 Forbidden"
    hub.dial(member, ScriptedParticipant(replying(examples=5)))
    tries = "(16 tries so far)"
    await wait_until(lambda: tries in caplog.text)
    before = no_link(caplog)
    assert len(before) == 5
    hub.proxy.names = {}
    await wait_until(lambda: "cannot connect to" in caplog.text)
    assert "(32 tries so far)" not in caplog.text
    levels = [each.levelname for each in caplog.records if each.message in before]
    assert levels == ["INFO", "INFO", "WARNING", "WARNING", "WARNING"]


async def test_a_wrong_password_is_told_from_a_missing_one(hub, caplog):
    caplog.set_level(logging.INFO)
    member = await joined(hub)
    hub.proxy.login = "device:other"
    file = login_file(hub.folder)
    complaint = await first_complaint(hub, member, caplog, proxy=ProxyChoice.given(None, file))
    assert complaint.endswith(
        f"the proxy {hub.proxy.url} does not accept the user name and the password of {file}; "
        "correct them"
    )


@pytest.mark.parametrize("through_balancer", [False, True])
async def test_a_wrong_password_is_not_tried_until_the_account_is_locked(
    hub, caplog, through_balancer
):
    """Five wrong passwords within half an hour lock an account in many networks."""
    caplog.set_level(logging.INFO)
    member = await joined(hub)
    if through_balancer:
        hub.address = f"wss://{hub.address}/isthmus"
    hub.proxy.login = f"device:{SECRET}"
    file = login_file(hub.folder, "device:wrong")
    before = len(hub.proxy.requests)
    choice = ProxyChoice.given(None, file)
    hub.dial(member, ScriptedParticipant(replying(examples=5)), proxy=choice)
    await wait_until(lambda: "does not accept the user name and the password" in caplog.text)
    await asyncio.sleep(1.5)  # thirty of the pauses without this
    assert len(hub.proxy.requests) - before <= 2
    if not through_balancer:
        login_file(hub.folder)
        await wait_until(lambda: "phone" in hub.link.peers)


def test_pauses_after_a_wrong_password_are_longer_than_a_lock_counts(monkeypatch):
    at = 0.0

    async def sleep(seconds):
        nonlocal at
        at += seconds

    monkeypatch.setattr(refused_logins.asyncio, "sleep", sleep)
    monkeypatch.setattr(refused_logins.time, "monotonic", lambda: at)
    refused = refused_logins.RefusedLogin()
    tries = [0.0]
    while at < 7200.0:
        tries.append(at)
        refused.note("wrong", "it is wrong")
        loop = asyncio.new_event_loop()
        loop.run_until_complete(refused.pause(lambda: "wrong"))
        loop.close()
    assert tries[2] == pytest.approx(60.0)
    assert max(sum(0 <= each - first < 1800 for each in tries) for first in tries) <= 4
    refused.note("other", "it is wrong")
    assert not refused.is_same("wrong")
    assert refused.is_resting("other")
    at += 900.0
    assert not refused.is_resting("other")


async def test_a_password_that_is_changed_holds_from_the_next_connection_on(hub, caplog):
    caplog.set_level(logging.INFO)
    file = login_file(hub.folder)
    hub.proxy.login = f"device:{SECRET}"
    member = await joined(hub, choice=ProxyChoice.given(None, file))
    hub.dial(member, ScriptedParticipant(replying(examples=5)))
    await wait_until(lambda: "phone" in hub.link.peers)
    hub.proxy.login = "device:new"
    file.unlink()
    hub.proxy.break_tunnels()
    await wait_until(lambda: any("cannot be read: No such file" in t for t in no_link(caplog)))
    login_file(hub.folder, "device:new")
    await wait_until(lambda: "phone" in hub.link.peers)


async def test_a_proxy_that_cannot_be_reached(hub, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    member = await joined(hub)
    free = hub.proxy.port
    await hub.proxy.__aexit__()
    expected = f"the proxy http://127.0.0.1:{free} cannot be reached: Connection refused; "
    expected += "check HTTPS_PROXY"
    assert (await first_complaint(hub, member, caplog)).endswith(expected)
    with pytest.raises(UserError, match=f"^{re.escape(expected)}$"):
        await joined(hub, "other")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.invalid:3128")
    with pytest.raises(UserError, match=r"^the name proxy.invalid of HTTPS_PROXY has no known ad"):
        await joined(hub, "other")
    monkeypatch.delenv("HTTPS_PROXY")
    with pytest.raises(
        UserError,
        match=rf"^the name {HUB} has no known address; .*; where only a proxy knows names, give it "
        "with --proxy$",
    ):
        await joined(hub, "other")


async def test_a_proxy_that_does_not_answer(hub, monkeypatch):
    await joined(hub)
    monkeypatch.setattr(joining, "_TIMEOUT", 0.2)
    monkeypatch.setattr(ConnectProxy, "_serve", lambda *_: asyncio.sleep(100))
    sentence = f"the proxy {hub.proxy.url} did not answer in time; the proxy may not find {HUB}, "
    sentence += (
        "or not reach it: compare the address with the operator's, or ask the network's owner"
    )
    with pytest.raises(UserError, match=f"^{sentence}$"):
        await joined(hub, "other")
    balanced = road_to(f"wss://{hub.url}/isthmus")
    with pytest.raises(RoadBlocked, match=f"^{sentence}$"):
        await presented(balanced, 0.2)


async def test_a_transfer_in_which_the_proxy_dies_goes_on(hub, caplog):
    caplog.set_level(logging.INFO)
    payload = payload_of(3_000_000)
    blob = describe(payload)
    hub.link.publish(blob, payload)

    async def reverse(participant, request, model):
        result = bytearray(reversed(model))
        return link_pb2.Reply(trained=link_pb2.Trained(result=describe(result))), result

    member = await joined(hub)
    worker = ScriptedParticipant(reverse)
    hub.dial(member, worker)
    await wait_until(lambda: "phone" in hub.link.peers)
    hub.proxy.carries = 1_000_000
    reply = await hub.link.ask("phone", training_request(hub.link, blob))
    assert hub.proxy.deaths == 1
    back = bytearray(reply.trained.result.size)
    await hub.link.fetch("phone", reply.trained.result, into(back))
    assert back == bytes(reversed(payload))
    assert hub.link.peers["phone"].sent.total < 1.5 * len(payload)  # it went on where it was


async def test_loopback_and_exempt_servers_are_reached_directly(hub, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    (tmp_path / "near").mkdir()
    near = Fleet(tmp_path / "near", ["localhost", "127.0.0.1"])
    await near.listen()
    try:
        member = await near.member("phone")
        near.dial(member, ScriptedParticipant(replying(examples=5)))
        await wait_until(lambda: "phone" in near.link.peers)
        assert not hub.proxy.requests
        way = "directly (HTTPS_PROXY is not for this machine itself)"
        assert f"connections to {near.address} go {way}" in caplog.messages
        hub.proxy.names["localhost"] = "127.0.0.1"
        choice = ProxyChoice(url=hub.proxy.url)
        await joining.join(near.url, near.token("a"), tmp_path / "a", "client", choice)
        assert {head.split()[1] for head in hub.proxy.requests} == {near.url}
    finally:
        await near.close()
    monkeypatch.setenv("NO_PROXY", ".invalid")
    with pytest.raises(UserError, match=f"^the name {HUB} has no known address"):
        await joined(hub)


async def test_the_commands_of_a_device_have_the_options(hub, tmp_path, monkeypatch):
    """What `join` was told holds for the commands that follow, without another word."""
    monkeypatch.delenv("HTTPS_PROXY")
    hub.proxy.login = f"device:{SECRET}"
    proxy = ["--proxy", hub.proxy.url, "--proxy-login", str(login_file(tmp_path))]
    (tmp_path / "token").write_text(str(hub.token("phone")))
    state = str(tmp_path / "phone")
    words = ["join", hub.url, "--token-file", str(tmp_path / "token"), "--state", state, *proxy]
    result = await asyncio.to_thread(CliRunner().invoke, client, words, catch_exceptions=False)
    assert f"this device is 'phone' at {hub.address}" in result.output
    code, found = await asyncio.to_thread(examined, "device", state)
    assert (code, found["server"]["level"], found["clock"]["level"]) == (0, "OK", "OK")
    assert found["road"]["found"].endswith(
        f"go through the proxy {hub.proxy.url} (--proxy when it joined)"
    )
    code, found = await asyncio.to_thread(examined, "device", state, "--proxy", "none")
    assert (code, found["server"]["level"]) == (1, "FAIL")
    assert found["server"]["found"] == f"the name {HUB} has no known address"


async def test_the_nodes_of_a_cluster_get_the_options_of_launch(hub, tmp_path):
    file = login_file(tmp_path)
    state = tmp_path / "cluster"
    member = await joining.join(
        hub.url, hub.token("cluster", "datacenter"), state / "membership", "datacenter"
    )
    words = ["launch", "--ranks", "1", "--state", str(state), "--dry-run", "--proxy", hub.proxy.url]
    words += ["--proxy-login", str(file)]
    result = await asyncio.to_thread(CliRunner().invoke, datacenter, words, catch_exceptions=False)
    assert f" --server {member.server} " in result.output
    assert f" --proxy {hub.proxy.url} --proxy-login {file} --control " in result.output
    words[4] = str(tmp_path / "new")
    refused = await asyncio.to_thread(CliRunner().invoke, datacenter, [*words, "--server", "a:1"])
    assert str(refused.exception) == (
        "--proxy, --proxy-login and --balancer-ca need a datacenter that has joined a server"
    )


async def test_a_unit_has_the_proxy_of_the_variable_and_never_its_password(hub, monkeypatch):
    await joined(hub)
    words = ["start", "--state", str(hub.folder / "phone"), "--print-systemd"]
    monkeypatch.setattr("sys.argv", ["isthmus", "client", *words])
    invoke = CliRunner().invoke
    printed = await asyncio.to_thread(invoke, client, words, catch_exceptions=False)
    assert f" --proxy {hub.proxy.url}\n" in printed.output
    monkeypatch.setenv("HTTPS_PROXY", hub.proxy.url.replace("//", "//device:s3cret@"))
    refused = await asyncio.to_thread(invoke, client, words)
    file = login_file(hub.folder)
    await joined(hub, "other", choice=ProxyChoice.given(None, file))
    words[2] = str(hub.folder / "other")
    printed = await asyncio.to_thread(invoke, client, words, catch_exceptions=False)
    assert f" --proxy {hub.proxy.url} --proxy-login {file}\n" in printed.output
    assert isinstance(refused.exception, UserError)
    assert str(refused.exception).startswith("a systemd unit has no place for the proxy's password")
    assert "s3cret" not in f"{refused.output}{refused.exception}"


async def test_who_says_nothing_after_the_connection_is_no_matter_of_the_clock(hub):
    """As in a network that loses large packets: a participant's certificate is the first."""
    member = await joined(hub)
    road = member.road()
    hub.proxy.largest = 600
    reached = await asyncio.to_thread(checks.server_reached, member, road)
    assert reached.level == "OK"
    silent = await asyncio.to_thread(checks.clock, member, road, 1.0)
    assert (silent.level, silent.what) == ("FAIL", "answer")
    way = f"through the proxy {hub.proxy.url} (HTTPS_PROXY)"
    assert silent.found.startswith(f"{hub.address} {way} takes connections, and nobody answered")
    assert "smaller MTU" in silent.remedy


@pytest.mark.parametrize(("silent_after", "what"), [(0.0, "answer"), (600.0, "clock")])
async def test_a_server_that_gives_up_a_silent_connection_is_told_from_one_that_refuses(
    hub, monkeypatch, silent_after, what
):
    """It closes a connection after some seconds without this machine, and a refused one at once."""
    monkeypatch.setattr(checks, "_SILENT_SECONDS", silent_after)
    member = await joined(hub)
    hub.proxy.largest = 600
    asking = asyncio.create_task(asyncio.to_thread(checks.clock, member, member.road(), 60.0))
    await wait_until(lambda: hub.proxy.lost)
    hub.proxy.break_tunnels()
    found = await asking
    assert (found.level, found.what) == ("FAIL", what)


@pytest.mark.parametrize("through_balancer", [False, True])
async def test_the_way_back_does_not_try_a_password_until_the_account_is_locked(
    hub, caplog, monkeypatch, through_balancer
):
    """A password may expire while a stream is open, which goes on."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(dial_order, "FIRST_RETURN_SECONDS", 0.2)
    monkeypatch.setattr(dial_order, "LONGEST_RETURN_SECONDS", 0.2)
    hub.proxy.login = f"device:{SECRET}"
    file = login_file(hub.folder)
    member = await joined(hub, choice=ProxyChoice.given(None, file))
    server = hub.address
    hub.address = f"wss://{HUB}:1/isthmus" if through_balancer else f"{HUB}:1"
    hub.dial(member, ScriptedParticipant(replying(examples=5)), others=(server,))
    await wait_until(lambda: "phone" in hub.link.peers)
    asked = len(hub.proxy.requests)
    await wait_until(lambda: len(hub.proxy.requests) > asked + 1)
    hub.proxy.login = "device:new"
    await wait_until(lambda: "does not accept the user name and the password" in caplog.text)
    asked = len(hub.proxy.requests)
    await asyncio.sleep(2)  # ten of the pauses without this
    assert len(hub.proxy.requests) == asked
    assert "phone" in hub.link.peers
    login_file(hub.folder, "device:new")
    await wait_until(lambda: len(hub.proxy.requests) > asked + 1)
