"""Work that is not interrupted, however often it is cancelled."""

import asyncio

import pytest

from isthmus.transport.stream import to_the_end


async def test_work_ends_before_any_number_of_cancellations_is_raised():
    may_end = asyncio.Event()
    ended = []

    async def work():
        await may_end.wait()
        ended.append(True)

    task = asyncio.create_task(to_the_end(work()))
    for _ in range(3):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended
