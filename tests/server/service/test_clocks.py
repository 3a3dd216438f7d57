"""Clocks of a server or a device that are wrong for a while. Every test uses real TLS.

TLS itself follows the real clock of this machine; the clocks that the tests set are those by which
certificates are issued, checked and renewed.
"""

import datetime
import time

import grpc
import pytest
from tests.server.scripted_participant import ScriptedParticipant, replying, training_request
from tests.server.waiting import wait_until

from isthmus.errors import AdmissionRefused, UserError
from isthmus.identity import joining, tls
from isthmus.transport.renewal import CertificateRenewal
from isthmus_server.fleet.authority import CertificateAuthority
from isthmus_server.fleet.registry import Registry

HOUR = 3600.0
DAY = 24 * HOUR


class ShiftedClock:
    """A clock that is ahead of the real one."""

    def __init__(self, ahead=0.0):
        self.ahead = ahead

    def __call__(self):
        return time.time() + self.ahead


@pytest.fixture
async def clock(fleet):
    """The server's clock."""
    clock = ShiftedClock()
    await fleet.listen(authority=CertificateAuthority(fleet.state, now=clock))
    return clock


async def trains(fleet, name):
    reply = await fleet.link.ask(name, training_request(fleet.link))
    return reply.trained.examples


def subject(member):
    return tls.subject_of(member.certificate)


async def test_a_device_stays_or_comes_back_when_the_server_s_clock_jumps(fleet, clock, caplog):
    device = await fleet.join("phone-0", replying(examples=5))
    stream = fleet.link.peers["phone-0"].stream
    for ahead in (30.0, -30.0, HOUR, -HOUR, 2 * DAY, -2 * DAY):
        clock.ahead = ahead
        fleet.server.members.disconnect_revoked(fleet.link)
        assert await trains(fleet, "phone-0") == 5
        assert fleet.link.peers["phone-0"].stream is stream
    with caplog.at_level("INFO", logger="isthmus"):
        clock.ahead = 8 * DAY  # after the end of its certificate
        await wait_until(lambda: "; this machine's clock is at" in caplog.text)
    assert "by the server's clock, which is at" in caplog.text
    assert "if that clock is right, join again" in caplog.text
    assert not device.connection.done()
    token = fleet.token("phone-1", seconds=30 * DAY)
    other = await joining.join(fleet.url, token, fleet.folder / "phone-1", "client")
    clock.ahead = 0.0
    await wait_until(lambda: fleet.link.peers.keys() == {"phone-0"})
    assert await trains(fleet, "phone-0") == 5
    fleet.server.members.registry.check(subject(other))


@pytest.mark.parametrize(("ahead", "why"), [(-40, "has expired"), (40, "is not yet valid")])
async def test_who_joins_with_another_clock_than_the_server_s_looks_at_it(fleet, ahead, why):
    """TLS goes by the clock of this machine, and only the second connection verifies anything."""
    clock = ShiftedClock(ahead * DAY)
    await fleet.listen(authority=CertificateAuthority(fleet.state, now=clock))
    sentence = f"does not pass: certificate {why}; check this machine's clock, which is at "
    with pytest.raises(UserError, match=sentence) as caught:
        await joining.join(fleet.url, fleet.token("late"), fleet.folder / "late", "client")
    assert str(caught.value).endswith("; if that is right, ask its operator for a new certificate")


async def test_a_certificate_that_expires_ends_the_open_stream(fleet, clock):
    member = await fleet.member("phone-0")
    async with fleet.raw(member) as (call, _, receive):
        await receive("welcome")  # and it asks for no other certificate
        clock.ahead = 8 * DAY
        assert await call.code() == grpc.StatusCode.ABORTED  # PERMISSION_DENIED would be final
        assert (await call.details()).startswith("the certificate of 'phone-0' ended at ")


async def test_a_device_whose_certificate_has_ended_says_so_and_tries_again(fleet, caplog):
    life = datetime.timedelta(0)
    await fleet.listen(authority=CertificateAuthority(fleet.state, participant_life=life))
    member = await fleet.member("phone-0")
    with caplog.at_level("INFO", logger="isthmus"):
        connection = fleet.dial(member)
        await wait_until(lambda: "(4 tries so far)" in caplog.text)
    assert "its certificate is valid from" in caplog.text
    assert "this machine's clock is at" in caplog.text
    assert not connection.done()


@pytest.mark.parametrize("ahead", [-400 * DAY, -2 * HOUR, 2 * HOUR, 400 * DAY])
async def test_a_device_with_a_wrong_clock_works_and_reports_both_clocks(
    fleet, clock, caplog, ahead
):
    participant = ScriptedParticipant(replying(examples=5))
    member = await fleet.member("phone-0")
    before = member.certificate
    fleet.dial(member, participant, now=ShiftedClock(ahead))
    await wait_until(lambda: "phone-0" in fleet.link.peers)
    assert await trains(fleet, "phone-0") == 5
    assert caplog.text.count("set the clock that is wrong: this machine's clock is at") == 1
    assert "and the server's at" in caplog.text
    assert member.certificate is before  # which is renewed by the server's clock


async def test_a_renewal_by_a_server_whose_clock_is_behind_keeps_the_present_one(fleet, clock):
    member = await fleet.member("phone-0")
    before = (member.directory / "credentials.pem").read_bytes()
    clock.ahead = -DAY
    request = member.next_request()
    pem, _ = fleet.server.members.certificate_authority.issue(
        request, kind="client", name="phone-0", identity=member.identity_public
    )
    with pytest.raises(AdmissionRefused, match=r"before the present one .* clock is or was wrong"):
        member.renewed(pem)
    assert (member.directory / "credentials.pem").read_bytes() == before


async def test_a_server_certificate_that_was_issued_in_the_future_is_replaced(fleet, clock):
    authority = fleet.server.members.certificate_authority

    def period():
        certificate = tls.read_certificate(authority.server_pair()[1])
        ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        return [end.timestamp() for end in ends]

    clock.ahead = 60 * DAY
    begin, _ = period()  # renewed, because it seemed to be over
    assert begin > time.time()
    clock.ahead = 0.0
    begin, end = period()
    assert begin < time.time() < end


def test_a_clock_that_is_ahead_deletes_nothing_that_is_in_use(tmp_path):
    clock = ShiftedClock()
    registry = Registry(tmp_path, now=clock)

    def issuing(serial, identity):
        end = clock() + 7 * DAY
        return lambda name: (b"", tls.Subject("client", name, identity, serial, end))

    def joined(name, serial):
        identity = name.encode() * 32
        registry.add_token(name.encode(), name=name, kind="client", expires=clock() + HOUR)
        registry.redeem(name.encode(), "client", identity, issuing(serial, identity))
        return issuing(serial, identity)(name)[1]

    first, other = joined("a", "1"), joined("b", "2")
    registry.add_token(b"unused", name="c", kind="client", expires=clock() + HOUR)
    registry.renew(first, issuing("3", first.identity))
    clock.ahead = 5 * DAY
    second = issuing("4", first.identity)("a")[1]
    registry.renew(first, issuing("4", first.identity))
    clock.ahead = 11 * DAY  # all but the last are over, for days
    registry.renew(second, issuing("5", first.identity))
    joined("d", "6")
    clock.ahead = 0.0
    for kept in (other, second):
        registry.check(kept)
    with pytest.raises(AdmissionRefused, match="not valid any more"):
        registry.check(first)  # it was replaced by the one that was used to ask for the next
    identity = b"c" * 32
    assert registry.redeem(b"unused", "client", identity, issuing("7", identity))[0] == "c"
    registry.close()


async def test_a_connection_that_is_closed_is_blamed_on_no_clock_that_is_right(fleet, clock):
    renewal = CertificateRenewal(await fleet.member("phone-0"))
    closed = "it closed the connection"
    balancer = "a balancer that passes TLS on may have no server behind it now"
    assert renewal.doubt(closed).startswith("; maybe a clock is wrong")
    assert renewal.doubt(closed).endswith(f"; or {balancer}")
    renewal.welcomed(time.time() + 2 * HOUR)
    assert renewal.doubt(closed).startswith("; maybe a clock is wrong")
    renewal.welcomed(time.time())
    assert renewal.doubt(closed) == (
        f"; this machine's certificate is valid, and the clocks agree: {balancer}"
    )
    refused = renewal.doubt("its certificate does not pass: certificate has expired")
    assert refused.startswith("; maybe a clock is wrong")
    assert "balancer" not in refused


async def test_a_server_time_that_is_none_is_refused(fleet, clock):
    renewal = CertificateRenewal(await fleet.member("phone-0"))
    for nonsense in (float("nan"), float("inf"), -1.0, 1e300):
        with pytest.raises(ValueError, match="the server's welcome has clock="):
            renewal.welcomed(nonsense)
