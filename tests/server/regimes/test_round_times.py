"""How long a round may take follows from what its devices took."""

import asyncio
import logging
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.regimes.replies import LARGER, updating
from tests.server.regimes.secure_run import SecureRun
from tests.server.regimes.test_plaintext import prepare, statuses  # noqa: F401 - a fixture
from tests.server.scripted_participant import delayed
from tests.server.waiting import wait_until

from isthmus.job.tables import TimeSection
from isthmus_server.regimes.round_times import LONGEST_SECONDS, SHORTEST_SECONDS, RoundTimes
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.records import Receipt


@pytest.fixture
async def secure_run(network, make_job, write_task, tmp_path):
    write_task()
    await network.listen()
    settings = ("cohort=5", "quorum=3", "secure_aggregation=true", "clip=4.0", "max_examples=100")
    job = make_job(*(f"federated.{setting}" for setting in settings))
    run = SecureRun(network, job, tmp_path)
    await run.open()
    return run


def test_a_jobs_own_limit_is_kept():
    times = RoundTimes(TimeSection(round_seconds=77.0))
    times.took("a", 500.0)
    times.late("b", after=77.0)
    assert times.seconds(["a", "b"]) == times.seconds([]) == 77.0


def test_a_round_has_time_for_the_slowest_of_its_own_devices():
    times = RoundTimes(TimeSection())
    for seconds in (100.0, 100.0, 90.0, 110.0):
        times.took("slow", seconds)
    times.took("fast", 1.0)
    assert times.seconds(["slow", "fast"]) == 330.0
    assert times.seconds(["fast"]) == SHORTEST_SECONDS
    assert times.seconds(["fast", "new"]) == 600.0


def test_one_slow_time_in_ten_makes_no_later_round_longer():
    times = RoundTimes(TimeSection())
    for seconds in [50.0] * 9 + [900.0]:
        times.took("a", seconds)
    assert times.seconds(["a"]) == 150.0


def test_a_device_that_needs_longer_is_found_out(caplog):
    caplog.set_level(logging.INFO)
    times = RoundTimes(TimeSection())
    needs = 1500.0
    limits = []
    while (limit := times.seconds(["a", "b"])) < needs:
        limits.append(limit)
        times.late("a", after=limit)
        times.took("b", 5.0)
    assert limits == [600.0, 1200.0]
    assert "a was not ready within a round of 600 s; its next one has 1200 s" in caplog.text
    delivered(times, "a", needs)
    assert times.seconds(["a", "b"]) == LONGEST_SECONDS


def delivered(times, name, seconds):
    """A device has trained, and its result is in the sum."""
    times.took(name, seconds)
    times.used(name)


def test_a_device_that_never_delivers_makes_fewer_and_fewer_rounds_longer(caplog):
    times = RoundTimes(TimeSection())
    times.took("b", 5.0)
    limits = []
    for _ in range(1000):
        limits.append(times.seconds(["a", "b"]))
        times.late("a", after=limits[-1])
    assert limits[:4] == [600.0, 1200.0, 2400.0, 120.0]
    longer = [place for place, limit in enumerate(limits) if limit > SHORTEST_SECONDS]
    assert longer == [0, 1, 2, 7, 16, 33, 66, 131, 260, 517]
    assert "the next 4 are no longer for it than for others; set time.round_seconds" in caplog.text
    delivered(times, "a", 5.0)  # it is back
    assert times.seconds(["a"]) == SHORTEST_SECONDS


@pytest.mark.parametrize("mostly", [150.0, 600.0, 1200.0])
def test_a_device_that_hung_three_times_in_a_row_is_not_left_out_for_ever(mostly):
    times = RoundTimes(TimeSection())
    for _ in range(10):
        delivered(times, "a", mostly)
        delivered(times, "b", 5.0)
    for _ in range(3):
        times.late("a", after=times.seconds("ab"))
    rounds_without = 0
    while (limit := times.seconds("ab")) < mostly:
        times.late("a", after=limit)
        rounds_without += 1
    assert rounds_without == 4


def test_a_device_whose_work_has_grown_twentyfold_is_found_out():
    """And one that needs nearly an hour, beginning with nothing known."""
    for first, needs in ((100.0, 2000.0), (None, 3500.0)):
        times = RoundTimes(TimeSection())
        if first is not None:
            delivered(times, "a", first)
        rounds_without = 0
        while (limit := times.seconds("ab")) < needs:
            times.late("a", after=limit)
            delivered(times, "b", 5.0)
            rounds_without += 1
        assert rounds_without <= 7


def hung(times, name, rounds=3):
    """A device was not ready in so many rounds that were longer for it."""
    for _ in range(rounds):
        times.late(name, after=times.seconds([name]))


def test_a_round_waits_for_as_many_of_those_that_rest_as_its_quorum_lacks():
    """After an outage of all, no round had the time to succeed."""
    times = RoundTimes(TimeSection())
    for name, seconds in (("a", 150.0), ("b", 200.0), ("c", 250.0), ("d", 5.0), ("e", 5.0)):
        delivered(times, name, seconds)
    for name in "abc":
        hung(times, name)
    limits = [times._unready[name].limit for name in "abc"]
    assert limits == [3600.0] * 3
    times._unready["a"].limit = 1800.0
    times._unready["b"].limit = 2400.0
    assert times.seconds("abc") == SHORTEST_SECONDS
    assert times.seconds("abcde", needed=2) == SHORTEST_SECONDS
    assert times.seconds("abcd", needed=2) == 1800.0
    assert times.seconds("abcd", needed=3) == 2400.0
    assert times.seconds("abc", needed=3) == 3600.0
    delivered(times, "a", 150.0)
    assert times.seconds("abd", needed=2) == 450.0


@pytest.mark.parametrize("quorum", [1, 2])
async def test_an_attempt_has_the_time_of_a_quorum_that_rests(prepare, network, quorum):  # noqa: F811
    attempt = await prepare("federated.cohort=2", f"federated.quorum={quorum}")
    times = attempt.regime.context.round_times
    hung(times, "a")
    delivered(times, "b", 5.0)
    devices = [await network.join(name, updating()) for name in "ab"]
    await attempt.run("a", "b")
    for device in devices:
        expected = SHORTEST_SECONDS if quorum == 1 else LONGEST_SECONDS
        assert device.requests[-1].train_local.seconds == expected


def test_a_device_that_fails_late_each_time_does_not_hold_up_all_rounds():
    """It has trained for half an hour before, and then fails at the end, or sends rubbish."""
    times = RoundTimes(TimeSection())
    for _ in range(10):
        delivered(times, "a", 1800.0)
    delivered(times, "b", 5.0)
    held_up = 0
    for place in range(100):
        limit = times.seconds("ab")
        if limit < 1800.0:
            times.late("a", after=limit)
            continue
        held_up += 1
        if place % 2:
            times.took("a", 1800.0)
        times.failed("a", after=1800.0)
    assert held_up == 7
    times.failed("b", after=60.0)  # which holds up nobody
    assert times.seconds("b") == SHORTEST_SECONDS


def test_a_device_that_answers_ever_later_is_named(caplog):
    """It may be slow, so rounds wait for it up to an hour; somebody has to decide."""
    times = RoundTimes(TimeSection())
    for _ in range(6):
        limit = times.seconds(["a", "b", "c"])
        delivered(times, "b", 5.0)
        delivered(times, "c", 12.0)
        delivered(times, "a", limit - 1.0)
    assert limit == LONGEST_SECONDS
    assert caplog.messages == [
        "rounds wait for a, which takes 3599 s where half of the others take at most 8 s; set "
        "time.round_seconds to go on without it, or federated.over_selection"
    ]


outcomes = st.sampled_from(["delivered", "late", "failed"])
events = st.tuples(st.sampled_from("abc"), outcomes, st.floats(min_value=0.0))


def replayed(happened, lease, **more):
    """What is known after these events, in rounds whose limits are as they must be."""
    times = RoundTimes(TimeSection(lease_seconds=lease), **more)
    for name, outcome, seconds in happened:
        limit = times.seconds("abc")
        assert max(SHORTEST_SECONDS, 2 * lease) <= limit <= LONGEST_SECONDS
        if outcome == "delivered":
            delivered(times, name, seconds)
        elif outcome == "late":
            times.late(name, after=limit)
        else:
            times.failed(name, after=min(seconds, limit))
    return times


@given(st.lists(events), st.floats(1.0, 590.0))
def test_no_limit_is_above_an_hour_or_below_two_leases(happened, lease):
    replayed(happened, lease)


@given(st.lists(events, max_size=6), st.floats(0.0, 3600.0))
def test_whatever_happened_a_device_that_needs_less_than_an_hour_delivers_again(happened, needs):
    times = replayed(happened, lease=10.0)
    rounds_without = 0
    while (limit := times.seconds("a")) < needs:
        times.late("a", after=limit)
        rounds_without += 1
        # As many as it rests after so many events, and after six rounds on the way to an hour.
        assert rounds_without < 2 ** (3 + len(happened) + 6)


@given(st.lists(events, max_size=12), st.integers(1, 100))
def test_whatever_happened_a_device_that_hangs_makes_few_rounds_longer(happened, rounds):
    times = replayed(happened, lease=10.0)
    longer = 0
    for _ in range(rounds):
        limit = times.seconds("a")
        longer += limit > SHORTEST_SECONDS
        times.late("a", after=limit)
    assert longer <= 3 + math.log2(1 + rounds / 4)


async def test_an_attempt_has_the_time_that_its_devices_need(prepare, network, timeouts):  # noqa: F811
    attempt = await prepare("federated.cohort=3", "federated.quorum=1")
    fast = [await network.join(name, updating()) for name in "ab"]
    slow = await network.join("slow", delayed(updating(), asyncio.Event()))
    for expected in (600.0, 1200.0):
        training = asyncio.create_task(attempt.run("a", "b", "slow"))
        await wait_until(lambda: slow.requests)
        await wait_until(lambda: all(device.receipts for device in fast))
        assert slow.requests[-1].train_local.seconds == expected
        await timeouts.expire(expected)
        result = await training
        assert statuses(result.receipts) == {"a": "accepted", "b": "accepted", "slow": "dropped"}
        assert result.receipts[2].reason == f"the round's {expected:g} s were over"
        for device in (slow, *fast):
            device.requests.clear()
            device.receipts.clear()
    await attempt.run("a", "b")
    assert attempt.regime.context.round_times.seconds(["slow"]) == 2400.0


class ShortRounds(RoundTimes):
    """Whatever takes any time counts as having held up a round, so that no test has to wait."""

    def __init__(self):
        super().__init__(TimeSection())
        self._shortest = 0.0

    def rests(self, name):
        return super().seconds([name]) == 0.0

    def seconds(self, names, needed=0):
        return 600.0 + super().seconds(names, needed)


async def test_a_device_whose_updates_are_refused_is_not_awaited_for_ever(prepare, network):  # noqa: F811
    attempt = await prepare("federated.cohort=2", "federated.quorum=1")
    times = attempt.regime.context.round_times = ShortRounds()
    await network.join("a", updating())
    await network.join("liar", updating([0.0] * 4, LARGER))
    for _ in range(3):
        assert not times.rests("liar")
        result = await attempt.run("a", "liar")
        assert statuses(result.receipts) == {"a": "accepted", "liar": "rejected"}
    assert times.rests("liar")
    assert not times.rests("a")


@pytest.mark.parametrize("fails_at", ["train_local", "inbox"])
async def test_a_device_that_fails_in_secure_rounds_is_not_awaited_for_ever(secure_run, fails_at):
    times = ShortRounds()
    secure_run.devices["c"].fails_at = fails_at
    for round_ in (1, 2, 3):
        assert not times.rests("c")
        result = await secure_run.train(round_=round_, round_times=times)
        assert statuses(result.receipts)["c"] == "rejected"
    assert times.rests("c")
    assert not any(map(times.rests, "abde"))


@pytest.mark.parametrize("secure", ["true", "false"])
async def test_a_run_learns_and_a_resumed_one_knows(deployment, secure):
    """Devices are told how long a round waits, and so know whether their link is fast enough."""
    await deployment.start()
    store = deployment.create_run(
        "run",
        "federated.cohort=3",
        "time.lease_seconds=10",
        "rounds=2",
        f"federated.secure_aggregation={secure}",
    )
    parts = RunParts.of(store, deployment.link)
    assert parts.federated.context.round_times.seconds(deployment.link.peers) == 600.0
    await Coordinator(parts).run()
    assert parts.federated.context.round_times.seconds(deployment.link.peers) == SHORTEST_SECONDS
    resumed = RoundTimes(store.job.time)
    for attempt in store.attempts():
        resumed.restore(attempt.receipts, 1.0)
    assert resumed.seconds(deployment.link.peers) == SHORTEST_SECONDS


@given(st.lists(events, max_size=20), st.floats(1.0, 590.0))
def test_a_run_that_is_resumed_goes_on_with_the_rests_of_devices(happened, lease):
    told = []
    times = replayed(happened, lease, publish=told.append)
    resumed = RoundTimes(TimeSection(lease_seconds=lease))
    resumed.restore_unready(told)
    assert resumed._unready == times._unready


async def test_a_run_that_is_killed_does_not_begin_anew_with_a_device_that_hangs(deployment):
    await deployment.start()
    store = deployment.create_run("run", "federated.cohort=3", "time.lease_seconds=10", "rounds=1")
    parts = RunParts.of(store, deployment.link)
    hung(parts.federated.context.round_times, "c")
    resumed = RunParts.of(deployment.reopen(store), deployment.link)
    times = resumed.federated.context.round_times
    assert times.seconds(["c"]) == SHORTEST_SECONDS
    assert times._unready["c"].rests == 4
    delivered(times, "c", 5.0)
    assert store_of(resumed)["c"].in_vain == 0


def store_of(parts):
    """The last event about each device that did not deliver."""
    return {event.participant: event for event in parts.store.events("unready")}


def test_only_what_devices_delivered_is_restored():
    times = RoundTimes(TimeSection())
    accepted = Receipt(participant="a", regime="federated", status="accepted", seconds=60.0)
    others = [
        Receipt(participant="b", regime="federated", status="dropped", seconds=60.0),
        Receipt(participant="c", regime="datacenter", status="accepted", seconds=60.0),
        Receipt(participant="d", regime="federated", status="accepted"),
    ]
    times.restore([accepted, *others], share=0.75)
    assert times.seconds("a") == 240.0
    assert all(times.seconds(name) == 600.0 for name in "bcd")
