import asyncio
import math
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import JobError
from isthmus.job.federated import DeviceHours, FederatedSection, Participation, Utility
from isthmus.job.section import Hours
from isthmus.task import Participant
from isthmus.wire import link_pb2
from isthmus_clients.device.agent import Agent
from isthmus_server.rounds.clock import Clock
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.roster import _hours
from isthmus_server.strategy import Plan, Stop, Wait
from isthmus_server.strategy.attendance import Attendance, Record
from isthmus_server.strategy.cohort import select
from isthmus_server.strategy.limits import hold
from isthmus_server.strategy.utility import utilities
from isthmus_server.views.report import document

from .observing import observe

NAMES = [f"client-{i}" for i in range(20)]
HOUR = 3600.0
MONDAY = 4 * 24 * HOUR


def receipt(name, status="accepted", **more):
    known = {"started": True, "seconds": 1.0, "examples": 10, "loss": 1.0}
    return {"participant": name, "status": status, **known, **more}


# -- uniform ---------------------------------------------------------------------------------------


@given(
    st.sets(st.text(max_size=4), max_size=12),
    st.integers(1, 9),
    st.integers(1, 5),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_the_same_names_seed_and_round_give_the_same_cohort(ready, wanted, round_, guided, shuffle):
    known = {
        name: Record(asked=[(1, 0.0)], seconds=shuffle.random(), examples=5, loss=shuffle.random())
        for name in sorted(ready)
        if shuffle.random() < 0.5
    }
    settings = {"records": known, "guided": Utility() if guided else None}
    listed = list(ready)
    chosen = select(listed, wanted=wanted, seed=1, round_=round_, **settings)
    shuffle.shuffle(listed)
    again = select(listed, wanted=wanted, seed=1, round_=round_, **settings)
    assert chosen == again == sorted(set(chosen))
    assert set(chosen) <= ready
    assert len(chosen) == min(wanted, len(ready))


def test_every_device_is_invited_about_as_often():
    counts = Counter()
    for round_ in range(2000):
        counts.update(select(NAMES, wanted=5, seed=3, round_=round_))
    # Binomial(2000, 1/4): mean 500, deviation 19.4; five of them hold it with p > 0.9999.
    assert set(counts) == set(NAMES)
    assert all(abs(count - 500) < 97 for count in counts.values())


def test_rounds_and_seeds_draw_anew():
    one, round_, seed = (
        select(NAMES, wanted=5, seed=s, round_=r) for s, r in ((0, 1), (0, 2), (1, 1))
    )
    assert len({tuple(one), tuple(round_), tuple(seed)}) == 3


def test_over_selection_rounds_up():
    assert FederatedSection(cohort=5, quorum=5, over_selection=1.1).invited == 6


# -- by utility ------------------------------------------------------------------------------------


def records(**changes):
    return {
        name: Record(asked=[(3, 0.0)], seconds=1.0, examples=10, loss=1.0, **changes)
        for name in NAMES
    }


def test_losses_and_examples_are_worth_more_and_slowness_less():
    known = records()
    known["client-1"].loss = 0.2
    known["client-2"].examples = 1
    known["client-3"].seconds = 4.0
    known["client-4"].asked = [(1, 0.0)]
    known["client-5"].loss = 1e9  # clipped to the others' quantile
    found = utilities(known, NAMES, Utility(), round_=4)
    usual = found["client-0"]
    assert found["client-1"] < usual
    assert found["client-2"] < usual
    assert found["client-3"] == pytest.approx(usual / 16)
    assert found["client-4"] > usual
    assert found["client-5"] == pytest.approx(usual)


def test_where_losses_are_secret_speed_and_bonus_decide():
    known = records()
    for record in known.values():
        record.loss, record.examples = None, 0
    known["client-3"].seconds = 4.0
    found = utilities(known, NAMES, Utility(uncertainty=0.0), round_=4)
    assert found["client-0"] == 1.0
    assert found["client-3"] == pytest.approx(1 / 16)


def test_new_devices_are_tried_and_then_the_best_come_back():
    known = {name: record for name, record in records().items() if name not in NAMES[10:]}
    for name in ("client-0", "client-1"):
        known[name].loss = 5.0
    early = select(NAMES, wanted=10, seed=1, round_=1, records=known, guided=Utility())
    assert sum(name not in known for name in early) == 9
    late = select(NAMES, wanted=10, seed=1, round_=200, records=known, guided=Utility())
    assert sum(name not in known for name in late) == 2
    assert {"client-0", "client-1"} <= set(late)


def test_without_exploration_the_most_useful_are_taken():
    known = records()
    best = {"client-3", "client-7", "client-11"}
    for name in known.keys() - best:
        known[name].loss = 0.1
    settings = Utility(exploration=0.0, min_exploration=0.0)
    for round_ in range(4, 20):
        assert (
            set(select(NAMES, wanted=3, seed=1, round_=round_, records=known, guided=settings))
            == best
        )


# -- hours and participation -----------------------------------------------------------------------


@given(st.integers(1, 4), st.floats(0.5, 48), st.integers(0, 50), st.randoms())
def test_no_device_is_asked_more_often_than_its_cap_allows(rounds, hours, seed, shuffle):
    """Whatever times rounds begin at, any stretch of so many hours has at most so many of them."""
    settings = FederatedSection(participation=Participation(rounds=rounds, hours=hours))
    attendance, now, asked = Attendance(settings), 0.0, []
    for round_ in range(1, 30):
        now += shuffle.random() * 4 * HOUR
        rest = attendance.rests_for("a", now)
        if rest > 0:
            before = attendance.rests_for("a", now + rest * 0.99)
            assert before > 0
            assert attendance.rests_for("a", now + rest + 1e-3) == 0.0
            continue
        attendance.take(round_, asked_at=now, seconds=1.0, receipts=[receipt("a")])
        attendance.take(round_, asked_at=now, seconds=1.0, receipts=[receipt("a", "dropped")])
        asked.append(now)
    for first in asked:
        assert sum(first <= at < first + hours * HOUR for at in asked) <= rounds


def test_a_cap_on_the_whole_run_ends_for_good():
    attendance = Attendance(FederatedSection(participation=Participation(rounds=2)))
    for round_ in (1, 2):
        assert attendance.rests_for("a", 0.0) == 0.0
        attendance.take(round_, asked_at=0.0, seconds=1.0, receipts=[receipt("a", "rejected")])
    assert attendance.rests_for("a", 1e12) == math.inf
    assert attendance.rests_for("b", 0.0) == 0.0


def test_devices_have_hours_of_their_own_by_name():
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
    assert attendance.rests_for("tablet-3", morning) == 15 * HOUR
    assert attendance.rests_for("tablet-3", MONDAY) == 0.0
    assert attendance.rests_for("tablet-3", MONDAY + 5.5 * 24 * HOUR) == 0.0  # Saturday noon
    assert attendance.rests_for("car-1", morning) == HOUR
    assert attendance.rests_for("laptop", morning) == 0.0
    # Below its cap again at 09:30 on the next day, it rests until its hour on the day after.
    at = MONDAY + 8.5 * HOUR
    attendance.take(1, asked_at=at, seconds=1.0, receipts=[receipt("car-1")])
    assert attendance.rests_for("car-1", at) == (48 + 8 - 8.5) * HOUR


def test_a_device_is_asked_when_it_and_the_job_both_have_hours():
    settings = FederatedSection(hours=(DeviceHours(devices="*", opens="20:00", closes="08:00"),))
    attendance = Attendance(settings)
    own = [Hours.parse("06:00-22:00")]
    morning = MONDAY + 7 * HOUR
    assert attendance.rests_for("a", morning, own) == 0.0
    assert attendance.rests_for("a", morning + 2 * HOUR, own) == 11 * HOUR
    assert attendance.rests_for("a", MONDAY + 23 * HOUR, own) == 7 * HOUR
    assert attendance.rests_for("a", morning, [Hours.parse("mon 10:00-12:00")]) == math.inf


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
    with pytest.raises(JobError, match="its hours have more than 32 entries, or one of more than"):
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
    assert report["reason"].startswith("0 devices may be asked and the quorum is 3; 3 rest")


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
    again = await place.killed(Coordinator(store, place.link), "round", 3)
    await Coordinator(again, place.link).run()
    assert took_part(document(again)) == took_part(whole)
    assert len({tuple(cohort) for cohort in took_part(whole)}) > 1


def test_a_plan_for_devices_that_rest_waits_for_them():
    seen = observe(clients_ready=2, clients_resting=4, needed=3, enough_in=600.0)
    held = hold(Plan("federated", "x"), seen)
    assert isinstance(held.answer, Wait)
    assert held.answer.seconds == 600.0
    assert "2 devices may be asked and the quorum is 3; 4 rest" in held.adjustments[0]
    assert hold(Plan("datacenter", "x"), seen).answer.regime == "datacenter"
    others = observe(clients_ready=2, clients_resting=0, needed=3)
    assert hold(Plan("federated", "x"), others).answer.regime == "federated"  # who may still come
    forever = observe(clients_ready=2, clients_resting=4, needed=3)
    assert isinstance(hold(Plan("hybrid", "x"), forever).answer, Stop)
