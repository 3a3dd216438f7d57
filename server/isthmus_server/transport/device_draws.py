"""The draws of the lottery that the devices of a server have accepted.

A device refuses a draw before the last one that it has accepted, and one that is more than a day
from its clock (`isthmus_privacy.secagg.lottery`). So the draws that the server states to a device
never go back. One counts when a device has accepted it, and not when it was stated: a draw of a
time at which this machine's clock was wrong, which everybody has refused, would otherwise be stated
in all rounds that follow.

>>> draws = DeviceDraws()
>>> draws.ask(["a", "b"], 1_000)
>>> draws.accept("a", 1_000)
>>> draws.refuse("b", 1_000)
>>> draws.latest(["a", "b"], now=990.0), draws.latest(["b"], now=990.0)
(1000, 0)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection

from isthmus_privacy.secagg.lottery import DRAW_SECONDS

LEFT_OUT_SECONDS = 600.0
"""Time for which a device is not selected after it alone has refused a draw: its clock is wrong, or
it says so to have the others asked again."""


class DeviceDraws:
    """What each device of this server has accepted, for the jobs that this process has run."""

    def __init__(self, elapsed: Callable[[], float] = time.monotonic) -> None:
        """`elapsed` returns seconds, and never jumps."""
        self._elapsed = elapsed
        self._left_out: dict[str, float] = {}
        """Until when devices are not selected."""
        self._accepted: dict[str, int] = {}
        """The last draw that each device is known to have accepted."""
        self._open: dict[str, int] = {}
        """The draw in which each device was asked last, until it has answered."""
        self._unanswered: dict[str, int] = {}
        """The last draw to which each device gave no answer; it may have accepted it."""

    def ask(self, names: Collection[str], draw: int) -> None:
        """Note that devices get to see a draw now."""
        for name in names:
            if name in self._open:
                self._unanswered[name] = self._open[name]
            self._open[name] = draw

    def accept(self, name: str, draw: int) -> None:
        """Note that a device has accepted a draw."""
        self._accepted[name] = max(draw, self._accepted.get(name, 0))
        self._end(name, draw)
        if self._unanswered.get(name, 0) <= draw:
            self._unanswered.pop(name, None)

    def refuse(self, name: str, draw: int) -> None:
        """Note that a device has refused a draw, or has not got to see it."""
        self._end(name, draw)

    def leave_out(self, names: Collection[str]) -> None:
        """Note that devices have refused a draw that most others accept."""
        until = self._elapsed() + LEFT_OUT_SECONDS
        self._left_out.update(dict.fromkeys(names, until))

    def left_out(self) -> Collection[str]:
        """Devices that are selected only where there are too few others."""
        now = self._elapsed()
        self._left_out = {name: until for name, until in self._left_out.items() if until > now}
        return self._left_out.keys()

    def _end(self, name: str, draw: int) -> None:
        if self._open.get(name) == draw:
            del self._open[name]

    def is_known(self, names: Collection[str]) -> bool:
        """Whether this process has asked all of these devices."""
        seen = self._accepted.keys() | self._open.keys() | self._unanswered.keys()
        return seen >= set(names)

    def latest(self, names: Collection[str], now: float) -> int:
        """The draw before which some of these devices may refuse one; 0 if they refuse none.

        Nobody whose clock is right has accepted a draw that is more than a day ahead. If most
        devices have, it is this machine's clock that is behind. Otherwise such draws do not count:
        those of a few devices are of wrong clocks of their own, and one that was not answered was
        stated while this machine's clock was wrong.

        Args:
            names: the devices.
            now: Unix seconds.
        """
        accepted = [self._accepted[name] for name in names if name in self._accepted]
        horizon = now + DRAW_SECONDS
        ahead = sum(draw > horizon for draw in accepted)
        counted = math.inf if 2 * ahead > len(accepted) else horizon
        draws = [draw for draw in accepted if draw <= counted]
        for others in (self._open, self._unanswered):
            draws += [others[name] for name in names if others.get(name, math.inf) <= horizon]
        return max(draws, default=0)
