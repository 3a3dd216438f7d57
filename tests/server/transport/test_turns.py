"""Jobs take turns with participants, in proportion to their shares."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_server.transport.turns import Turns


class Fleet:
    """Jobs that work for a given time in each turn, on a clock that the test moves."""

    def __init__(self):
        self.time = 0.0
        self.turns = Turns(lambda: self.time)
        self.working = {}
        self.log = []
        self._alarms = []

    async def until(self, time):
        alarm = asyncio.Event()
        self._alarms.append((time, alarm))
        await alarm.wait()

    async def work(self, account, names, seconds):
        async with self.turns.turn(account, names):
            for name in names:
                assert name not in self.working
                self.working[name] = account
            self.log.append(account.name)
            await self.until(self.time + seconds)
            for name in names:
                del self.working[name]

    async def run(self, until, *jobs):
        tasks = [asyncio.create_task(job) for job in jobs]
        while self.time < until:
            for _ in range(8):
                await asyncio.sleep(0)
            self.time += 0.1
            for time, alarm in self._alarms:
                if time <= self.time:
                    alarm.set()
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, asyncio.CancelledError | None)


async def repeat(fleet, account, names, seconds):
    while True:
        await fleet.work(account, names, seconds)


@settings(max_examples=12, deadline=None)
@given(
    shares=st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=4),
    lengths=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=4, max_size=4),
)
def test_jobs_that_always_want_the_same_devices_get_them_by_their_shares(shares, lengths):
    """Up to the length of one turn, whatever the lengths are; none is idle meanwhile."""

    async def check():
        fleet = Fleet()
        accounts = [fleet.turns.begin(f"job-{i}", share) for i, share in enumerate(shares)]
        jobs = [
            repeat(fleet, account, ("a", "b"), seconds)
            for account, seconds in zip(accounts, lengths, strict=False)
        ]
        await fleet.run(60.0, *jobs)
        used = [account.used / account.share for account in accounts]
        longest = max(2 * (s + 0.2) / share for s, share in zip(lengths, shares, strict=False))
        assert max(used) - min(used) <= 2 * longest
        assert sum(account.used for account in accounts) > 0.75 * 2 * 60

    asyncio.run(check())


async def test_rounds_on_different_devices_run_at_the_same_time():
    fleet = Fleet()
    one, other = fleet.turns.begin("one", 1.0), fleet.turns.begin("other", 1.0)
    await fleet.run(5.0, repeat(fleet, one, ("a", "b"), 1.0), repeat(fleet, other, ("c", "d"), 1.0))
    assert one.used == pytest.approx(other.used, rel=0.1)
    assert one.used > 8


async def test_a_large_cohort_is_not_overtaken_for_ever():
    """Free devices are kept for the job that is furthest behind."""
    fleet = Fleet()
    small = [fleet.turns.begin(f"small-{name}", 1.0) for name in "ab"]
    large = fleet.turns.begin("large", 1.0)
    jobs = [repeat(fleet, account, (account.name[-1],), 1.0) for account in small]
    await fleet.run(40.0, *jobs, repeat(fleet, large, ("a", "b"), 1.0))
    assert large.turns >= 10


async def test_a_job_that_was_away_has_saved_up_nothing():
    fleet = Fleet()
    one, late = fleet.turns.begin("one", 1.0), fleet.turns.begin("late", 1.0)

    async def come_late():
        await fleet.until(30)
        fleet.log.clear()
        await repeat(fleet, late, ("a",), 1.0)

    await fleet.run(50.0, repeat(fleet, one, ("a",), 1.0), come_late())
    assert abs(fleet.log.count("one") - fleet.log.count("late")) <= 2


async def test_a_cancelled_wish_and_a_failed_round_leave_nothing_held():
    turns = Turns()
    one, other = turns.begin("one", 1.0), turns.begin("other", 1.0)
    async with turns.turn(one, ["a", "b"]):
        waiting = asyncio.create_task(turns.turn(other, ["b", "c"]).__aenter__())
        await asyncio.sleep(0)
        assert turns.waits_for(other) == [one]
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert turns.holder("c") is None
    with pytest.raises(ZeroDivisionError):
        async with turns.turn(other, ["b", "c"]):
            raise ZeroDivisionError
    async with turns.turn(one, ["a", "b", "c"]):
        assert turns.holder("c") is one


async def test_one_participant_is_had_for_a_moment_before_all_turns():
    """A run is opened on a device between two rounds of others."""
    turns = Turns()
    one, other, third = (turns.begin(name, 1.0) for name in ("one", "other", "third"))
    order = []

    async def take(context, name):
        async with context:
            order.append(name)

    async with turns.turn(one, ["a"]):
        tasks = [
            asyncio.create_task(take(turns.turn(other, ["a"]), "round")),
            asyncio.create_task(take(turns.moment(third, "a"), "moment")),
        ]
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert order == ["moment", "round"]


async def test_what_is_not_charged_delays_no_later_turn():
    """A job that took 30 s to begin has its share from then on."""
    fleet = Fleet()
    large, small = fleet.turns.begin("large", 4.0), fleet.turns.begin("small", 1.0)

    async def begin_late():
        async with fleet.turns.moment(small, "a", charged=False):
            await fleet.until(30)
        fleet.log.clear()
        await repeat(fleet, small, ("a",), 0.5)

    await fleet.run(60.0, repeat(fleet, large, ("a",), 0.5), begin_late())
    assert fleet.log.count("large") / fleet.log.count("small") == pytest.approx(4, rel=0.25)


async def test_a_long_first_turn_delays_no_later_one():
    """In which devices load what they need once."""
    fleet = Fleet()
    large, small = fleet.turns.begin("large", 4.0), fleet.turns.begin("small", 1.0)

    async def slow_at_first():
        await fleet.work(small, ("a",), 20.0)
        fleet.log.clear()
        await repeat(fleet, small, ("a",), 0.5)

    await fleet.run(60.0, repeat(fleet, large, ("a",), 0.5), slow_at_first())
    assert fleet.log.count("large") / fleet.log.count("small") == pytest.approx(4, rel=0.25)
