import asyncio
import time

import pytest

from isthmus.errors import JobError, UpdateError
from isthmus.job.section import Hours
from isthmus.task import Participant
from isthmus.wire import link_pb2
from isthmus_clients.device.agent import Agent
from isthmus_server.rounds.clock import Clock
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.roster import _hours
from isthmus_server.storage.events import RoundPlanned
from isthmus_server.views.report import read_report

NAMES = [f"client-{i}" for i in range(20)]
HOUR = 3600.0
MONDAY = 4 * 24 * HOUR


def test_hours_of_another_form_are_refused():
    with pytest.raises(JobError, match="are not of the form 22:00-06:00"):
        Hours.parse("10-12")
    assert Hours.parse("sat,sun 10:00-12:00").days == ("sat", "sun")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("federated.selection=best", "federated.selection='best'"),
        ("federated.participation={hours=3}", "federated.participation.rounds is missing"),
        ("federated.participation.rounds=0", "federated.participation.rounds=0"),
        ("federated.hours=[{opens='22:00', closes='06:00'}]", "federated.hours.0.devices is miss"),
        ("federated.hours=[{devices='a', opens='25:00', closes='06:00'}]", "hours.0.opens='25:00'"),
        ("federated.utility.exploration=2", "federated.utility.exploration=2"),
        ("federated.utility.pace=2", "unknown key federated.utility.pace"),
    ],
)
def test_a_wrong_key_is_refused_by_name(make_job, override, sentence):
    with pytest.raises(JobError) as caught:
        make_job(override)
    assert sentence in str(caught.value)


# -- in a run --------------------------------------------------------------------------------------


class Jumping(Clock):
    """Virtual time in which a round takes no time and waiting takes what it takes."""

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


async def test_hours_go_by_what_the_clock_shows_and_durations_do_not(monkeypatch):
    """Somebody sets the machine's clock in the middle of a long run."""
    clock, shown, naps = Clock(), [time.time()], []

    async def nap(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            shown[0] += HOUR

    monkeypatch.setattr(time, "time", lambda: shown[0])
    monkeypatch.setattr(asyncio, "sleep", nap)
    before = clock.now()
    await clock.sleep(HOUR)
    assert len(naps) == 3
    assert max(naps) <= 60
    assert clock.utc() == shown[0]
    assert clock.now() - before < 60


def took_part(report):
    return [
        [receipt["participant"] for receipt in row["receipts"]]
        for row in report["rounds"]
        if row["regime"] == "federated"
    ]


async def test_a_run_asks_each_device_within_its_hours_and_cap(place):
    await place.listen(names=("day-1", "day-2", "day-3", "night-1", "night-2", "night-3"))
    clock = Jumping()
    report, _ = await place.run(
        "run",
        "rounds=4",
        "federated.participation={rounds=1, hours=20}",
        "federated.hours=[{devices='day-*', opens='06:00', closes='20:00'}, "
        "{devices='night-*', opens='20:00', closes='06:00'}]",
        clock=clock,
    )
    assert (
        took_part(report)
        == [
            ["day-1", "day-2", "day-3"],
            ["night-1", "night-2", "night-3"],
        ]
        * 2
    )
    # From 07:00 to 20:00, to 06:00 on Tuesday (their cap ended at 03:00), to 20:00 again.
    assert clock.waits == [13 * HOUR, 10 * HOUR, 14 * HOUR]


async def test_a_device_says_itself_when_it_may_be_asked(place, net):
    await place.listen(names=())
    for name in ("a", "b", "c", "d"):
        hours = ["20:00-06:00"] if name == "d" else []
        net.call(Agent(Participant(name=name, regime="federated"), None, hours=hours), name)
    await net.until(lambda: len(place.link.peers) == 4)
    wants_four = ("federated.cohort=4", "federated.quorum=3")
    report, _ = await place.run("run", "rounds=1", *wants_four, clock=Jumping())
    assert took_part(report) == [["a", "b", "c"]]
    wrong = Agent(Participant(name="e", regime="federated"), None, hours=["at night"])
    net.call(wrong, "e")
    await net.until(lambda: len(place.link.peers) == 5)
    report, _ = await place.run("again", "rounds=1", clock=Jumping())
    (declined,) = (event for event in report["events"] if event["kind"] == "declined")
    assert declined["reason"].startswith("the hours 'at night' are not of the form")


@pytest.mark.parametrize("hours", [["20:00-06:00"] * 33, ["20:00-06:00" + " " * 64]])
def test_hours_are_bounded_before_they_are_read(hours):
    with pytest.raises(UpdateError, match="its hours have more than 32 entries, or one of"):
        _hours(link_pb2.Opened(hours=hours))


async def test_examples_beside_which_nobody_else_s_would_count_are_refused(place, net):
    async def work(guest, request, model):
        return link_pb2.Reply(opened=link_pb2.Opened(examples=1 << 62)), None

    await place.listen()
    await net.join("liar", work)
    report, _ = await place.run("run", "rounds=1")
    assert took_part(report) == [["a", "b", "c"]]
    (declined,) = (event for event in report["events"] if event["kind"] == "declined")
    assert declined["participant"] == "liar"
    assert declined["reason"] == f"it has {1 << 62} examples, and {1 << 30} are the most"


async def test_a_run_ends_when_nobody_may_be_asked_any_more(place):
    await place.listen()
    report, _ = await place.run("run", "federated.participation={rounds=2}", "rounds=5")
    assert took_part(report) == [["a", "b", "c"]] * 2
    assert report["reason"].startswith("0 devices may be invited and the quorum is 3; 3 are")


async def test_guided_selection_is_the_same_after_a_crash(place):
    names = tuple(f"d{i}" for i in range(6))
    await place.listen(names=names)
    settings = (
        "federated.selection=utility",
        "federated.utility={exploration=0.5, slowness=0}",  # times here are real
        "federated.secure_aggregation=false",
        "rounds=4",
        "federated.clients=6",
    )
    whole, _ = await place.run("whole", *settings)
    assert all(r["loss"] > 0 for row in whole["rounds"] for r in row["receipts"])

    store = place.create("killed", *settings)
    again = await place.killed(Coordinator(store, place.link), RoundPlanned, 3)
    await Coordinator(again, place.link).run()
    assert took_part(read_report(again).to_json()) == took_part(whole)
    assert len({tuple(cohort) for cohort in took_part(whole)}) > 1
