"""Which devices may be invited, in a job that protects their examples."""

import math

from tests.server.storage import records

from isthmus_server.rounds.availability import DeviceAvailability
from isthmus_server.storage.records import Receipt

KEYS = ("federated.privacy.epsilon=5", "federated.privacy.delta=1e-3", "rounds=2")


class Clock:
    def utc(self):
        return 0.0


def asked(name, **changes):
    return Receipt(participant=name, regime="federated", status="dropped", **changes)


def test_a_device_is_asked_as_often_as_its_noise_is_made_for(make_job):
    """By attempts, as the device counts, and as if nothing had stopped the run in between."""
    availability = DeviceAvailability(make_job(*KEYS), Clock())
    first = records.failed_attempt(1, [asked("a"), asked("b", started=False)])
    again = records.round_record(1, [asked("a"), asked("b")], attempt=2)
    availability.add(first)
    assert availability.seconds_until("a", ()) == 0
    availability.add(again)
    assert availability.seconds_until("a", ()) == math.inf
    assert availability.seconds_until("b", ()) == 0
    resumed = DeviceAvailability(make_job(*KEYS), Clock(), [first, again])
    assert resumed.seconds_until("a", ()) == math.inf


def test_with_noise_of_the_job_it_is_asked_as_often(make_job):
    attempts = [records.failed_attempt(1, [asked("a")])]
    job = make_job(*KEYS, "federated.privacy.noise=2")
    assert DeviceAvailability(job, Clock(), attempts).seconds_until("a", ()) == 0
    assert DeviceAvailability(job, Clock(), attempts * 2).seconds_until("a", ()) == math.inf
