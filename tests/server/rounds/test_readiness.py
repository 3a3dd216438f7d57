"""A round waits for its whole cohort, for a while and only while more devices are expected."""

import asyncio
import itertools

import pytest
from tests.server.rounds.results import invited_devices
from tests.server.waiting import SteppedClock

from isthmus.errors import RoundFailed
from isthmus_server.read.report.report import read_report
from isthmus_server.rounds.assignment import resolve_plan
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.events import WaitingForParticipants
from isthmus_server.strategy.policy import Plan

SETTINGS = ("federated.clients=0", "federated.cohort=4", "federated.quorum=3", "rounds=2")


async def run_with_four_enrolled(deployment, monkeypatch, on_wait, clock=None):
    """A run with devices a, b, c, and with d, which has joined the server and is not connected."""
    await deployment.start()
    monkeypatch.setattr(deployment.link.enrolments, "clients", lambda: iter("abcd"))
    store = deployment.create_run("run", *SETTINGS, "time.cohort_seconds=77")
    coordinator = Coordinator(RunParts.of(store, deployment.link, clock=clock))
    waits = []

    def wait(event):
        if isinstance(event, WaitingForParticipants) and event.missing == ["d"]:
            waits.append(event)
            on_wait()

    coordinator.events.subscribe(wait)
    await coordinator.run()
    return invited_devices(read_report(store).to_json()), waits


async def test_a_round_waits_for_a_device_that_joins(deployment, network, monkeypatch):
    def dial():
        network.dial(deployment.device("d"), "d")

    invited, waits = await run_with_four_enrolled(deployment, monkeypatch, dial)
    assert invited == [["a", "b", "c", "d"]] * 2
    assert len(waits) == 1


async def test_a_device_that_does_not_come_is_awaited_once(deployment, timeouts, monkeypatch):
    def pass_time():
        asyncio.get_running_loop().call_soon(timeouts.advance, 77)

    clock = SteppedClock(timeouts)
    invited, waits = await run_with_four_enrolled(deployment, monkeypatch, pass_time, clock)
    assert invited == [["a", "b", "c"]] * 2
    assert len(waits) == 1


async def test_a_revoked_device_that_has_taken_part_is_expected_no_more(deployment, monkeypatch):
    """Others may come; a run would wait for this one until somebody ends it."""
    await deployment.start()
    store = deployment.create_run("run", *SETTINGS, "rounds=1")
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    await coordinator.run()
    roster = coordinator.roster
    lost = roster.clients.pop("a")
    roster.left(deployment.link.peers.pop(lost.name), "it has left")
    assert roster.may_come(1)
    assert not roster.may_come(2)
    monkeypatch.setattr(deployment.link.enrolments, "clients", lambda: iter("bcd"))
    deployment.link.enrolments.revoked_names = {"a"}
    assert roster.may_come(1)
    assert not roster.may_come(2)


async def test_no_more_devices_are_read_than_it_takes_to_wait(deployment, monkeypatch):
    """A million may have joined."""
    await deployment.start()
    store = deployment.create_run("run", *SETTINGS)
    roster = Coordinator(RunParts.of(store, deployment.link)).roster
    names = itertools.count()
    monkeypatch.setattr(deployment.link.enrolments, "clients", lambda: map(str, names))
    assert roster.may_come(10)
    assert next(names) <= 10


async def test_a_round_is_not_begun_without_the_datacenter_that_it_is_planned_with(deployment):
    """It may leave after it was there, and before the turn of the job comes."""
    await deployment.start()
    store = deployment.create_run("run")
    parts = RunParts.of(store, deployment.link)
    plan = Plan("hybrid", "it is planned")
    with pytest.raises(RoundFailed, match="no datacenter is ready any more, and the round was"):
        resolve_plan(
            parts.job, parts.progress.state, parts.roster, parts.cohorts, (), plan, 1, None
        )
