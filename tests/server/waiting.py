"""Wait for conditions, and let timeouts expire, without depending on the speed of the machine."""

import asyncio

from isthmus_server.rounds.clock import Clock


async def wait_until(condition):
    """Wait until a condition is true; the limit is so long that only a hang reaches it."""
    async with asyncio.timeout(300.0):
        while not condition():  # noqa: ASYNC110 - most conditions have no event
            await asyncio.sleep(0.002)


class Timeouts:
    """Ends chosen waits at once: those made after it, by `asyncio.timeout` or `call_later`.

    A wait is identified by its length in seconds, so a test chooses a length that no other wait
    has.
    """

    def __init__(self, monkeypatch):
        self._loop = asyncio.get_running_loop()
        self._waits = []
        """Pairs of a length in seconds and a function that ends the wait, if it is running."""
        self._limits = []
        """Pairs of the time at which an `asyncio.timeout` ends, by `passed`, and the function."""
        self.passed = 0.0
        """Seconds that `advance` has let pass."""
        self._timeout, self._call_later = asyncio.timeout, self._loop.call_later
        monkeypatch.setattr(asyncio, "timeout", self._recorded_timeout)
        monkeypatch.setattr(self._loop, "call_later", self._recorded_call_later)

    def _recorded_timeout(self, delay):
        timeout = self._timeout(delay)
        self._waits.append((delay, lambda: self._end_timeout(timeout)))
        if delay is not None:
            self._limits.append((self.passed + delay, lambda: self._end_timeout(timeout)))
        return timeout

    def _recorded_call_later(self, delay, callback, *arguments, **options):
        handle = self._call_later(delay, callback, *arguments, **options)
        self._waits.append((delay, lambda: self._call_now(handle, callback, *arguments)))
        return handle

    def _end_timeout(self, timeout):
        try:
            timeout.reschedule(self._loop.time())
        except RuntimeError:  # it has ended, or has not begun
            return False
        return True

    def _call_now(self, handle, callback, *arguments):
        if handle.cancelled():
            return False
        handle.cancel()
        callback(*arguments)
        return True

    async def expire(self, seconds):
        """End all waits of this length; waits until there is one."""

        def ended():
            expired = [wait for wait in self._waits if wait[0] == seconds and wait[1]()]
            self._waits = [wait for wait in self._waits if wait not in expired]
            return expired

        await wait_until(ended)

    def advance(self, seconds):
        """Let time pass: every running `asyncio.timeout` that is over by then ends."""
        self.passed += seconds
        over = [limit for limit in self._limits if limit[0] <= self.passed]
        self._limits = [limit for limit in self._limits if limit[0] > self.passed]
        for _, end in over:
            end()


class SteppedClock(Clock):
    """The clock of a run whose time passes with that of `Timeouts.advance`."""

    def __init__(self, timeouts):
        super().__init__()
        self._timeouts = timeouts

    def now(self):
        return self._start + self._timeouts.passed
