"""An authority, a server and devices as separate parties, over real TLS on loopback."""

import asyncio
import contextlib
import logging
import os
import re
import stat
import time

import pytest
from click.testing import CliRunner
from tests.connect_proxy import ConnectProxy
from tests.free_ports import free_ports
from tests.server.idle_callers import idle_callers
from tests.server.real_nginx import certified, ending_configuration, nginx
from tests.server.scripted_participant import ScriptedParticipant, replying, training_request
from tests.server.waiting import wait_until

from isthmus.errors import AdmissionRefused, DamagedError, UserError
from isthmus.identity import joining, tls
from isthmus.identity.membership import Membership, prepare
from isthmus.identity.proxies import ProxyChoice
from isthmus.transport.uplink import Uplink
from isthmus.wire import authority_pb2 as pb
from isthmus.wire import link_pb2
from isthmus_privacy.secagg.identity import Directory, Enrolment
from isthmus_server.cli.authority import authority as authority_command
from isthmus_server.cli.server import server as server_command
from isthmus_server.fleet import remote_authority
from isthmus_server.fleet.authority import CertificateAuthority, initialise
from isthmus_server.fleet.authority_service import AuthorityService
from isthmus_server.fleet.registry import Registry
from isthmus_server.service.server import BalancerListener, ControlPlaneServer


class SeparateFleet:
    """An authority and a server that has joined it, with helpers for participants."""

    def __init__(self, folder, serves=None):
        self.folder = folder
        self.port = free_ports(4)  # each process has two, for what has joined and for joining
        initialise(folder / "authority", ["localhost"], serves or f"localhost:{self.port}")
        self.authority = None
        self.connections = []
        self.stack = contextlib.AsyncExitStack()
        self.authority_stack = contextlib.AsyncExitStack()
        self.authority_port = self.port + 2

    async def start_authority(self):
        self.authority = AuthorityService(self.folder / "authority")
        await self.authority_stack.enter_async_context(
            self.authority.listening("127.0.0.1", self.authority_port)
        )
        self.url = f"localhost:{self.authority.join_port}"

    def token(self, name, kind="client"):
        with contextlib.closing(Registry(self.folder / "authority")) as registry:
            certificate = self.authority.members.authority_certificate
            token = joining.Token(os.urandom(16), tls.fingerprint(certificate))
            registry.add_token(token.digest, name=name, kind=kind, expires=time.time() + 600)
        return token

    async def member(self, name, kind="client"):
        return await joining.join(self.url, self.token(name, kind), self.folder / name, kind)

    async def listen(self, **ports):
        """Start a server that has joined."""
        if not (self.folder / "hub").exists():
            await self.member("hub", tls.SERVER)
        server = ControlPlaneServer(self.folder / "hub")
        await self.stack.enter_async_context(server.listening("127.0.0.1", self.port, **ports))
        return server

    def dial(self, member, worker=None, proxy=None):
        uplink = Uplink(
            member.server,
            member.name,
            link_pb2.CLIENT,
            worker or ScriptedParticipant(replying(examples=5)),
            identity=member.identity_public,
            longest_pause=0.05,
            membership=member,
            proxy=proxy,
        )
        self.connections.append(asyncio.create_task(uplink.run()))
        return self.connections[-1]

    async def close(self):
        for task in self.connections:
            task.cancel()
        await asyncio.gather(*self.connections, return_exceptions=True)
        await self.stack.aclose()
        await self.authority_stack.aclose()


@pytest.fixture
async def separate(tmp_path):
    separate = SeparateFleet(tmp_path)
    await separate.start_authority()
    yield separate
    await separate.close()


async def test_a_device_joins_at_the_authority_and_works_for_the_server(separate):
    server = await separate.listen()
    assert server.link.enrolments.deployment == "separate"
    member = await separate.member("phone")
    assert member.server == f"localhost:{separate.port}"
    separate.dial(member)  # before the server could have copied the registry
    await wait_until(lambda: "phone" in server.link.peers)
    assert (await server.link.ask("phone", training_request(server.link))).trained.examples == 5
    enrolment = server.members.current["phone"]
    Directory(member.enroller).check(enrolment)
    assert (enrolment.identity_key, enrolment.population) == (member.identity_public, 1)
    for path in (separate.folder / "hub").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


async def test_an_authority_may_name_the_balancer_before_its_server(tmp_path):
    """Devices join at the authority itself, and reach the server through the balancer."""
    folder = tmp_path / "nginx"
    folder.mkdir()
    port = free_ports(1)
    url = f"wss://localhost:{port}/isthmus"
    separate = SeparateFleet(tmp_path, url)
    await separate.start_authority()
    try:
        balancer = BalancerListener("127.0.0.1", 0)
        server = await separate.listen(one_port=True, balancer=balancer)
        ca, pair = certified(folder, ["localhost"])
        place = f"127.0.0.1:{port}"
        text = ending_configuration(folder, pair, place, server.balancer_port)
        async with nginx(text, folder, port):
            member = await separate.member("phone")
            assert member.server == url
            separate.dial(member, proxy=ProxyChoice.given(None, None, ca))
            await wait_until(lambda: "phone" in server.link.peers)
            request = training_request(server.link)
            assert (await server.link.ask("phone", request)).trained.examples == 5
    finally:
        await separate.close()


def test_a_server_cannot_join_an_authority_through_a_balancer(tmp_path):
    state = str(tmp_path / "hub")
    words = ["init", state, "--authority", "wss://trust.example.org/a", "--token-file", "none"]
    found = CliRunner().invoke(server_command, words).exception
    assert isinstance(found, UserError)
    assert "give HOST:PORT of its port for joining" in str(found)


async def test_idle_connections_keep_no_server_out_of_its_authority(separate):
    """Without a certificate nobody gets an answer there, and anybody can open connections."""
    await separate.member("hub", tls.SERVER)
    async with idle_callers(separate.authority.port, "half a handshake"), asyncio.timeout(15):
        server = await separate.listen()
        assert server.members.copy.copied


async def test_a_server_behind_a_proxy_reaches_its_authority(separate, caplog):
    """The registry comes through the proxy that the server was given when it joined."""
    async with ConnectProxy({"localhost": "127.0.0.1"}) as proxy:
        token = separate.token("hub", tls.SERVER)
        choice = ProxyChoice(url=proxy.url)
        await joining.join(separate.url, token, separate.folder / "hub", tls.SERVER, choice)
        await separate.member("phone")
        server = await separate.listen()
        authority = f"localhost:{separate.authority.port}"
        assert {head.split()[1] for head in proxy.requests} == {separate.url, authority}
        proxy.status = "403 Forbidden"
        proxy.break_tunnels()
        refused = f"the proxy {proxy.url} refuses connections to {authority} (403 Forbidden)"
        await wait_until(lambda: refused in caplog.text)
        member = Membership(separate.folder / "phone")
        separate.dial(member)  # by the copy of the registry
        await wait_until(lambda: "phone" in server.link.peers)
    (separate.folder / "hub/registry.copy").unlink()
    (separate.folder / "hub/registry.head").unlink()
    with pytest.raises(
        UserError, match=f"^the authority at {authority} cannot be reached: the pro"
    ):
        await remote_authority.RemoteMembers(separate.folder / "hub").first_copy()


async def test_the_server_has_no_key_that_could_enrol_or_certify(separate):
    await separate.listen()
    names = {path.name for path in (separate.folder / "hub").iterdir()}
    assert not names & {"enroller.key", "server.pem", "fleet.sqlite"}
    assert b"PRIVATE" not in (separate.folder / "hub" / "authority.pem").read_bytes()
    hub = str(separate.folder / "hub")
    for arguments in (["token", "create", hub, "--name", "x"], ["revoke", hub, "phone"]):
        error = CliRunner().invoke(server_command, arguments).exception
        assert isinstance(error, UserError)
        assert "is another process, which has the registry; use `isthmus authority`" in str(error)
    # Who has joined is in its copy of the registry.
    assert CliRunner().invoke(server_command, ["participants", hub]).exit_code == 0


async def test_only_devices_are_enrolled_for_sums(separate):
    """A server could fill a sum with the enrolments of datacenters, which are its operator's."""
    server = await separate.listen()
    for name, kind in (("phone", "client"), ("cluster", "datacenter")):
        await separate.member(name, kind)
    await server.members._sync(not_before=time.monotonic())
    copy = server.members.copy
    assert {"phone", "cluster"} <= {each.name for each in copy.participants()}
    assert Enrolment.from_bytes(copy.enrolment("phone")).name == "phone"
    assert copy.enrolment("cluster") == b""


async def test_a_server_that_passes_on_few_renewals_makes_no_small_fleet(separate, monkeypatch):
    """Selections of devices are limited by how many are enrolled; renewals pass through it."""
    await separate.listen()
    phone, *_ = [await separate.member(name) for name in ("phone", "tablet", "watch")]
    service = separate.authority

    def population(days):
        now = time.time() + days * 86_400
        for place in (service.members.registry, service.members._writer, service._authority):
            if place is not None:
                monkeypatch.setattr(place, "_now" if hasattr(place, "_now") else "now", lambda: now)
        monkeypatch.setattr(service.members, "now", lambda: now)
        monkeypatch.setattr(service.members, "_now", lambda: now, raising=False)
        members = [each for part in service.parts("") for each in part.members]
        (own,) = [each for each in members if each.name == "phone"]
        return Enrolment.from_bytes(own.enrolment).population

    assert population(0) == 3
    server = tls.Subject(kind=tls.SERVER, name="hub", identity=bytes(32), serial="", not_after=0.0)
    for days in (5, 10):
        assert population(days) == 3
        serial = tls.subject_of(phone.certificate).serial
        request = pb.RenewRequest(name="phone", serial=serial, signing_request=phone.next_request())
        phone.renewed(await service.renew(request, server))
    assert population(11) == 3


async def test_the_enrolment_key_is_the_one_that_the_token_commits_to(separate):
    server = await separate.listen()
    member = await separate.member("phone")
    own = separate.authority.members.authority
    assert member.enroller == tls.enroller_of(member.authority) == own
    server.members.membership.enroller = bytes(32)  # a server that lies about the authority
    with pytest.raises(AdmissionRefused, match="has another authority than the one that was join"):
        await separate.dial(member)


async def test_both_directories_are_verified_without_the_other_machine(separate):
    await separate.listen()
    await separate.close()  # no authority answers
    hub, trust = separate.folder / "hub", separate.folder / "authority"

    def verify(group, directory):
        shown = CliRunner().invoke(group, ["verify", str(directory)])
        assert isinstance(shown.exception, SystemExit | None), shown.exception
        return shown.exit_code, shown.output

    code, output = verify(server_command, hub)
    assert (code, output.count("intact ")) == (0, 4)
    code, output = verify(authority_command, trust)
    assert (code, output.count("intact ")) == (0, 5)

    (hub / "credentials.pem").unlink()
    code, output = verify(server_command, hub)
    assert code == 1
    assert output.startswith("damaged ")
    assert "credentials.pem" in output
    other = separate.folder / "other"
    initialise(other, ["localhost"])
    (trust / "authority.pem").write_bytes(  # the key of one authority, the certificate of another
        (trust / "authority.pem").read_bytes().partition(b"-----BEGIN CERT")[0]
        + b"-----BEGIN CERT"
        + (other / "authority.pem").read_bytes().partition(b"-----BEGIN CERT")[2]
    )
    (trust / "fleet.sqlite").unlink()
    code, output = verify(authority_command, trust)
    assert code == 1
    assert "the key and the certificate do not belong to each other" in output
    assert "fleet.sqlite is missing" in output


async def test_a_revocation_at_the_authority_reaches_the_server(separate):
    server = await separate.listen()
    member = await separate.member("phone")
    connection = separate.dial(member)
    await wait_until(lambda: "phone" in server.link.peers)
    with contextlib.closing(Registry(separate.folder / "authority")) as registry:
        registry.revoke("phone")
    with pytest.raises(AdmissionRefused, match="'phone' has been revoked"):
        await connection
    assert member.identity_public in server.members.revoked
    assert server.members.revoked_names == {"phone"}


async def test_a_rollout_is_made_and_ended_at_the_authority(separate):
    server = await separate.listen()
    run, authority = CliRunner().invoke, str(separate.folder / "authority")
    made = run(authority_command, ["token", "create", authority, "--name", "pi", "--uses", "2"])
    token = joining.Token.parse(made.output.strip())
    connections = []
    for name in ("one", "two", "three"):
        joined = joining.join(separate.url, token, separate.folder / name, "client")
        if name == "three":
            with pytest.raises(AdmissionRefused, match="for 2 participants, and 2 have joined"):
                await joined
            continue
        connections.append(separate.dial(await joined))
    await wait_until(lambda: {"pi-1", "pi-2"} <= server.link.peers.keys())
    ended = run(authority_command, ["revoke", authority, "pi", "--rollout"])
    assert ended.output == "the token pi and its 2 participants are revoked\n"
    for connection in connections:
        with pytest.raises(AdmissionRefused, match="has been revoked"):
            await connection


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("bug")])
async def test_a_failure_to_copy_the_registry_does_not_end_copying(separate, monkeypatch, error):
    """A disk that was full for a moment kept all later revocations from the server."""
    monkeypatch.setattr(remote_authority, "_OFFLINE_SECONDS", 0.05)
    server = await separate.listen()
    copy, failed = server.members.copy, asyncio.Event()

    def fails(*_):
        failed.set()
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(remote_authority, "write_sealed_bytes", fails)
        await separate.member("phone")
        await failed.wait()
        await wait_until(lambda: "phone" in {entry.name for entry in copy.participants()})
        assert not copy.copied
    await wait_until(lambda: copy.copied)


async def test_participants_continue_while_the_authority_is_offline(separate, monkeypatch):
    monkeypatch.setattr(remote_authority, "_OFFLINE_SECONDS", 0.1)
    server = await separate.listen()
    member = await separate.member("phone")
    late = await separate.member("late")
    separate.dial(member)
    await wait_until(lambda: "phone" in server.link.peers)
    await separate.authority_stack.aclose()
    await separate.stack.aclose()

    server = await separate.listen()  # from its copy of the registry; the device dials again
    await wait_until(lambda: "phone" in server.link.peers)
    await separate.start_authority()
    separate.dial(late)
    await wait_until(lambda: "late" in server.link.peers)


async def test_who_joined_before_the_authority_went_offline_is_admitted_when_it_is_back(
    separate, monkeypatch, caplog
):
    """It was told for good that it is no participant."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(remote_authority, "_OFFLINE_SECONDS", 0.1)
    await separate.listen()
    await separate.stack.aclose()
    late = await separate.member("late")
    await separate.authority_stack.aclose()

    server = await separate.listen()  # from its copy of the registry, which does not have it
    waiting = separate.dial(late)
    await wait_until(lambda: "it cannot ask the authority now" in caplog.text)
    assert not waiting.done()
    await separate.start_authority()
    await wait_until(lambda: "late" in server.link.peers)


def damaged(hub, how, older):
    copy, head = hub / "registry.copy", hub / "registry.head"
    if how == "a flipped bit":
        data = copy.read_bytes()
        copy.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif how == "an older copy":
        copy.write_bytes(older)
    elif how == "no copy":
        copy.unlink()
    elif how == "no head":
        head.unlink()
    else:
        head.write_bytes(head.read_bytes()[:-3])


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("a flipped bit", "registry.copy is damaged: it is not what was written"),
        ("an older copy", r"registry.copy is copy \d+ of the registry, and not the newest one"),
        ("no copy", "registry.copy is missing"),
        ("no head", "registry.head is missing"),
        ("a damaged head", "registry.head is damaged: it is not what was written"),
    ],
)
async def test_a_copy_that_could_lack_a_revocation_is_never_used(separate, caplog, how, why):
    """It is copied again; while the authority is offline, the server does not start."""
    server = await separate.listen()
    hub = separate.folder / "hub"
    member = await separate.member("phone")
    await server.members.check(tls.subject_of(member.certificate))
    older = (hub / "registry.copy").read_bytes()
    with contextlib.closing(Registry(separate.folder / "authority")) as registry:
        registry.revoke("phone")
    await wait_until(lambda: member.identity_public in server.members.copy.revoked_identities())
    await separate.stack.aclose()
    remote_authority.check(hub)
    damaged(hub, how, older)
    await separate.authority_stack.aclose()

    with pytest.raises(UserError, match=f"{why}.*; but the authority at .* cannot be reached"):
        await separate.listen()
    shown = CliRunner().invoke(server_command, ["verify", str(hub)]).output
    assert re.search(f"damaged  .*{why}.*; the server uses no copy until it has copied", shown)

    await separate.start_authority()
    with caplog.at_level("WARNING"):
        server = await separate.listen()
    assert re.search(why, caplog.text)
    with pytest.raises(AdmissionRefused, match="'phone' has been revoked"):
        await server.members.check(tls.subject_of(member.certificate))
    remote_authority.check(hub)


def test_a_crash_between_a_copy_and_its_head_leaves_the_newer_copy(tmp_path):
    head = tmp_path / "registry.head"
    for number in range(1, 4):
        before = head.read_bytes() if head.exists() else None
        part = pb.RegistryPart(version=str(number))
        remote_authority.RegistryCopy(tmp_path).replace(part)
        if before is None:
            head.unlink()
        else:
            head.write_bytes(before)
        copy = remote_authority.RegistryCopy(tmp_path)
        assert (copy.copied, copy.damage) == (str(number), None)
        copy.replace(part)


def test_a_damaged_address_of_the_server_is_refused(tmp_path):
    initialise(tmp_path / "authority", ["localhost"], "localhost:9400")
    assert CertificateAuthority(tmp_path / "authority").serves == "localhost:9400"
    serves = tmp_path / "authority" / "serves"
    serves.write_bytes(serves.read_bytes().replace(b"9400", b"9401"))
    with pytest.raises(DamagedError, match=r"serves is damaged: .*; restore it from a backup, or"):
        AuthorityService(tmp_path / "authority")


async def test_a_new_server_needs_the_authority_once(separate):
    await separate.member("hub", tls.SERVER)
    await separate.authority_stack.aclose()
    with pytest.raises(UserError, match=r"cannot be reached: .*; a new server needs it once to"):
        await separate.listen()


async def test_renewals_are_passed_on_and_the_server_renews_its_own(separate):
    server = await separate.listen()
    member = await separate.member("phone")
    separate.dial(member)
    await wait_until(lambda: "phone" in server.link.peers)
    subject = tls.subject_of(member.certificate)
    certificate, renewed = await server.members.renew(subject, member.next_request())
    member.renewed(certificate)
    assert renewed.serial != subject.serial
    await server.members.check(renewed)

    before = server.members.server_pair()
    clock = time.time() + 0.7 * 7 * 86_400
    server.members.now = lambda: clock
    await wait_until(lambda: server.members.server_pair() != before)
    assert Membership(separate.folder / "hub").certificate == server.members.membership.certificate


@pytest.mark.parametrize("kind", ["client", "operator"])
async def test_only_the_server_may_read_the_registry(separate, kind):
    member = await separate.member("thief", kind)
    remote = remote_authority.RemoteMembers
    member.kind = tls.SERVER
    thief = remote.__new__(remote)
    thief.membership, thief._channel = member, None
    member.server = f"localhost:{separate.authority_port}"
    with pytest.raises(AdmissionRefused, match=f"'thief' is a {kind}, not the server"):
        [part async for part in thief._call("Registry", link_pb2.Hello())]
    await thief._hang_up()


async def test_a_device_cannot_take_the_place_of_the_server(separate):
    token = separate.token("phone")
    with pytest.raises(AdmissionRefused, match="is for a participant of kind 'client', not 'serv"):
        await joining.join(separate.url, token, separate.folder / "phone", tls.SERVER)


def test_an_enrolment_is_signed_anew_only_when_it_changes(tmp_path):
    initialise(tmp_path / "authority", ["localhost"], "localhost:9400")
    service = AuthorityService(tmp_path / "authority")
    first = service._enrolment("a", bytes(32), 2**40, 100, "2027-W03")
    assert service._enrolment("a", bytes(32), 2**40, 125, "2027-W03") is first
    grown = service._enrolment("a", bytes(32), 2**40, 126, "2027-W03")
    assert grown.population == 126
    assert service._enrolment("a", bytes(32), 2**40, 126, "2027-W04") is not grown
    assert isinstance(first, Enrolment)
    service.members.close()


def test_a_server_that_is_its_own_authority_is_not_started_as_one(tmp_path):
    initialise(tmp_path / "server", ["localhost"])
    with pytest.raises(UserError, match="which is its own authority; start it with: isthmus serve"):
        AuthorityService(tmp_path / "server")


def test_an_interrupted_join_of_a_server_is_named(tmp_path):
    prepare(tmp_path / "hub")
    with pytest.raises(UserError, match="join that was interrupted; run the same command again"):
        CertificateAuthority(tmp_path / "hub")
    with pytest.raises(UserError, match="join that was interrupted; run the same command again"):
        initialise(tmp_path / "hub", ["localhost"])
