"""Renewal and revocation of certificates on a running server."""

import asyncio
import sqlite3

import pytest
from tests.server.scripted_participant import replying
from tests.server.waiting import wait_until

from isthmus.errors import AdmissionRefused, UserError
from isthmus.identity import joining, tls
from isthmus.identity.membership import Membership
from isthmus.wire import link_pb2
from isthmus_server.fleet.authority import CertificateAuthority, initialise
from isthmus_server.fleet.registry import Registry


async def test_a_certificate_is_renewed_over_the_live_link_with_a_new_key(fleet, monkeypatch):
    monkeypatch.setattr("isthmus.identity.membership.RENEW_AT", 0.4)  # half of it is over
    await fleet.listen()
    member = await fleet.member("phone-0")
    before = member.certificate, member.key
    dialling = fleet.dial(member)
    await wait_until(lambda: member.certificate is not before[0])
    assert member.key is not before[1]
    kept = Membership(member.directory)
    assert kept.certificate == member.certificate
    assert kept.key.public_key() == member.certificate.public_key()
    peer = fleet.link.peers["phone-0"]
    await wait_until(lambda: peer.subject.serial == tls.subject_of(member.certificate).serial)
    # And it is the new one that it dials with from now on.
    dialling.cancel()
    await wait_until(lambda: peer.stream is None)
    fleet.dial(member)
    await wait_until(lambda: fleet.link.peers["phone-0"].stream is not None)
    await wait_until(
        lambda: fleet.link.peers["phone-0"].subject == tls.subject_of(member.certificate)
    )


async def test_an_invalid_renewal_changes_nothing(fleet):
    await fleet.listen()
    member, other = await fleet.member("phone-0"), await fleet.member("phone-1")
    before = (member.directory / "credentials.pem").read_bytes()
    certifier = fleet.server.members.certificate_authority
    request = member.next_request()
    ours = {"kind": "client", "name": "phone-0", "identity": member.identity_public}
    wrong = [
        (b"noise", "this is not a certificate"),
        (tls.pem(other.certificate), "for another key"),
        (certifier.issue(request, **{**ours, "kind": "operator"})[0], "is not for this client"),
        (certifier.issue(request, **{**ours, "name": "x"})[0], "belongs to another participant"),
        (certifier.issue(request, **{**ours, "identity": b"i" * 32})[0], "not for this client"),
    ]
    initialise(fleet.folder / "thief", ["localhost"])
    forged = CertificateAuthority(fleet.folder / "thief").issue(request, **ours)[0]
    wrong.append((forged, "authority did not sign"))
    for pem, sentence in wrong:
        with pytest.raises(AdmissionRefused, match=sentence):
            member.renewed(pem)
    assert (member.directory / "credentials.pem").read_bytes() == before
    member.renewed(certifier.issue(request, **ours)[0])


async def test_an_unwritable_registry_is_reported_and_works_again_later(fleet, monkeypatch, caplog):
    await fleet.listen()
    token = fleet.token("phone-0")

    def full(*_):
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(Registry, "redeem", full)
        with pytest.raises(
            AdmissionRefused,
            match=r"refused to join this machine: the server cannot write its registry now",
        ):
            await joining.join(fleet.url, token, fleet.folder / "phone-0", "client")
    assert "database or disk is full" in caplog.text
    member = await joining.join(fleet.url, token, fleet.folder / "phone-0", "client")
    monkeypatch.setattr(Registry, "renew", full)
    async with fleet.raw(member) as (_, send, receive):
        await receive("welcome")
        await send(renew=link_pb2.Renew(signing_request=member.next_request()))
        assert "cannot write its registry" in (await receive("renewed")).reason


async def test_the_check_for_revocations_is_repeated_after_an_error(fleet, monkeypatch):
    await fleet.listen()
    participant = await fleet.join("phone-0", replying())
    check, failures = Registry.check, []

    def fails_once(registry, subject):
        if not failures:
            failures.append(subject.name)
            raise sqlite3.OperationalError("disk I/O error")
        check(registry, subject)

    monkeypatch.setattr(Registry, "check", fails_once)
    fleet.registry().revoke("phone-0")
    with pytest.raises(AdmissionRefused, match="'phone-0' has been revoked"):
        await asyncio.wait_for(participant.connection, 100)
    assert failures == ["phone-0"]


async def test_one_process_at_a_time_uses_a_membership(fleet):
    await fleet.listen()
    member = await fleet.member("phone-0")
    with (
        member.locked(),
        pytest.raises(UserError, match="another process runs as 'phone-0'"),
        Membership(member.directory).locked(),
    ):
        raise AssertionError("unreachable")
    with Membership(member.directory).locked():
        await asyncio.sleep(0)
