"""Heartbeats on streams whose two ends are in one process."""

import asyncio
import contextlib

import pytest

from isthmus.transport import heartbeats, stream
from isthmus.transport.heartbeats import Heartbeats
from isthmus.transport.stream import Stream
from isthmus.wire import link_pb2

LEASE = 30.0
PING = link_pb2.Envelope(ping=link_pb2.Ping()).SerializeToString()
NEWS = link_pb2.Envelope(cancel=link_pb2.Cancel(id="x"))


class Clock:
    """A clock that advances to the next timer when no other work is left."""

    def __init__(self, loop):
        self.now = loop.time()
        self._ready = loop._selector.select

    def monotonic(self):
        return self.now

    def select(self, timeout=None):
        found = self._ready(0 if timeout is not None else None)
        if not found and timeout is not None:
            self.now += timeout
        return found


@pytest.fixture(autouse=True)
async def clock(monkeypatch):
    """The clock of all streams and timers in a test."""
    loop = asyncio.get_running_loop()
    clock = Clock(loop)
    monkeypatch.setattr(loop._selector, "select", clock.select)
    monkeypatch.setattr(loop, "time", clock.monotonic)
    for module in (heartbeats, stream):
        monkeypatch.setattr(module, "time", clock)
    return clock


class Wire:
    """One end of a call, and what was written into it."""

    def __init__(self):
        self.arriving = asyncio.Queue()
        self.other = None
        self.sent = []

    async def read(self):
        return await self.arriving.get()

    async def write(self, data, /):
        self.sent.append(data)
        if self.other is not None:
            self.other.arriving.put_nowait(data)


def wires():
    one, other = Wire(), Wire()
    one.other, other.other = other, one
    return one, other


async def listen(heartbeats, stream):
    async with heartbeats.of(stream):
        while await stream.receive() is not None:
            pass


async def end(*tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_idle_streams_exchange_as_few_pings_as_necessary():
    ours, theirs = wires()
    tasks = [
        asyncio.create_task(listen(Heartbeats(LEASE, 4), Stream(ours))),
        asyncio.create_task(listen(Heartbeats(LEASE), Stream(theirs, answers=True))),
    ]
    done, _ = await asyncio.wait(tasks, timeout=4 * LEASE)
    assert not done
    await end(*tasks)
    assert set(ours.sent) == set(theirs.sent) == {PING}
    assert len(ours.sent) <= 12  # three in a lease
    assert len(theirs.sent) <= 2 * len(ours.sent)


async def test_only_a_silent_stream_is_ended():
    heartbeats = Heartbeats(LEASE, 4)
    (ours, theirs), silent = wires(), Wire()
    alive = [
        asyncio.create_task(listen(heartbeats, Stream(ours))),
        asyncio.create_task(listen(Heartbeats(LEASE), Stream(theirs, answers=True))),
    ]
    loop = asyncio.get_running_loop()
    begun = loop.time()
    with pytest.raises(TimeoutError):
        await listen(heartbeats, Stream(silent))
    assert loop.time() - begun >= LEASE
    assert not any(task.done() for task in alive)
    await end(*alive)


async def test_time_without_a_pending_receive_does_not_count_as_silence():
    wire = Wire()
    stream = Stream(wire)
    async with Heartbeats(LEASE).of(stream):
        await asyncio.sleep(2 * LEASE)  # at work on what came
        wire.arriving.put_nowait(NEWS.SerializeToString())
        assert (await stream.receive()).cancel.id == "x"


async def test_time_in_which_this_process_was_stalled_does_not_count(clock):
    """On an overloaded machine, pings have arrived but could not be read yet."""
    ours, theirs = wires()
    tasks = [
        asyncio.create_task(listen(Heartbeats(LEASE, 4), Stream(ours))),
        asyncio.create_task(listen(Heartbeats(LEASE), Stream(theirs, answers=True))),
    ]
    done, _ = await asyncio.wait(tasks, timeout=LEASE / 8)
    clock.now += 2 * LEASE
    done, _ = await asyncio.wait(tasks, timeout=LEASE)
    assert not done
    await end(*tasks)


async def test_a_stream_that_sends_messages_sends_no_pings():
    wire = Wire()
    stream = Stream(wire)
    async with Heartbeats(LEASE, 4).of(stream):
        for _ in range(20):
            await stream.send(NEWS)
            await asyncio.sleep(LEASE / 20)
    assert wire.sent == [NEWS.SerializeToString()] * 20


async def test_no_timer_runs_without_streams():
    heartbeats = Heartbeats(0.001)
    with contextlib.suppress(TimeoutError):
        await listen(heartbeats, Stream(Wire()))
    await asyncio.sleep(0.01)
    assert heartbeats._timer is None
