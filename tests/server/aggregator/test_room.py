"""Room for requests to an aggregator, which jobs share."""

import asyncio
import contextlib

from isthmus_server.transport.aggregator_room import VECTORS_AT_ONCE, AggregatorRoom


async def test_a_job_whose_vectors_do_not_come_leaves_room_for_others():
    room = AggregatorRoom()
    taken = []

    async def hold(job):
        async with room.vector(job):
            taken.append(job)
            await asyncio.sleep(3600)

    async def begin(job, count):
        tasks = [asyncio.create_task(hold(job)) for _ in range(count)]
        for _ in range(3):
            await asyncio.sleep(0)
        return tasks

    tasks = await begin("a", 2 * VECTORS_AT_ONCE)
    assert taken == ["a"] * (VECTORS_AT_ONCE // 2)
    tasks += await begin("b", 2 * VECTORS_AT_ONCE)
    assert taken.count("b") == VECTORS_AT_ONCE // 4
    async with asyncio.timeout(30):
        async with room.steps, room.vector("c"):  # a sum is opened, and a vector of it is added
            pass
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    del taken[:]
    tasks = await begin("c", 1)
    assert taken == ["c"]
    tasks[0].cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await tasks[0]
    assert not room._held
    assert not room._waiting


async def test_a_place_that_is_given_to_one_that_is_cancelled_then_is_free_again():
    room = AggregatorRoom()
    async with contextlib.AsyncExitStack() as stack:
        for job in range(VECTORS_AT_ONCE):
            await stack.enter_async_context(room.vector(job))
        waiting = asyncio.create_task(room.vector("late").__aenter__())
        await asyncio.sleep(0)
    # The last place has just been given to it, and it has not run since.
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert not room._held
