"""What `isthmus server participants` shows of a running server, over real TLS."""

import asyncio
import contextlib
import json
import math
import time
import types

import pytest
from click.testing import CliRunner
from tests.server.service.conftest import fleet, operated  # noqa: F401 - fixtures
from tests.server.waiting import wait_until

from isthmus import __version__
from isthmus_server.cli.server import server
from isthmus_server.fleet import members
from isthmus_server.fleet import presence as module
from isthmus_server.fleet.presence import FILE, FleetPresence, read_snapshot
from isthmus_server.fleet.snapshot import FleetSnapshot, Seen
from isthmus_server.fleet.table import print_fleet
from isthmus_server.storage.events import EventStream, ParticipantDeclined


@contextlib.asynccontextmanager
async def kept(operated):  # noqa: F811
    presence = FleetPresence(operated.state, operated.link, operated.runner.waiting)
    operated.runner.observers.followers.append(presence.following)
    async with presence.kept():
        yield presence


async def shown(operated):  # noqa: F811
    arguments = ["participants", str(operated.state), "--json"]
    output = (await asyncio.to_thread(CliRunner().invoke, server, arguments)).output
    document = json.loads(output)
    document["participants"] = {row["name"]: row for row in document["participants"]}
    return document


async def test_who_is_online_busy_missing_or_has_declined(operated, monkeypatch):  # noqa: F811
    monkeypatch.setattr(module, "_WRITE_SECONDS", 0.02)
    async with kept(operated) as presence:
        job = await operated.submit(operated.job())
        await operated.dial_device("a")

        def waits():
            found = read_snapshot(operated.state)
            return found and "ready: 1 of 3" in found.waiting.get(job, "")

        await wait_until(waits)
        document = await shown(operated)
        assert document["server"] == "running"
        assert document["waiting"][job].startswith("waiting for 3 devices; ready: 1 of 3 devices")
        device = document["participants"]["a"]
        assert (device["state"], device["version"], device["busy"]) == ("online", __version__, [])
        assert document["participants"]["me"]["state"] == "-"
        for name in "bc":
            await operated.dial_device(name)

        def works():
            devices = read_snapshot(operated.state).participants.values()
            return len(devices) == 3 and all(device.busy for device in devices)

        await wait_until(works)
        document = await shown(operated)
        assert document["waiting"] == {}
        work = {"job": job, "round": 1, "work": "train_local"}
        assert document["participants"]["b"]["busy"] == [work]
        operated.gate.set()
        assert await operated.ended(job) == "finished"
        events = EventStream()
        with presence.following("run", "other-9", events):
            events.publish(ParticipantDeclined(participant="c", reason="its battery is low"))
        declined = presence.snapshot().participants["c"].declined
        assert (declined["job"], declined["reason"]) == ("other-9", "its battery is low")
    document = await shown(operated)
    assert document["server"] == "not running"
    device = document["participants"]["c"]
    assert (device["state"], device["busy"]) == ("offline", [])
    assert device["last_seen"] > 0
    text = CliRunner().invoke(server, ["participants", str(operated.state)]).output
    assert "c declined other-9: its battery is low" in text
    assert "the server is not running" in text
    async with kept(operated):  # a restart remembers who was there
        await wait_until(lambda: read_snapshot(operated.state).running)
        assert (await shown(operated))["participants"]["c"]["declined"]["job"] == "other-9"


@pytest.mark.parametrize("join_seconds", [300, 1])
async def test_a_job_that_lacks_devices_says_when_the_next_check_in(
    operated,  # noqa: F811
    monkeypatch,
    join_seconds,
):
    monkeypatch.setattr(members, "_COUNT_SECONDS", 0.0)
    monkeypatch.setattr(members, "_COUNT_SHARE", math.inf)
    operated.link.check_ins.connected = 1
    operated.link.check_ins.away = lambda: [("c", 120.0), ("b", 60.0)]
    await operated.dial_device("a")
    await operated.member("b")
    job = await operated.submit(operated.job(f"time.join_seconds={join_seconds}"))
    away = "2 devices are away until they check in, the next at 00:01 and 00:02 UTC"

    def says():
        reason = operated.runner.queue.get(job).reason
        return away in (reason if join_seconds == 1 else operated.runner.waiting().get(job, ""))

    await wait_until(says)


async def test_a_damaged_file_is_written_anew(operated, monkeypatch):  # noqa: F811
    (operated.state / FILE).write_bytes(b"nothing")
    assert (await shown(operated))["server"] == "not running"
    async with kept(operated):
        await wait_until(lambda: read_snapshot(operated.state))
    assert (operated.state / FILE).stat().st_mode & 0o077 == 0


def test_a_participant_with_a_link_that_is_too_slow_is_named(capsys):
    entry = types.SimpleNamespace(
        name="clinic", kind="client", joined=0.0, revoked=None, not_after=time.time(), rollout=""
    )
    for rate, says in ((9_000.0, True), (125_000.0, False), (0.0, False)):
        seen = {"clinic": Seen(kind="client", online=True, last_seen=1.0, rate=rate)}
        found = FleetSnapshot(at=time.time(), running=True, participants=seen, waiting={})
        print_fleet([entry], found)
        sentence = (
            "clinic moves 9 kB/s: rounds of jobs with a larger time.least_rate (20 kB/s by "
            "default) may end without it"
        )
        assert (sentence in capsys.readouterr().out) == says
