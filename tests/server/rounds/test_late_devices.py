"""A device that is ready some seconds after the quorum takes part, and what it costs is told."""

import asyncio
import io
import logging

import pytest
from rich.console import Console
from tests.server.rounds.results import invited_devices
from tests.server.waiting import SteppedClock, wait_until

from isthmus.job.tables import TimeSection
from isthmus_server.read.console.run_page import run_page
from isthmus_server.read.console.shown_run import ShownRun
from isthmus_server.read.report.late_devices import LateDevices
from isthmus_server.read.report.progress import ProgressView
from isthmus_server.read.report.report import read_report, show
from isthmus_server.rounds.cohort_wait import CohortWait
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.events import (
    CohortAwaited,
    EventStream,
    ParticipantLate,
    RoundCommitted,
    RoundPlanned,
    WaitingForParticipants,
)

SETTINGS = ("federated.clients=0", "federated.cohort=4", "federated.quorum=3", "rounds=10")


class LateDevice:
    """A device `d` that leaves when a round is committed, and is back so many seconds later.

    They pass while a round waits for it; what is left of them passes while the others train.
    """

    def __init__(self, deployment, network, timeouts, late):
        self.deployment = deployment
        self.network = network
        self.timeouts = timeouts
        self.late = late
        self.is_awaited = False
        self.back_at = late
        self.connection = None
        self.coming = None
        self.roster = None
        deployment.before_training = self.before_training

    def __call__(self, event):
        if isinstance(event, RoundCommitted):
            self.leave()
        elif isinstance(event, RoundPlanned):
            self.is_awaited = False
        elif isinstance(event, WaitingForParticipants) and event.missing == ["d"]:
            self.is_awaited = True
            if self.connection is None and self.coming is None:
                self.coming = asyncio.create_task(self.come())

    def leave(self):
        if self.connection is not None:
            self.connection.cancel()
            self.connection = None
            self.deployment.link.disconnect("d", "lost: it has left")
        self.back_at = self.timeouts.passed + self.late

    async def come(self):
        while self.is_awaited and self.timeouts.passed < self.back_at:
            self.timeouts.advance(1.0)
            for _ in range(100):  # those who have waited go on before more passes
                await asyncio.sleep(0)
        self.coming = None
        if self.timeouts.passed >= self.back_at and self.connection is None:
            self.connect()

    def connect(self):
        self.connection = self.network.dial(self.deployment.device("d"), "d")

    async def before_training(self):
        if self.timeouts.passed < self.back_at:
            self.timeouts.advance(self.back_at - self.timeouts.passed)
        if self.connection is None:
            self.connect()
        await wait_until(lambda: "d" in self.roster.clients)


async def run_with_late_device(deployment, network, timeouts, late, *settings):
    """Ten rounds with three devices that stay and one that is late; the store and the terminal."""
    await deployment.start()
    deployment.link.enrolments.clients = lambda: iter("abcd")
    store = deployment.create_run("run", *SETTINGS, *settings)
    shown = io.StringIO()
    events = EventStream()
    events.subscribe(ProgressView(Console(file=shown, width=300)))
    clock = SteppedClock(timeouts)
    coordinator = Coordinator(RunParts.of(store, deployment.link, events, clock))
    device = LateDevice(deployment, network, timeouts, late)
    device.roster = coordinator.roster
    events.subscribe(device)
    await coordinator.run()
    return store, shown.getvalue()


def page_of(store):
    page = io.StringIO()
    show(read_report(store), Console(file=page, width=300))
    return page.getvalue()


@pytest.mark.parametrize("secure", ["true", "false"])
async def test_a_device_that_is_seven_seconds_late_is_in_all_rounds(
    deployment, network, timeouts, secure
):
    secure = f"federated.secure_aggregation={secure}"
    store, shown = await run_with_late_device(deployment, network, timeouts, 7.0, secure)
    assert invited_devices(read_report(store).to_json()) == [["a", "b", "c", "d"]] * 10
    waits = [event for event in store.events() if isinstance(event, CohortAwaited)]
    assert [event.seconds for event in waits] == pytest.approx([7.0] * 10)
    sentence = (
        "10 waits for devices that were not ready took 70 s in all: d was in 10 more rounds, "
        "7 s late"
    )
    assert sentence in page_of(store)
    assert shown.count(sentence) == 1
    assert "left out" not in shown


async def test_a_device_that_the_job_does_not_wait_for_is_named_with_what_to_set(
    deployment, network, timeouts, caplog
):
    with caplog.at_level(logging.WARNING):
        store, shown = await run_with_late_device(
            deployment, network, timeouts, 7.0, "time.cohort_seconds=5"
        )
    assert invited_devices(read_report(store).to_json()) == [["a", "b", "c"]] * 10
    # The last absence is over when the run ends: the device was ready while the others trained.
    sentence = (
        "d was left out of 10 of 10 rounds because it is ready 7 s late; set "
        "time.cohort_seconds=10 to wait for it"
    )
    assert sentence in page_of(store)
    assert sentence in shown
    (warning,) = (each for each in caplog.messages if "left out" in each)
    assert warning == (
        "d was left out of 3 rounds because it is ready 7 s late; set time.cohort_seconds=10 to "
        "wait for it"
    )
    # Once it is known that it takes longer than the job allows, no round waits for it.
    waits = [event for event in store.events() if isinstance(event, CohortAwaited)]
    assert [event.round for event in waits] == [1]
    run = ShownRun(store.directory, "run")
    run.refresh()
    assert sentence in run_page(run, {})["warnings"]
    run.close()


async def test_a_run_that_is_resumed_waits_as_long_as_before(deployment, network, timeouts):
    settings = "rounds=4", "time.cohort_seconds=20"
    store, _ = await run_with_late_device(deployment, network, timeouts, 12.0, *settings)
    wait = CohortWait(store.job.time, pytest.fail)
    wait.restore(store.events())
    assert wait.seconds("d", connected=False) == pytest.approx(12.0 * 1.25 + 1.0)
    resumed = RunParts.of(deployment.reopen(store), deployment.link)
    assert resumed.roster._waits.seconds("d", connected=False) == pytest.approx(16.0)


async def test_a_device_that_is_opening_the_run_is_awaited_for_longer(
    deployment, network, timeouts
):
    """It is there, and only its data take a while."""
    await deployment.start()
    store = deployment.create_run("run", *SETTINGS, "rounds=2")
    clock = SteppedClock(timeouts)
    coordinator = Coordinator(RunParts.of(store, deployment.link, clock=clock))
    slow = deployment.device("d")
    opened = asyncio.Event()
    work = slow.work

    async def late_work(request, model, progress):
        if request.WhichOneof("work") == "open":
            await opened.wait()
        return await work(request, model, progress)

    slow.work = late_work
    network.dial(slow, "d")
    await wait_until(lambda: "d" in deployment.link.peers)

    async def pass_time():
        for _ in range(40):
            timeouts.advance(1.0)
            for _ in range(100):
                await asyncio.sleep(0)
        opened.set()

    def on_event(event):
        if isinstance(event, WaitingForParticipants) and event.missing == ["d"]:
            tasks.append(asyncio.create_task(pass_time()))
            unsubscribe()

    tasks = []
    unsubscribe = coordinator.events.subscribe(on_event)
    await coordinator.run()
    assert invited_devices(read_report(store).to_json()) == [["a", "b", "c", "d"]] * 2
    (wait,) = (event for event in store.events() if isinstance(event, CohortAwaited))
    assert wait.seconds == pytest.approx(40.0)
    assert wait.given_up == []


async def test_devices_that_are_all_ready_wait_for_nothing(deployment, timeouts):
    await deployment.start(names=("a", "b", "c", "d"))
    store = deployment.create_run("run", *SETTINGS, "rounds=3")
    clock = SteppedClock(timeouts)
    coordinator = Coordinator(RunParts.of(store, deployment.link, clock=clock))
    published = []
    coordinator.events.subscribe(published.append)
    await wait_until(lambda: len(deployment.link.peers) == 4)
    await coordinator.run()
    planned = next(at for at, event in enumerate(published) if isinstance(event, RoundPlanned))
    rest = published[planned:]
    assert not any(isinstance(event, CohortAwaited | WaitingForParticipants) for event in rest)


def waits_of(*late, cohort_seconds=None):
    """What is known after a device `d` was late by these seconds."""
    wait = CohortWait(TimeSection(cohort_seconds=cohort_seconds), lambda sentence: None)
    for seconds in late:
        wait.quorum({"d"}, 0.0)
        wait.ready("d", seconds)
    return wait


@pytest.mark.parametrize(
    ("late", "cohort_seconds", "seconds"),
    [
        ((), None, 10.0),
        ((), 30.0, 30.0),
        ((), 0.0, 0.0),
        ((2.0,), None, 10.0),
        ((2.0,), 5.0, 5.0),
        ((2.0,), 0.0, 0.0),
        ((12.0,), None, 16.0),
        ((12.0,) * 9 + (20.0,), None, 16.0),
        ((50.0,), None, 60.0),
        ((90.0,), None, 0.0),
        ((90.0,), 120.0, 113.5),
        ((12.0, 30000.0), None, 16.0),
        ((30000.0, 30000.0, 7.0), None, 0.0),
        ((30000.0,) * 10 + (12.0,) * 5, None, 16.0),
    ],
)
def test_the_wait_for_a_device_follows_its_own_times(late, cohort_seconds, seconds):
    wait = waits_of(*late, cohort_seconds=cohort_seconds)
    assert wait.seconds("d", connected=False) == seconds


def test_a_device_that_connects_and_never_is_ready_is_awaited_twice():
    wait = waits_of()
    awaited = 0
    for round_ in range(1, 11):
        wait.quorum({"d"}, float(round_))
        if wait.is_awaited("d"):
            awaited += 1
            wait.give_up("d")
        wait.begin(round_, full=False)
        wait.joined("d")
    assert awaited == 2
    wait.ready("d", 11.0)
    wait.quorum({"d"}, 12.0)
    assert wait.is_awaited("d")


def test_a_device_that_returns_to_decline_again_is_awaited_twice():
    wait = waits_of()
    awaited = 0
    for round_ in range(1, 11):
        wait.joined("d")
        wait.quorum({"d"}, float(round_))
        awaited += wait.is_awaited("d")
        wait.declined("d")
        wait.begin(round_, full=False)
    assert awaited == 2
    wait.quorum({"d"}, 11.0)
    wait.ready("d", 18.0)
    wait.quorum({"d"}, 19.0)
    assert wait.is_awaited("d")
    assert wait.seconds("d", connected=False) == 10.0


def test_repeated_attempts_at_a_round_count_once():
    wait = waits_of()
    wait.quorum({"d"}, 0.0)
    for round_ in (1, 1, 1, 2):
        wait.begin(round_, full=round_ == 2)
    late = wait.ready("d", 5.0)
    assert (late.rounds_missed, late.rounds_full) == (2, 1)


def test_a_lasting_exclusion_is_one_warning():
    warnings = []
    wait = CohortWait(TimeSection(), warnings.append)
    wait.quorum({"d"}, 0.0)
    for round_ in range(1, 6):
        wait.begin(round_, full=False)
        wait.warn_of_lasting("d", 10.0 * round_)
    assert warnings == [
        "d is connected and has been opening the run for 30 s, in which 3 rounds have begun "
        "without it"
    ]


def test_where_others_fill_the_cohort_a_longer_wait_is_not_proposed():
    late = ParticipantLate(participant="d", seconds=7.0, rounds_missed=9, rounds_full=9)
    assert LateDevices([late]).sentences(10) == [
        "d was left out of 9 of 10 rounds because it is ready 7 s late and enough others are "
        "ready before; a larger federated.cohort has it, too"
    ]


def test_a_device_that_was_away_for_hours_was_not_late():
    away = ParticipantLate(participant="d", seconds=30000.0, rounds_missed=9)
    assert LateDevices([away]).sentences(10) == []
    warnings = []
    wait = CohortWait(TimeSection(), warnings.append)
    for away_seconds in (30000.0, 7.0):
        wait.quorum({"d"}, 0.0)
        for round_ in range(1, 10):
            wait.begin(round_, full=True)
        wait.ready("d", away_seconds)
        assert len(warnings) == (away_seconds == 7.0)


def test_a_device_that_was_still_opening_the_run_at_its_end_is_named():
    late = ParticipantLate(participant="d", seconds=95.0, rounds_missed=10, was_ready=False)
    assert LateDevices([late]).sentences(10) == [
        "d was left out of 10 of 10 rounds because it was still opening the run after 95 s"
    ]


def test_waits_in_vain_are_part_of_the_cost():
    waits = CohortAwaited(round=1, seconds=10.0, given_up=["d"])
    assert LateDevices([waits]).sentences(10) == [
        "1 wait for devices that were not ready took 10 s in all: in vain for d"
    ]
