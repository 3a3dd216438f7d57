"""Admission to the link by certificates. Every test uses real TLS."""

import asyncio
import datetime

import grpc
import grpc.aio
import pytest
from cryptography import x509
from tests.server.listeners import attached
from tests.server.scripted_participant import delayed, payload_of, replying, training_request
from tests.server.waiting import wait_until

from isthmus.errors import AdmissionRefused, ParticipantLost, UserError
from isthmus.identity import tls
from isthmus.identity.join_channel import JOIN_PROTOCOL
from isthmus.identity.membership import Membership
from isthmus.identity.obstacles import presented
from isthmus.identity.proxies import Road
from isthmus.transport.blobs import describe, into
from isthmus.transport.uplink import CHANNEL_OPTIONS, Uplink
from isthmus.wire import link_pb2
from isthmus_privacy.secagg.identity import Directory, Enrolment
from isthmus_server.fleet.authority import CertificateAuthority, initialise
from isthmus_server.transport import link
from isthmus_server.transport.limits import MAX_STREAMS_PER_CERTIFICATE
from isthmus_server.transport.link import Link

pytestmark = pytest.mark.usefixtures("ports")


@pytest.fixture(params=[2, 1], ids=["two ports", "one port"])
def ports(request):
    """Each of these tests is run with both."""
    return request.param


def issue(fleet, key, member, authority=None, **changes):
    """A certificate that is not in the registry, and credentials with it."""
    fields = {"kind": member.kind, "name": member.name, "identity": member.identity_public}
    authority = authority or fleet.server.members.certificate_authority
    pem, _ = authority.issue(tls.signing_request(key), **{**fields, **changes})
    return grpc.ssl_channel_credentials(tls.pem(member.authority), tls.key_pem(key), pem)


async def to_the_end(call):
    while await call.read() is not grpc.aio.EOF:
        pass


async def refusal(call):
    """Status and details with which the server ended a call."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await to_the_end(call)
    return caught.value.code(), caught.value.details()


async def test_members_work_over_mutual_tls(fleet):
    await fleet.listen()
    link = fleet.link
    assert link.enrolments.deployment == "one"  # its authority is its own
    payload = payload_of(700_000)
    blob = describe(payload)
    link.publish(blob, payload)

    async def reverse(participant, request, model):
        result = bytearray(reversed(model))
        return link_pb2.Reply(trained=link_pb2.Trained(result=describe(result))), result

    await fleet.join("phone-0", reverse)
    await fleet.join("hall", replying(examples=9), kind="datacenter")
    reply = await link.ask("phone-0", training_request(link, blob))
    back = bytearray(reply.trained.result.size)
    await link.fetch("phone-0", reply.trained.result, into(back))
    assert back == bytes(reversed(payload))
    assert link.peers["phone-0"].role == link_pb2.CLIENT
    assert link.peers["hall"].role == link_pb2.DATACENTER


async def test_the_identity_in_the_certificate_is_the_one_that_is_enrolled(fleet):
    await fleet.listen()
    member = await fleet.member("phone-0")
    welcomes = []
    fleet.dial(member, on_welcome=welcomes.append)
    await wait_until(lambda: welcomes)
    enrolment = Enrolment.from_bytes(welcomes[0].enrolment)
    assert (enrolment.name, enrolment.identity_key) == ("phone-0", member.identity_public)
    assert enrolment.not_after == int(tls.subject_of(member.certificate).not_after)
    Directory(member.enroller).check(enrolment)


@pytest.mark.parametrize("lie", ["identity", "name", "role"])
async def test_a_hello_that_differs_from_the_certificate_is_refused(fleet, lie):
    await fleet.listen()
    member = await fleet.member("phone-0")
    other = await fleet.member("phone-1")
    wrong = {
        "identity": other.identity_public,
        "name": "phone-1",
        "role": link_pb2.DATACENTER,
    }[lie]
    async with fleet.raw(member, **{lie: wrong}) as (call, _, _):
        code, sentence = await refusal(call)
    assert code == grpc.StatusCode.PERMISSION_DENIED
    of = "the certificate belongs to the client 'phone-0', not to the"
    expected = {
        "identity": "the identity key of 'phone-0' is not the one it joined with",
        "name": f"{of} client 'phone-1'",
        "role": f"{of} datacenter 'phone-0'",
    }
    assert sentence == expected[lie]
    assert fleet.link.peers == {}


async def test_an_operator_cannot_connect_as_a_participant(fleet):
    await fleet.listen()
    member = await fleet.member("me", kind="operator")
    credentials = member.channel_credentials()
    hello = {"name": "me", "identity": member.identity_public}
    for role in (link_pb2.CLIENT, link_pb2.DATACENTER):
        async with fleet.raw(credentials, role=role, **hello) as (call, _, _):
            code, sentence = await refusal(call)
        assert code == grpc.StatusCode.PERMISSION_DENIED
        assert sentence.startswith("the certificate belongs to the operator 'me'")


async def test_a_caller_without_a_certificate_is_refused(fleet):
    await fleet.listen()
    roots = tls.pem(fleet.server.members.certificate_authority.certificate)
    for credentials in (grpc.ssl_channel_credentials(roots), None):
        if credentials is None:
            channel = grpc.aio.insecure_channel(fleet.address)
        else:
            channel = grpc.aio.secure_channel(fleet.address, credentials)
        async with channel:
            call = channel.stream_stream("/isthmus.link.v1.Link/Connect")()
            assert (await refusal(call))[0] == grpc.StatusCode.UNAVAILABLE
    assert fleet.link.peers == {}


async def test_a_certificate_of_another_authority_is_refused(fleet):
    await fleet.listen()
    member = await fleet.member("phone-0")
    initialise(fleet.folder / "thief", ["localhost"])
    forged = issue(fleet, tls.new_key(), member, CertificateAuthority(fleet.folder / "thief"))
    hello = {"name": "phone-0", "role": link_pb2.CLIENT, "identity": member.identity_public}
    async with fleet.raw(forged, **hello) as (call, _, _):
        assert (await refusal(call))[0] == grpc.StatusCode.UNAVAILABLE
    assert fleet.link.peers == {}


async def test_a_signed_certificate_that_is_not_in_the_registry_is_refused(fleet):
    """This happens if the authority's key leaks, or with an old copy of the state directory."""
    await fleet.listen()
    member = await fleet.member("phone-0")
    hello = {"role": link_pb2.CLIENT, "identity": member.identity_public}
    for name, sentence in (
        ("phone-0", "this certificate of 'phone-0' is not valid any more"),
        ("phone-9", "'phone-9' is not a participant of this server"),
    ):
        credentials = issue(fleet, tls.new_key(), member, name=name)
        async with fleet.raw(credentials, name=name, **hello) as (call, _, _):
            assert await refusal(call) == (grpc.StatusCode.PERMISSION_DENIED, sentence)


async def test_the_server_s_own_certificate_is_refused_as_a_participant_s(fleet):
    await fleet.listen()
    key, chain = fleet.server.members.certificate_authority.server_pair()
    roots = tls.pem(fleet.server.members.certificate_authority.certificate)
    async with fleet.raw(grpc.ssl_channel_credentials(roots, key, chain), name="x") as (call, _, _):
        assert (await refusal(call))[0] == grpc.StatusCode.UNAVAILABLE


async def test_a_device_refuses_a_server_of_another_authority(fleet, caplog):
    await fleet.listen()
    member = await fleet.member("phone-0")
    address, state = fleet.address, fleet.state
    fleet.state = fleet.folder / "thief"
    initialise(fleet.state, ["localhost", "127.0.0.1"])
    thief = await fleet.listen()
    assert fleet.address != address
    with caplog.at_level("INFO", logger="isthmus"):
        fleet.dial(member)
        await wait_until(lambda: "no link to" in caplog.text)
    said = f"no link to {fleet.address}: the server at {fleet.address} is of another "
    assert said in caplog.text
    assert "its certificate is not of the authority that this machine has joined" in caplog.text
    assert thief.link.peers == {}
    fleet.state = state


async def test_an_expired_certificate_is_refused(fleet):
    over = datetime.timedelta(seconds=-1)
    await fleet.listen()
    member = await fleet.member("phone-0")
    expired = CertificateAuthority(fleet.state, participant_life=over)
    hello = {"name": "phone-0", "role": link_pb2.CLIENT, "identity": member.identity_public}
    async with fleet.raw(issue(fleet, member.key, member, expired), **hello) as (call, _, _):
        assert (await refusal(call))[0] == grpc.StatusCode.UNAVAILABLE
    assert fleet.link.peers == {}


async def test_the_server_s_own_certificate_is_renewed_without_a_restart(fleet, monkeypatch):
    """New connections on both ports get the new certificate; open ones continue."""

    def shown(port, *protocols):
        return presented(Road(f"localhost:{port}"), protocols=(*protocols, "h2"))

    monkeypatch.setattr("isthmus_server.service.server._RENEWAL_SECONDS", 0.05)
    authority = CertificateAuthority(fleet.state, server_life=datetime.timedelta(hours=1))
    authority.renew_server([x509.DNSName("localhost")])
    server = await fleet.listen(authority=authority)
    await fleet.join("phone-0", replying(examples=5))
    stream = fleet.link.peers["phone-0"].stream
    pair, first = server.pair, await shown(server.link_port)
    authority.server_life *= 3  # so that less than a third of it is left
    await wait_until(lambda: server.pair != pair)
    again = await shown(server.link_port)
    assert again == await shown(server.join_port, JOIN_PROTOCOL)
    assert tls.issued_by(again, authority.certificate)
    assert again.not_valid_after_utc > first.not_valid_after_utc
    assert again.extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    ) == first.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    await fleet.join("phone-1", replying(examples=6))
    assert fleet.link.peers["phone-0"].stream is stream
    for name, examples in (("phone-0", 5), ("phone-1", 6)):
        assert (
            await fleet.link.ask(name, training_request(fleet.link))
        ).trained.examples == examples


async def test_a_revoked_participant_is_disconnected_at_once(fleet):
    await fleet.listen()
    participant = await fleet.join("phone-0", delayed(replying(), asyncio.Event()))
    await fleet.join("phone-1", replying(examples=5))
    stream = fleet.link.peers["phone-1"].stream
    listener = attached(fleet.link)
    asking = asyncio.create_task(fleet.link.ask("phone-0", training_request(fleet.link)))
    await wait_until(lambda: participant.requests)
    fleet.registry().revoke("phone-0")
    with pytest.raises(ParticipantLost, match=r"^'phone-0' has been revoked$"):
        await asking
    with pytest.raises(
        AdmissionRefused, match="the server refused 'phone-0': 'phone-0' has been revoked"
    ):
        await participant.connection
    assert listener.left_reasons == [("phone-0", "'phone-0' has been revoked")]
    assert fleet.link.peers.keys() == {"phone-1"}
    # For the others nothing has changed.
    assert fleet.link.peers["phone-1"].stream is stream
    assert (await fleet.link.ask("phone-1", training_request(fleet.link))).trained.examples == 5


async def test_other_devices_refuse_rounds_with_a_revoked_device(fleet):
    await fleet.listen()
    member = await fleet.member("phone-0")
    directory = Directory(member.enroller, revoked=fleet.server.members.revoked)
    welcomes = []
    fleet.dial(member, on_welcome=welcomes.append)
    await wait_until(lambda: welcomes)
    enrolment = Enrolment.from_bytes(welcomes[0].enrolment)
    directory.check(enrolment)
    fleet.registry().revoke("phone-0")
    await wait_until(lambda: fleet.server.members.revoked == {member.identity_public})
    with pytest.raises(Exception, match="the key of 'phone-0' is revoked"):
        directory.check(enrolment)


async def test_an_idle_connection_is_closed(fleet, monkeypatch):
    monkeypatch.setattr(link, "IDLE_SECONDS", 0.2)
    await fleet.listen()
    participant = await fleet.join("phone-0", replying(examples=5))
    stream = fleet.link.peers["phone-0"].stream
    credentials = (await fleet.member("phone-1")).channel_credentials()
    async with grpc.aio.secure_channel(fleet.address, credentials) as channel:
        ready = grpc.ChannelConnectivity.READY
        # A slow machine may see it only after it was closed, and connects again.
        await wait_until(lambda: channel.get_state(try_to_connect=True) is ready)
        await wait_until(lambda: channel.get_state() is not ready)
    assert fleet.link.peers["phone-0"].stream is stream
    assert (await fleet.link.ask("phone-0", training_request(fleet.link))).trained.examples == 5
    assert len(participant.requests) == 1


async def test_streams_per_certificate_are_limited(fleet):
    await fleet.listen()
    member = await fleet.member("phone-0")
    credentials = member.channel_credentials()
    async with grpc.aio.secure_channel(fleet.address, credentials) as one:
        method = "/isthmus.link.v1.Link/Connect"
        calls = [one.stream_stream(method)() for _ in range(MAX_STREAMS_PER_CERTIFICATE)]
        for call in calls:
            await call.wait_for_connection()
        await wait_until(lambda: sum(fleet.link._streams.values()) == MAX_STREAMS_PER_CERTIFICATE)
        # On a connection of its own, since HTTP/2 would hold a fifth stream of the first one back.
        # Nothing is sent: a message that meets the refusal on its way hides the refusal's status.
        async with grpc.aio.secure_channel(fleet.address, credentials, CHANNEL_OPTIONS) as other:
            code, sentence = await refusal(other.stream_stream(method)())
        assert (code, sentence) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many open streams")
        for call in calls:
            call.cancel()
    await wait_until(lambda: not fleet.link._streams)


async def test_connecting_to_another_machine_requires_a_certificate():
    for address in ("10.1.2.3:9400", "example.org:9400", "[2001:db8::1]:9400"):
        with pytest.raises(UserError, match=r"is another machine, and this one has not joined"):
            Uplink(address, "phone-0", link_pb2.CLIENT, None)
    Uplink("[::1]:9400", "phone-0", link_pb2.CLIENT, None)


async def test_a_membership_is_for_one_name_and_role(fleet):
    await fleet.listen()
    member = await fleet.member("phone-0")
    for name, role in (("phone-1", link_pb2.CLIENT), ("phone-0", link_pb2.DATACENTER)):
        with pytest.raises(UserError, match="is the membership of the client 'phone-0', not of"):
            Uplink(fleet.address, name, role, None, membership=member)
    with pytest.raises(
        UserError, match=r"^unix:/run/link requires no certificate; also give --name"
    ):
        Uplink("unix:/run/link", "phone-0", link_pb2.CLIENT, None, membership=member)


async def test_a_server_with_another_enroller_is_refused(fleet):
    await fleet.listen()
    member = await fleet.member("phone-0")
    member.enroller = bytes(32)
    with pytest.raises(
        AdmissionRefused, match="the server has another authority than the one that was"
    ):
        await fleet.dial(member)


async def test_a_membership_with_secrets_readable_by_others_is_refused(fleet):
    await fleet.listen()
    member = await fleet.member("phone-0")
    for name in ("credentials.pem", "identity.key"):
        (member.directory / name).chmod(0o644)
        with pytest.raises(UserError, match="can be read by others on this machine; chmod 600"):
            Membership(member.directory)
        (member.directory / name).chmod(0o600)
    Membership(member.directory)


async def test_without_tls_the_link_listens_only_on_loopback():
    with pytest.raises(UserError, match="is not loopback, and this link is not encrypted"):
        await Link(10.0).start("0.0.0.0")
