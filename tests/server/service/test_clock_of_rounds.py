"""A server whose clock is wrong for a while: rounds go on, and nobody is charged for refusals.

Every test uses real TLS and real devices, whose own clocks are right.
"""

import asyncio
import contextlib
import time

import pytest
from tests.conftest import TABLE
from tests.server.budgets.test_private_measurements import VALIDATES
from tests.server.service.test_clocks import DAY, ShiftedClock
from tests.server.waiting import wait_until

from isthmus.errors import IsthmusError, PeerMisbehaved
from isthmus.task import Participant
from isthmus_clients.device.agent import Agent
from isthmus_clients.device.owner_limits import LimitsGuard, OwnerLimits, PrivacyLimits
from isthmus_clients.device.seen_clocks import SeenClocks
from isthmus_clients.training.history_files import begin_history
from isthmus_privacy.dp.ledger import LEDGER_FILE, Ledger
from isthmus_server.fleet.authority import CertificateAuthority
from isthmus_server.read.report.report import read_report
from isthmus_server.rounds.clock import Clock
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.events import JobPaused, RoundCommitted
from isthmus_server.storage.store import Store
from isthmus_server.transport.device_draws import DeviceDraws

NAMES = ("a", "b", "c")
YEAR = 365 * DAY
JOB = ("strategy.policy=federated", "federated.cohort=3", "federated.quorum=3")
PLAIN = ("federated.secure_aggregation=false",)
SECURE = ("federated.secure_aggregation=true",)
PRIVATE = (*SECURE, "privacy.mechanism=distributed", "privacy.epsilon=9", "privacy.delta=0.01")
MEASURED = (*PRIVATE, "evaluation.devices=3")


class ClockOfRounds(Clock):
    """The server's clock for rounds; durations stay right."""

    def __init__(self, wall):
        super().__init__()
        self.wall = wall

    def utc(self):
        return self.wall()


class Device(Agent):
    """A real device with its owner's limits, which notes what it refuses because of a clock."""

    def __init__(self, name, fleet, clock):
        limits = OwnerLimits(
            privacy=PrivacyLimits(clients_min=2, secure_aggregation=False), personal_mb=1
        )
        guard = LimitsGuard(limits, fleet.folder / f"{name}.json")
        super().__init__(
            Participant(name=name, regime="federated"), None, tasks=fleet.folder, guard=guard
        )
        self.fleet = fleet
        self.clock = clock
        self.refused = []
        self.wall = time.time

    async def work(self, request, model, progress):
        self._secure._enrolled().directory.now = self.wall
        step = request.secure_step
        if step.consistency_signatures and step.round == 2 and self.fleet.ahead_in_evaluation:
            self.clock.ahead = self.fleet.ahead_in_evaluation
            self.fleet.ahead_in_evaluation = 0.0
        try:
            return await super().work(request, model, progress)
        except PeerMisbehaved as error:
            self.refused.append(str(error))
            # The right time comes back after three attempts, as after ten seconds.
            if len(self.refused) == 3:
                self.clock.ahead = 0.0
            raise


async def join_device(fleet, name, clock):
    """Have a device join and connect; it is in `fleet.devices`."""
    member = await fleet.member(name)
    device = Device(name, fleet, clock)
    device._secure._signing_key = member.identity
    device._secure._history_file = begin_history(member)  # which outlives a run
    fleet.devices.append(device)
    fleet.dial(member, device, identity=device.identity, on_welcome=device.welcomed)


@pytest.fixture
async def clock(fleet):
    """The server's clock; the fleet has three devices."""
    clock = ShiftedClock()
    fleet.ahead_in_evaluation = 0.0
    fleet.devices = []
    await fleet.listen(authority=CertificateAuthority(fleet.state, now=clock))
    methods = VALIDATES.replace("\n", "\n    ").replace("eval_data = isthmus.Task.eval_data", "")
    (fleet.folder / "task.py").write_text(TABLE + methods)
    for name in NAMES:
        await join_device(fleet, name, clock)
    await wait_until(lambda: set(NAMES) <= fleet.link.peers.keys())
    return clock


async def run(fleet, clock, make_job, *overrides, after_two=0.0):
    """Run a job of four rounds; after the second one the server's clock is `after_two` ahead."""
    job = make_job(*JOB, "rounds=4", "time.join_seconds=50", "attempts=2", *overrides)
    store = fleet.stack.enter_context(
        contextlib.closing(Store.create(fleet.folder / "run", job, fleet.folder))
    )
    coordinator = Coordinator(RunParts.of(store, fleet.link, clock=ClockOfRounds(clock)))

    def set_clock(event):
        if isinstance(event, RoundCommitted) and event.record.round == 2 and after_two:
            clock.ahead = after_two
            fleet.server.members.disconnect_revoked(fleet.link)
            if not fleet.link.peers:
                clock.ahead = 0.0
        if isinstance(event, RoundCommitted) and event.record.round == 3:
            clock.ahead = 0.0

    coordinator.events.subscribe(set_clock)
    await asyncio.wait_for(coordinator.run(), 55)
    return store, read_report(store)


@pytest.mark.parametrize("kind", [PLAIN, SECURE, PRIVATE], ids=["plain", "secure", "private"])
@pytest.mark.parametrize("ahead", [3 * DAY, YEAR], ids=["days", "year"])
async def test_rounds_go_on_after_the_clock_is_right_again(fleet, clock, make_job, kind, ahead):
    begun = time.monotonic()
    store, report = await run(fleet, clock, make_job, *kind, after_two=ahead)
    assert time.monotonic() - begun < 50
    assert [record.round for record in report.rounds] == [1, 2, 3, 4]
    refused = [reason for device in fleet.devices for reason in device.refused]
    if kind is PLAIN or ahead is YEAR:  # of a year nobody is connected any more
        assert not refused
    else:
        assert len(report.failed_attempts) == 3
        assert all("more than a day from the clock of this device" in each for each in refused)
        assert all("the server's clock was set since" in each for each in refused)
        error = report.failed_attempts[0].error
        assert error.startswith("the clock of this server, which is at ")
        assert "is probably wrong, as 3 of 3 devices have clocks that are more than a day" in error
        assert all(not each.started for each in report.failed_attempts[0].receipts)
    if kind is PRIVATE:
        entries = Ledger.read(store.directory / LEDGER_FILE).entries.values()
        outcomes = [entry.outcome for entry in entries]
        expected = ["released"] * len(report.failed_attempts)
        assert outcomes == ["committed"] * 2 + expected + ["committed"] * 2
        one = report.rounds[1].epsilon
        assert {failed.epsilon for failed in report.failed_attempts} <= {one}


async def test_an_evaluation_that_all_refuse_is_not_charged(fleet, clock, make_job):
    fleet.ahead_in_evaluation = 3 * DAY
    store, report = await run(fleet, clock, make_job, *MEASURED, "rounds=2")
    entries = Ledger.read(store.directory / LEDGER_FILE).entries.values()
    outcomes = [entry.outcome for entry in entries if entry.charge.what == "evaluation"]
    assert outcomes == ["committed", "released", "released", "released", "committed"]
    assert [record.evaluation.devices for record in report.rounds] == [3, 3]
    assert all(device.refused for device in fleet.devices)


async def test_one_device_with_a_wrong_clock_is_told_so_and_the_others_go_on(
    fleet, clock, make_job
):
    late = fleet.devices[0]
    wrong = ShiftedClock(-3 * DAY)
    late._secure._clocks = SeenClocks(wall=wrong)
    late._secure._clocks.welcomed(time.time())
    late.wall = wrong
    await join_device(fleet, "d", clock)
    await wait_until(lambda: "d" in fleet.link.peers)
    _, report = await run(fleet, clock, make_job, *SECURE, "federated.cohort=4", "rounds=1")
    (record,) = report.rounds
    receipts = {receipt.participant: receipt for receipt in record.receipts}
    assert [receipts[name].status for name in "abcd"] == ["rejected", *["accepted"] * 3]
    assert "3 other devices accept it, so the clock of this device is" in receipts["a"].reason
    assert "the clock of this device is probably wrong: the server's was at" in late.refused[0]


async def test_a_server_that_was_ahead_and_is_restarted_is_not_refused(
    fleet, make_job, monkeypatch
):
    """Its devices have accepted draws of this evening, and refuse those of now."""
    ahead = 12 * 3600.0
    monkeypatch.setattr(Clock, "utc", lambda clock: time.time() + ahead)
    for folder in (fleet.folder, fleet.state / "tasks"):
        folder.mkdir(exist_ok=True)
        (folder / "task.py").write_text(TABLE + "    pass\n")
    fleet.ahead_in_evaluation = 0.0
    fleet.devices = []
    await fleet.listen(queue=True)
    for name in NAMES:
        await join_device(fleet, name, ShiftedClock())
    await wait_until(lambda: set(NAMES) <= fleet.link.peers.keys())
    runner = fleet.runner

    async def ended(seed):
        job = make_job(
            *JOB, *SECURE, "rounds=1", "attempts=1", "time.join_seconds=60", f"seed={seed}"
        )
        entry = runner.submit(job, "me", f"key-{seed}")
        async for event in runner.events(entry.id, follow=True):
            if isinstance(event, JobPaused):
                return event.reason
        return event.state

    assert await ended(1) == "finished"
    # What a new process knows, with a clock that is right again.
    ahead = 0.0
    fleet.connections[0].cancel()
    await asyncio.gather(fleet.connections[0], return_exceptions=True)
    fleet.link.enrolments.draws = DeviceDraws()
    fleet.connections.append(asyncio.create_task(runner.run()))
    assert await ended(2) == "finished"
    assert [each.refused for each in fleet.devices] == [[], [], []]


async def test_few_devices_that_refuse_the_clock_do_not_have_the_others_asked_again(
    fleet, clock, make_job
):
    """They may lie, and each attempt costs the budget of the others."""
    liar = fleet.devices[0]
    wrong = ShiftedClock(-3 * DAY)
    liar._secure._clocks = SeenClocks(wall=wrong)
    liar._secure._clocks.welcomed(time.time())
    liar.wall = wrong
    for name in "de":
        await join_device(fleet, name, clock)
    await wait_until(lambda: set("abcde") <= fleet.link.peers.keys())
    store, report = await run(fleet, clock, make_job, *PRIVATE, "federated.cohort=4", "rounds=3")
    assert len(report.rounds) == 3
    asked = [record for record in store.attempts() if "a" in record_names(record)]
    assert len(asked) <= 1  # in whichever round it was drawn first


def record_names(record):
    return {receipt.participant for receipt in record.receipts}


async def test_a_device_without_which_there_are_too_few_ends_the_run_by_refusing(
    fleet, clock, make_job
):
    liar = fleet.devices[0]
    liar._secure._clocks = SeenClocks(wall=ShiftedClock(-3 * DAY))
    liar._secure._clocks.welcomed(time.time())
    liar.wall = ShiftedClock(-3 * DAY)
    with pytest.raises(IsthmusError, match=r"round 1 failed 2 times.*more than a day from"):
        await run(fleet, clock, make_job, *SECURE)  # of three devices with a quorum of three
