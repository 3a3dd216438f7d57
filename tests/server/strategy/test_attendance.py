"""When a device may be invited again: participation caps and hours."""

import math

from hypothesis import given
from hypothesis import strategies as st

from isthmus.job.federated import FederatedSection, Participation
from isthmus.job.section import DeviceHours, Hours
from isthmus_server.storage.records import Receipt
from isthmus_server.strategy.attendance import Attendance

HOUR = 3600.0
MONDAY = 4 * 24 * HOUR


def receipt(name, status="accepted"):
    return Receipt(
        participant=name, regime="federated", status=status, seconds=1.0, examples=10, loss=1.0
    )


@given(st.integers(1, 4), st.floats(0.5, 48), st.integers(0, 50), st.randoms())
def test_no_device_is_invited_more_often_than_its_cap_allows(rounds, hours, seed, rng):
    """Any period as long as the cap's has at most so many rounds, whenever rounds begin."""
    settings = FederatedSection(participation=Participation(rounds=rounds, hours=hours))
    attendance, now, invitations = Attendance(settings), 0.0, []
    for round_ in range(1, 30):
        now += rng.random() * 4 * HOUR
        delay = attendance.seconds_until_eligible("a", now)
        if delay > 0:
            assert attendance.seconds_until_eligible("a", now + delay * 0.99) > 0
            assert attendance.seconds_until_eligible("a", now + delay + 1e-3) == 0.0
            continue
        for status in ("accepted", "dropped"):
            attendance.record_attempt(
                round_, started_at=now, seconds=1.0, receipts=[receipt("a", status)]
            )
        invitations.append(now)
    for first in invitations:
        assert sum(first <= at < first + hours * HOUR for at in invitations) <= rounds


def test_a_cap_on_the_whole_run_is_final():
    attendance = Attendance(FederatedSection(participation=Participation(rounds=2)))
    for round_ in (1, 2):
        assert attendance.seconds_until_eligible("a", 0.0) == 0.0
        attendance.record_attempt(
            round_, started_at=0.0, seconds=1.0, receipts=[receipt("a", "rejected")]
        )
    assert attendance.seconds_until_eligible("a", 1e12) == math.inf
    assert attendance.seconds_until_eligible("b", 0.0) == 0.0


def test_a_job_sets_hours_by_device_name():
    settings = FederatedSection(
        hours=(
            DeviceHours(devices="tablet-*", opens="22:00", closes="06:00"),
            DeviceHours(devices="tablet-*", opens="12:00", closes="13:00", days=("sat",)),
            DeviceHours(devices="car-1", opens="08:00", closes="09:00"),
        ),
        participation=Participation(rounds=1, hours=25),
    )
    attendance = Attendance(settings)
    morning = MONDAY + 7 * HOUR
    assert attendance.seconds_until_eligible("tablet-3", morning) == 15 * HOUR
    assert attendance.seconds_until_eligible("tablet-3", MONDAY) == 0.0
    assert (
        attendance.seconds_until_eligible("tablet-3", MONDAY + 5.5 * 24 * HOUR) == 0.0
    )  # Saturday noon
    assert attendance.seconds_until_eligible("car-1", morning) == HOUR
    assert attendance.seconds_until_eligible("laptop", morning) == 0.0
    # Below its cap again at 09:30 on the next day, it is eligible in its hour on the day after.
    at = MONDAY + 8.5 * HOUR
    attendance.record_attempt(1, started_at=at, seconds=1.0, receipts=[receipt("car-1")])
    assert attendance.seconds_until_eligible("car-1", at) == (48 + 8 - 8.5) * HOUR


def test_a_device_is_eligible_where_its_own_hours_and_the_jobs_overlap():
    settings = FederatedSection(hours=(DeviceHours(devices="*", opens="20:00", closes="08:00"),))
    attendance = Attendance(settings)
    device_hours = [Hours.parse("06:00-22:00")]
    morning = MONDAY + 7 * HOUR
    assert attendance.seconds_until_eligible("a", morning, device_hours) == 0.0
    assert attendance.seconds_until_eligible("a", morning + 2 * HOUR, device_hours) == 11 * HOUR
    assert attendance.seconds_until_eligible("a", MONDAY + 23 * HOUR, device_hours) == 7 * HOUR
    assert (
        attendance.seconds_until_eligible("a", morning, [Hours.parse("mon 10:00-12:00")])
        == math.inf
    )
