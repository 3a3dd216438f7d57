"""Which clock is probably wrong, the device's or the server's, by what both showed before.

>>> clocks = SeenClocks(wall=lambda: 5_000.0, monotonic=lambda: 10.0)
>>> clocks.welcomed(5_000.0)
>>> clocks.doubt()
"both agreed when this device connected, so the server's clock was set since, and is probably wrong"
"""

from __future__ import annotations

import time
from collections.abc import Callable

from isthmus.system.clocks import utc

_TOLERANCE_SECONDS = 3600.0
"""Clocks that differ by more do not agree. What the doubt is about is more than a day."""


class SeenClocks:
    """The clocks of a device and of its server, as they were at the last welcome."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Both are functions that return seconds; the first in Unix time."""
        self._wall = wall
        self._monotonic = monotonic
        self._server = 0.0
        self._own = 0.0
        self._at = 0.0

    def welcomed(self, server: float) -> None:
        """Take the server's clock (Unix seconds) from a welcome, once for each."""
        if server != self._server:
            self._server = server
            self._own = self._wall()
            self._at = self._monotonic()

    def doubt(self) -> str:
        """Which clock is probably wrong, for an owner who reads that the two do not agree."""
        own = self._wall()
        passed = self._monotonic() - self._at
        if not self._server:
            return "set the clock that is wrong, of this device or of the server"
        if abs(own - self._own - passed) > _TOLERANCE_SECONDS:
            return (
                f"the clock of this device was set since it connected, when it was at "
                f"{utc(self._own)}, and is probably wrong"
            )
        if abs(own - self._server - passed) > _TOLERANCE_SECONDS:
            return (
                f"the clock of this device is probably wrong: the server's was at "
                f"{utc(self._server)} when this device connected, and this device's at "
                f"{utc(self._own)}"
            )
        return (
            "both agreed when this device connected, so the server's clock was set since, and is "
            "probably wrong"
        )
