"""Certificates of devices behind an aggregator, which may lie: it records, keeps and repeats."""

import asyncio
import time

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from tests.server.aggregator.test_fleets import AGGREGATORS, Site
from tests.server.scripted_participant import ScriptedParticipant, replying
from tests.server.waiting import wait_until

from isthmus.errors import AdmissionRefused
from isthmus.identity import tls
from isthmus.transport.renewal import CertificateRenewal
from isthmus.transport.stream import Stream
from isthmus.wire import link_pb2
from isthmus_server.aggregator.devices import Devices
from isthmus_server.transport.link import Link
from isthmus_server.transport.renewal_proofs import NONCE_SECONDS, UNSIGNED, RenewalProofs

NO_NONCE = f"the server has sent no nonce for this proof: {UNSIGNED}"
NOT_SIGNED = "the key of the present certificate did not sign this"


@pytest.fixture
async def behind(tmp_path):
    """A server with a device "a", which dials an aggregator."""
    site = Site(tmp_path)
    await site.listen()
    site.places = {}
    site.processes = []
    site.member_a = await site.member("a")
    await site.aggregator(AGGREGATORS[0])
    site.address = site.places[AGGREGATORS[0]]
    yield site
    await site.close()


@pytest.fixture
def due(monkeypatch):
    """Certificates are renewed as soon as a device connects."""
    monkeypatch.setattr("isthmus.identity.membership.RENEW_AT", 0.4)  # half of it is over


@pytest.fixture
def recorded(monkeypatch):
    """What a lying aggregator has read of devices: hello, and requests for a certificate."""
    messages = []
    usual = Devices._pass_on

    async def pass_on(self, device, message):
        messages.append(message)
        await usual(self, device, message)

    monkeypatch.setattr(Devices, "_pass_on", pass_on)
    return messages


def is_signed(message):
    return isinstance(message, link_pb2.Envelope) and bool(message.renew.proof)


def serials(fleet):
    return [serial for serial, _ in fleet.registry().certificates()["a"]]


async def nonce_for(send, receive, request):
    """What the server wants signed with a request."""
    await send(renew=link_pb2.Renew(signing_request=request))
    answer = await receive("renewed")
    assert (answer.certificate, answer.reason, len(answer.nonce)) == (b"", UNSIGNED, 32)
    return answer.nonce


async def answer_to(send, receive, request, proof):
    await send(renew=link_pb2.Renew(signing_request=request, proof=proof))
    answer = await receive("renewed")
    assert not answer.nonce
    return answer


async def test_a_device_has_its_certificate_renewed_through_an_aggregator(behind, due, recorded):
    member = behind.member_a
    before = member.certificate
    behind.dial(member)
    await wait_until(lambda: member.certificate is not before)
    subject = tls.subject_of(member.certificate)
    await wait_until(lambda: behind.link.peers["a"].subject == subject)
    first, second = [each.renew for each in recorded if each.HasField("renew")]
    assert first.signing_request == second.signing_request
    assert (first.proof, bool(second.proof)) == (b"", True)


async def test_a_request_that_an_aggregator_has_recorded_is_refused(behind, due, recorded):
    """On a channel that it opens in the device's name, with the certificate that it has seen."""
    member = behind.member_a
    seen = tls.pem(member.certificate)
    dialling = behind.dial(member)
    await wait_until(lambda: tls.pem(member.certificate) != seen)
    dialling.cancel()
    await wait_until(lambda: behind.link.peers["a"].stream is None)
    hello = next(each for each in recorded if each.HasField("hello"))
    unsigned, signed = [each for each in recorded if each.HasField("renew")]
    has = serials(behind)
    assert len(has) == 2

    (process,) = behind.processes
    answers = asyncio.Queue()
    process.devices.take = answers.put_nowait

    async def through(message):
        data = message.SerializeToString()
        await process.devices._to.tell(
            link_pb2.Envelope(through=link_pb2.Through(channel=9999, message=data))
        )

    async def answer():
        while True:
            message = await answers.get()
            inner = link_pb2.Envelope.FromString(message.through.message)
            if inner.HasField("renewed"):
                return inner.renewed

    caller = link_pb2.Caller(channel=9999, certificate=seen)
    await process.devices._to.tell(link_pb2.Envelope(caller=caller))
    await through(hello)
    await through(signed)
    assert (await answer()).reason == NO_NONCE
    await through(unsigned)
    assert (await answer()).nonce
    await through(signed)
    assert (await answer()).reason == NOT_SIGNED
    await through(signed)
    assert (await answer()).reason == NO_NONCE
    assert serials(behind) == has


async def test_a_proof_counts_once_and_on_the_stream_of_its_nonce_only(behind):
    member = behind.member_a
    request = member.next_request()
    async with behind.raw(member) as (_, send, receive):
        await receive("welcome")
        proof = member.proof_of(request, await nonce_for(send, receive, request))
        assert (await answer_to(send, receive, request, proof)).certificate
        assert (await answer_to(send, receive, request, proof)).reason == NO_NONCE
        unused = member.proof_of(request, await nonce_for(send, receive, request))
    async with behind.raw(member) as (_, send, receive):
        await receive("welcome")
        assert (await answer_to(send, receive, request, unused)).reason == NO_NONCE
        await nonce_for(send, receive, request)
        assert (await answer_to(send, receive, request, unused)).reason == NOT_SIGNED
    assert len(serials(behind)) == 2


async def test_a_request_that_an_aggregator_has_kept_for_long_is_refused(behind, monkeypatch):
    member = behind.member_a
    async with behind.raw(member) as (_, send, receive):
        await receive("welcome")
        proofs = behind.link.peers["a"].renewal_proofs
        for passed, is_renewed in ((NONCE_SECONDS + 1, False), (NONCE_SECONDS - 100, True)):
            request = member.next_request()
            proof = member.proof_of(request, await nonce_for(send, receive, request))
            monkeypatch.setattr(proofs, "_ends", proofs._ends - passed)
            answer = await answer_to(send, receive, request, proof)
            assert bool(answer.certificate) is is_renewed
            assert ("more than 300 s ago" in answer.reason) is not is_renewed


async def test_another_nonce_ends_the_one_before():
    key = tls.new_key()
    proofs = RenewalProofs(b"")
    first = proofs.new_nonce()
    assert proofs.new_nonce() != first
    with pytest.raises(AdmissionRefused, match="this is not a certificate"):
        proofs.check(b"request", tls.prove(key, first, b"request"))
    with pytest.raises(AdmissionRefused, match="has sent no nonce"):
        proofs.check(b"request", tls.prove(key, first, b"request"))


async def test_a_device_of_an_earlier_version_is_told_to_upgrade_and_is_renewed_directly(behind):
    """It signs the request alone, or nothing."""
    member = behind.member_a
    request = member.next_request()
    alone = member.key.sign(request, ec.ECDSA(hashes.SHA256()))
    async with behind.raw(member) as (_, send, receive):
        await receive("welcome")
        answer = await answer_to(send, receive, request, alone)
        assert (answer.certificate, answer.reason) == (b"", NO_NONCE)
        await nonce_for(send, receive, request)  # which has the reason, too
        assert (await answer_to(send, receive, request, alone)).reason == NOT_SIGNED
    behind.address = f"localhost:{behind.server.link_port}"
    async with behind.raw(member) as (_, send, receive):
        await receive("welcome")
        for proof in (alone, b""):
            assert (await answer_to(send, receive, request, proof)).certificate


async def test_a_server_that_was_restarted_after_its_nonce_is_asked_again(
    behind, due, recorded, monkeypatch
):
    """So is a standby that takes over: neither knows the nonces of the process before."""
    kept = asyncio.Event()
    renewed = Link._renewed

    async def keep(self, peer, asked):
        if asked.proof and not kept.is_set():
            kept.set()
            await asyncio.Event().wait()
        return await renewed(self, peer, asked)

    monkeypatch.setattr(Link, "_renewed", keep)
    member = behind.member_a
    before = member.certificate
    (aggregating,) = behind.connections
    dialling = behind.dial(member)
    await kept.wait()
    await behind.stack.aclose()
    await behind.listen()
    # At the same address, as the test's server is not at the one before.
    aggregating.cancel()
    await asyncio.gather(aggregating, return_exceptions=True)
    (process,) = behind.processes
    await behind.aggregator(AGGREGATORS[0], process.member, process.port)
    await wait_until(lambda: member.certificate is not before)
    assert not dialling.done()
    first, second = [each.renew for each in recorded if is_signed(each)]
    assert first.signing_request != second.signing_request
    assert len(serials(behind)) == 2


async def test_a_certificate_is_renewed_through_an_aggregator_before_a_device_goes(
    behind, due, monkeypatch
):
    renewed = Link._renewed

    async def calling_back(self, peer, asked):
        if not asked.proof:
            self._call_back(peer, 1.0)
        return await renewed(self, peer, asked)

    monkeypatch.setattr(Link, "_renewed", calling_back)
    member = behind.member_a
    before = member.certificate
    reasons = []
    monkeypatch.setattr(behind.link.check_ins, "left", lambda _, reason: reasons.append(reason))
    behind.dial(member, ScriptedParticipant(replying()))
    await wait_until(lambda: reasons)
    assert reasons[0].startswith("not needed")
    assert member.certificate is not before


class Written:
    """A call of which a test reads what was written."""

    def __init__(self):
        self.messages = asyncio.Queue()

    async def write(self, data):
        self.messages.put_nowait(link_pb2.Envelope.FromString(data).renew)


async def test_a_device_signs_what_it_asks_now_once_and_after_a_fixed_beginning(
    behind, due, caplog
):
    """Whatever the aggregator sends it."""
    member = behind.member_a
    renewal = CertificateRenewal(member)
    renewal.welcomed(time.time())
    written = Written()
    stream = Stream(written)
    nonce = bytes(range(32))
    asked = link_pb2.Renewed(nonce=nonce, reason=UNSIGNED)
    assert not await renewal.take(asked, stream)  # before it has asked
    running = asyncio.create_task(renewal.run(stream))
    request = await written.messages.get()
    assert not request.proof
    assert not await renewal.take(asked, stream)
    assert not renewal._answered.is_set()
    signed = await written.messages.get()
    assert signed.signing_request == request.signing_request
    data = b"isthmus/renewal/1/" + nonce + request.signing_request
    member.key.public_key().verify(signed.proof, data, ec.ECDSA(hashes.SHA256()))
    assert not await renewal.take(asked, stream)
    assert renewal._answered.is_set()
    running.cancel()
    for wrong, is_welcomed in ((asked, True), (link_pb2.Renewed(nonce=b"64 spaces"), False)):
        running = asyncio.create_task(renewal.run(stream))
        await written.messages.get()
        if is_welcomed:  # on another stream
            renewal.welcomed(time.time())
        assert not await renewal.take(wrong, stream)
        running.cancel()
    assert written.messages.empty()
    assert len([each for each in caplog.messages if "was not renewed" in each]) == 4
    assert "a nonce for the renewal of a certificate has 9 bytes, not 32" in caplog.text
