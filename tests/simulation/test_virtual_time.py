"""An event loop whose clock jumps to the next timer."""

import asyncio
import threading
import time

from isthmus_simulation.virtual_time import START, VirtualClock, VirtualTimeLoop


def simulated(work):
    """The result of a coroutine on a loop with virtual time, and the real seconds it took."""
    started = time.monotonic()
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        result = runner.run(work)
    return result, time.monotonic() - started


def test_waits_take_no_time_and_end_in_order():
    async def work():
        ended = []

        async def sleeper(seconds):
            await asyncio.sleep(seconds)
            ended.append((seconds, asyncio.get_running_loop().time()))

        year = 365 * 24 * 3600.0
        await asyncio.gather(*map(sleeper, (3.0, 2 * year, 0.5, 2 * year + 1e-3)))
        return ended

    ended, seconds = simulated(work())
    assert [wanted for wanted, _ in ended] == sorted(wanted for wanted, _ in ended)
    assert all(abs(wanted - at) < 1e-5 for wanted, at in ended)
    assert seconds < 30  # and not years


def test_time_stands_still_while_something_can_be_done():
    async def work():
        loop, turns = asyncio.get_running_loop(), 0
        late = loop.create_task(asyncio.sleep(1.0))
        for _ in range(1000):
            await asyncio.sleep(0)
            turns += await asyncio.to_thread(lambda: 1)
        assert not late.done()
        before = loop.time()
        await late
        return turns, before, loop.time()

    assert simulated(work())[0] == (1000, 0.0, 1.0)


def test_blocking_work_runs_in_the_calling_thread_and_its_errors_are_raised():
    async def work():
        own = await asyncio.to_thread(threading.get_ident) == threading.get_ident()
        try:
            await asyncio.to_thread(int, "none")
        except ValueError:
            return own
        return False

    assert simulated(work())[0]


def test_a_time_limit_ends_what_takes_longer():
    async def work():
        try:
            async with asyncio.timeout(10):
                await asyncio.sleep(11)
        except TimeoutError:
            return asyncio.get_running_loop().time()

    assert simulated(work())[0] == 10.0


def test_the_clock_of_a_run_goes_on_where_it_was():
    async def work():
        clock = VirtualClock(elapsed=50.0)
        await clock.sleep(7.0)
        return clock.now(), clock.utc()

    assert simulated(work())[0] == (START + 57.0, START + 57.0)
