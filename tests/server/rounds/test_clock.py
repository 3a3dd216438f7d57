"""The clock of a run."""

import asyncio
import time

from isthmus_server.rounds.clock import Clock

HOUR = 3600.0


async def test_hours_follow_the_wall_clock_and_durations_do_not(monkeypatch):
    """The machine's clock is set in the middle of a long run."""
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
