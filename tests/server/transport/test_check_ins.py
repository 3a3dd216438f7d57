"""Who stays connected to a server with many devices, and when the others come back."""

import dataclasses
import logging
import math
import shutil
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.scripted_participant import ScriptedParticipant, replying, training_request
from tests.server.service.conftest import Fleet
from tests.server.waiting import wait_until

from isthmus.errors import UpdateError
from isthmus.identity.membership import Membership
from isthmus.transport import uplink
from isthmus.transport.backoff import Backoff
from isthmus.wire import link_pb2
from isthmus_server.fleet import members
from isthmus_server.fleet.presence import FleetPresence
from isthmus_server.fleet.snapshot import Seen
from isthmus_server.fleet.table import fleet_rows
from isthmus_server.transport import check_ins
from isthmus_server.transport.check_ins import (
    ARRIVALS_PER_SECOND,
    LONGEST_SECONDS,
    CheckIns,
    CheckInSchedule,
    in_words,
)
from isthmus_server.transport.peer import ParticipantListener, Peer


@given(st.integers(1, 10**7), st.integers(1, 20_000), st.floats(0, 1, exclude_max=True))
def test_no_more_devices_arrive_in_a_second_than_are_accepted(enrolled, connected, draw):
    schedule = CheckInSchedule(enrolled, connected)
    assert schedule.is_needed is (enrolled > connected)
    assert 0 < schedule.pause(draw) <= LONGEST_SECONDS
    assert math.isclose(schedule.pause(0.5), schedule.period)
    if schedule.period < LONGEST_SECONDS / 2:  # beyond, each device comes once a day
        assert schedule.arrivals * 5.5 <= ARRIVALS_PER_SECOND * 1.001
    assert schedule.spread == (connected / ARRIVALS_PER_SECOND * 2 if schedule.is_needed else 0)


def device(name, role=link_pb2.CLIENT):
    peer = Peer(link_pb2.Hello(name=name, role=role))
    peer.stream = object()
    return peer


class Fake(CheckIns):
    """Takes devices in as the link does."""

    def arrive(self, name, enrolled, role=link_pb2.CLIENT):
        peer = device(name, role)
        gone = [who for who, _ in self.called_back(peer, enrolled)]
        if peer not in gone:
            peer.is_new = False
            self.joined(peer)
        for other in gone:
            self.left(other, "")
        return " ".join(each.name for each in gone) or None


@given(st.integers(1, 60), st.booleans(), st.booleans())
def test_nobody_is_sent_away_from_a_fleet_that_may_be_connected(count, trains, waits):
    places = Fake(count)
    places.trains = lambda: trains
    places.waits = lambda: waits
    assert {places.arrive(str(number), count) for number in range(count)} == {None}
    assert places.schedule(count) is None


def test_the_longest_connected_device_makes_place():
    places = Fake(2)
    assert [places.arrive(name, 9) for name in "abcd"] == [None, None, "a", "b"]


def test_a_datacenter_needs_no_place():
    places = Fake(1)
    assert places.arrive("a", 9) is None
    assert places.arrive("cluster", 9, link_pb2.DATACENTER) is None
    assert places.arrive("b", 9) == "a"


def test_a_device_that_works_stays():
    places = Fake(1)
    assert places.arrive("a", 9) is None
    places._places["a"].pending["request"] = ()
    assert places.arrive("b", 9) == "b"


def test_while_a_job_runs_those_that_come_are_sent_away_and_nobody_else():
    places = Fake(1)
    places.trains = lambda: True
    assert [places.arrive(name, 9) for name in "abc"] == [None, "b", "c"]


def test_while_a_job_waits_for_devices_all_that_come_stay():
    places = Fake(1, most=3)
    places.trains = places.waits = lambda: True
    assert [places.arrive(name, 9) for name in "abcd"] == [None, None, None, "d"]


def test_after_a_job_has_waited_no_more_devices_stay_than_may():
    places = Fake(1, most=3)
    places.waits = lambda: True
    assert [places.arrive(name, 9) for name in "abc"] == [None, None, None]
    places.waits = lambda: False
    assert [places.arrive(name, 9) for name in "defg"] == ["a d", "b e", "c", "f"]
    assert places._devices == 1


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["arrive", "leave", "work"]))),
)
def test_there_are_never_more_devices_than_places_unless_they_work(connected, steps):
    places = Fake(connected)
    here = {}
    for number, what in steps:
        name = str(number)
        if what == "arrive" and name not in here:
            peer = device(name)
            gone = [who for who, _ in places.called_back(peer, 10)]
            if peer not in gone:
                peer.is_new = False
                places.joined(peer)
                here[name] = peer
            for other in gone:
                assert not other.pending
                places.left(other, "")
                here.pop(other.name, None)
        elif what == "leave" and name in here:
            places.left(here.pop(name), "")
        elif what == "work" and name in here:
            here[name].pending["request"] = ()
        assert places._devices == len(here) <= connected
        assert set(places._places) <= set(here)


@pytest.fixture
async def crowded(tmp_path, monkeypatch):
    """A server with one place, whose devices come back soon."""
    monkeypatch.setattr(check_ins, "SHORTEST_SECONDS", 0.4)
    monkeypatch.setattr(check_ins, "STAY_SECONDS", 0.0)
    monkeypatch.setattr(members, "_COUNT_SECONDS", 0.0)
    monkeypatch.setattr(members, "_COUNT_SHARE", math.inf)
    fleet = Fleet(tmp_path)
    await fleet.listen(lease_seconds=3.0)
    fleet.link.check_ins = CheckIns(1, 2)
    fleet.reasons = []

    class Noted(ParticipantListener):
        def left(self, peer, reason):
            fleet.reasons.append((peer.name, reason))

    fleet.link.listeners.attach(Noted())
    yield fleet
    await fleet.close()


async def test_a_device_that_is_not_needed_hangs_up_and_comes_back(crowded, monkeypatch):
    first = await crowded.join("phone-0", replying(examples=1))
    presence = FleetPresence(crowded.state, crowded.link, dict)
    crowded.link.listeners.attach(presence)
    await crowded.join("phone-1", replying(examples=2))
    await wait_until(lambda: crowded.reasons)
    ((name, reason),) = crowded.reasons
    assert name == "phone-0"
    assert reason.startswith("not needed: checks in again at ")
    assert not first.connection.done()
    seen = presence.snapshot().participants["phone-0"]
    assert not seen.online
    assert in_words(seen.checks_in_at) in reason
    seen_at = seen.changed(checks_in_at=time.time() + 600)
    snapshot = presence.snapshot()
    later = dataclasses.replace(snapshot, participants={"phone-0": seen_at})
    rows = fleet_rows(crowded.registry().participants(), later)
    assert {row.name: row.state for row in rows} == {
        "phone-0": in_words(seen_at.checks_in_at),
        "phone-1": "never seen",
    }
    await wait_until(lambda: "phone-0" in crowded.link.peers)  # and makes phone-1 go in its turn
    await wait_until(lambda: "phone-1" not in crowded.link.peers)
    request = training_request(crowded.link)
    assert (await crowded.link.ask("phone-0", request)).trained.examples == 1


async def test_devices_that_are_away_are_counted_until_their_time_has_come(crowded):
    await crowded.join("phone-0", replying(examples=1))
    presence = FleetPresence(crowded.state, crowded.link, dict)
    soon, later = time.time() + 600, time.time() + 900
    times = {"phone-0": soon, "phone-1": soon, "phone-2": later, "phone-3": time.time() - 1}
    presence._seen = {name: Seen(checks_in_at=at) for name, at in times.items()}
    found = presence.figures()
    assert (found.direct, found.aggregated, found.away) == (1, 0, 2)
    assert found.next_check_in == soon
    assert found.enrolled == 1


async def test_a_device_that_is_revoked_while_it_is_away_is_not_counted(crowded):
    """One that joins again under the name of such a device is."""
    await crowded.member("phone-0")
    presence = FleetPresence(crowded.state, crowded.link, dict)
    presence._seen = {"phone-0": Seen(checks_in_at=time.time() + 600)}
    assert presence.figures().away == 1
    crowded.registry().revoke("phone-0")
    await wait_until(lambda: presence.figures().away == 0)
    assert presence.figures().next_check_in is None
    shutil.rmtree(crowded.folder / "phone-0")
    await crowded.member("phone-0")
    await wait_until(lambda: presence.figures().away == 1)


async def test_a_device_whose_owner_refuses_stays(crowded):
    member = await crowded.member("phone-0")
    crowded.dial(member, ScriptedParticipant(replying(examples=1)), stays=True)
    await wait_until(lambda: "phone-0" in crowded.link.peers)
    await crowded.join("phone-1", replying(examples=2))
    await crowded.join("phone-2", replying(examples=3))
    await wait_until(lambda: crowded.reasons)
    assert "phone-0" in crowded.link.peers
    assert {name for name, _ in crowded.reasons} <= {"phone-1", "phone-2"}
    assert (await crowded.link.ask("phone-0", training_request(crowded.link))).trained.examples == 1


async def test_one_that_is_sent_away_at_once_is_asked_for_nothing(crowded):
    joined = []

    class Noted(ParticipantListener):
        def joined(self, peer):
            joined.append(peer.name)

    crowded.link.listeners.attach(Noted())
    crowded.link.check_ins.trains = lambda: True
    await crowded.join("phone-0", replying())
    crowded.dial(await crowded.member("phone-1"), ScriptedParticipant(replying()))
    await wait_until(lambda: "phone-1" in [name for name, _ in crowded.reasons])
    assert joined == ["phone-0"]
    crowded.link.check_ins.waits = lambda: True  # a job waits for more devices
    await wait_until(lambda: "phone-1" in joined)


async def test_a_certificate_is_renewed_before_a_device_goes(crowded, monkeypatch):
    member = await crowded.member("phone-0")
    monkeypatch.setattr(Membership, "renew_at", property(lambda self: renew_at[0]))
    renew_at = [0.0]
    before = member.certificate.serial_number
    await crowded.join("phone-1", replying())
    crowded.link.check_ins.trains = lambda: True
    crowded.dial(member, ScriptedParticipant(replying()))
    await wait_until(lambda: "phone-0" in [name for name, _ in crowded.reasons])
    renew_at[0] = math.inf
    assert member.certificate.serial_number != before


@pytest.mark.parametrize("seconds", [-1.0, 0.0, math.nan, math.inf, 1e9])
async def test_a_server_cannot_keep_a_device_away_for_ever(crowded, seconds, monkeypatch):
    errors = []
    serve = uplink.Uplink._serve_one_stream

    async def noted(self):
        with pytest.raises(UpdateError) as caught:
            await serve(self)
        errors.append(str(caught.value))
        monkeypatch.setattr(uplink.Uplink, "_serve_one_stream", serve)
        raise caught.value

    monkeypatch.setattr(uplink.Uplink, "_serve_one_stream", noted)
    await crowded.join("phone-0", replying())
    peer = crowded.link.peers["phone-0"]
    stream = peer.stream
    crowded.link._call_back(peer, seconds)
    await wait_until(lambda: errors)
    assert errors == [f"the server's check-in has seconds={seconds}"]
    await wait_until(lambda: peer.stream not in (stream, None))  # it is back at once


async def test_the_time_in_which_a_device_is_suspended_counts(crowded, monkeypatch):
    """It comes back when it wakes up after that time, and not as much later as it has slept."""
    monkeypatch.setattr(check_ins, "SHORTEST_SECONDS", 3600.0)
    monkeypatch.setattr(uplink, "_AWAKE_SECONDS", 0.01)
    slept = [0.0]
    since_boot = uplink._seconds_since_boot
    monkeypatch.setattr(uplink, "_seconds_since_boot", lambda: since_boot() + slept[0])
    crowded.link.check_ins.trains = lambda: True
    await crowded.join("phone-0", replying())
    crowded.dial(await crowded.member("phone-1"), ScriptedParticipant(replying()))
    await wait_until(lambda: "phone-1" in [name for name, _ in crowded.reasons])
    crowded.link.check_ins.waits = lambda: True

    def is_back():
        slept[0] += 3600.0  # again, if it has not yet gone to sleep
        return "phone-1" in crowded.link.peers

    await wait_until(is_back)


async def test_no_pause_is_longer_than_a_server_may_keep_a_device_away(
    crowded, monkeypatch, caplog
):
    """Nor are those after a broken connection, of which the server says how they are spread."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(CheckInSchedule, "spread", uplink._LONGEST_AWAY)
    await crowded.member("phone-0")  # so that there are more than may be connected
    crowded.dial(await crowded.member("phone-1"), ScriptedParticipant(replying()))
    await wait_until(lambda: "welcome has spread_seconds=129600" in caplog.text)
    backoff = Backoff(60.0)
    backoff.spread = uplink._LONGEST_SPREAD
    for _ in range(50):
        backoff.broke(open_seconds=0.0)
        assert backoff.pause() <= uplink._LONGEST_AWAY


def test_devices_spread_their_return_after_a_break():
    pauses = []
    for _ in range(200):
        backoff = Backoff(60.0)
        backoff.spread = 100.0
        backoff.broke(open_seconds=99.0)
        pauses.append(backoff.pause())
        backoff.broke(open_seconds=0.0)
        assert 100 <= backoff.pause() <= 200
    assert max(pauses) <= 100
    assert min(pauses) < 10 < 90 < max(pauses)


def test_a_check_in_without_a_server_is_repeated_after_a_part_of_its_time():
    backoff = Backoff(60.0)
    backoff.away = 3600.0
    for _ in range(50):
        backoff.broke(open_seconds=0.0)
        assert 450 <= backoff.pause() <= 900
