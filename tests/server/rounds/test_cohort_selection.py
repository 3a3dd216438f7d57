"""Which devices are invited: hours, caps on participation, and selection by utility."""

import pytest
from tests.outside_package import OutsidePackage
from tests.server.rounds.results import invited_devices
from tests.server.waiting import wait_until

from isthmus.errors import UserError
from isthmus.task import Participant
from isthmus_clients.device.agent import Agent
from isthmus_server.read.report.report import read_report
from isthmus_server.rounds.clock import Clock
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.events import RoundPlanned

HOUR = 3600.0
MONDAY = 4 * 24 * HOUR


class VirtualClock(Clock):
    """Virtual time that passes only in waits."""

    def __init__(self):
        self.time = MONDAY + 7 * HOUR
        self.waits = []

    def now(self):
        return self.time

    utc = now

    async def sleep(self, seconds):
        self.time += seconds
        if seconds:
            self.waits.append(seconds)


async def test_devices_are_invited_within_their_hours_and_cap(deployment):
    await deployment.start(names=("day-1", "day-2", "day-3", "night-1", "night-2", "night-3"))
    clock = VirtualClock()
    report, _ = await deployment.run(
        "run",
        "rounds=4",
        "federated.participation={rounds=1, hours=20}",
        "federated.hours=[{devices='day-*', opens='06:00', closes='20:00'}, "
        "{devices='night-*', opens='20:00', closes='06:00'}]",
        clock=clock,
    )
    assert (
        invited_devices(report)
        == [
            ["day-1", "day-2", "day-3"],
            ["night-1", "night-2", "night-3"],
        ]
        * 2
    )
    # From 07:00 to 20:00, to 06:00 on Tuesday (their cap ended at 03:00), to 20:00 again.
    assert clock.waits == [13 * HOUR, 10 * HOUR, 14 * HOUR]


async def test_devices_declare_their_own_hours(deployment, network):
    await deployment.start(names=())
    for name in ("a", "b", "c", "d"):
        hours = ["20:00-06:00"] if name == "d" else []
        network.dial(Agent(Participant(name=name, regime="federated"), None, hours=hours), name)
    await wait_until(lambda: len(deployment.link.peers) == 4)
    wants_four = ("federated.cohort=4", "federated.quorum=3")
    report, _ = await deployment.run("run", "rounds=1", *wants_four, clock=VirtualClock())
    assert invited_devices(report) == [["a", "b", "c"]]
    wrong = Agent(Participant(name="e", regime="federated"), None, hours=["at night"])
    network.dial(wrong, "e")
    await wait_until(lambda: len(deployment.link.peers) == 5)
    report, _ = await deployment.run("again", "rounds=1", clock=VirtualClock())
    (declined,) = (event for event in report["events"] if event["kind"] == "declined")
    assert declined["reason"].startswith("the hours 'at night' are not of the form")


async def test_a_run_ends_when_no_device_may_be_invited_any_more(deployment):
    await deployment.start()
    report, _ = await deployment.run("run", "federated.participation={rounds=2}", "rounds=5")
    assert invited_devices(report) == [["a", "b", "c"]] * 2
    assert report["reason"].startswith("0 devices may be invited and the quorum is 3; 3 are")


async def test_guided_selection_is_the_same_after_a_crash(deployment):
    names = tuple(f"d{i}" for i in range(6))
    await deployment.start(names=names)
    settings = (
        "federated.selection=utility",
        "federated.utility={exploration=0.5, slowness=0}",  # times here are real
        "federated.secure_aggregation=false",
        "rounds=4",
        "federated.clients=6",
    )
    uninterrupted, _ = await deployment.run("whole", *settings)
    assert all(r["loss"] > 0 for row in uninterrupted["rounds"] for r in row["receipts"])

    store = deployment.create_run("killed", *settings)
    again = await deployment.run_until_killed(
        Coordinator(RunParts.of(store, deployment.link)), RoundPlanned, 3
    )
    await Coordinator(RunParts.of(again, deployment.link)).run()
    assert invited_devices(read_report(again).to_json()) == invited_devices(uninterrupted)
    assert len({tuple(cohort) for cohort in invited_devices(uninterrupted)}) > 1


FEW = """
class Few:
    def __init__(self, federated): pass

    def select(self, request):
        return list(request.devices)[:2]
"""


@pytest.mark.parametrize("secure", ["true", "false"])
async def test_a_selection_of_too_few_devices_is_named(deployment, tmp_path, monkeypatch, secure):
    await deployment.start()
    entries = {"isthmus.device_selections/few": "Few"}
    package = OutsidePackage(tmp_path / "site", f"few_{tmp_path.name}", FEW, entries)
    overrides = (
        f"federated.secure_aggregation={secure}",
        "federated.selection=few",
        "attempts=1",
        "time.join_seconds=3",
    )
    sentence = r"selection='few' selected 2 of 3 available devices and the quorum is 3; lower the"
    with package.on_path(monkeypatch), pytest.raises(UserError, match=sentence):
        await deployment.run("run", *overrides)


async def test_the_cohort_of_a_plan_replaces_that_of_the_job(deployment, planned):
    await deployment.start(names=tuple("abcdef"))
    report, _ = await deployment.run("run", *planned([{"cohort": 5}, {}]))
    assert [row["participants"]["invited"] for row in report["rounds"]] == [5, 3]
    assert [row["cost"]["price"] for row in report["rounds"]] == [5.0, 3.0]
