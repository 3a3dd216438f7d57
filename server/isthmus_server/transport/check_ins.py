"""Call devices back by schedule, so that a fleet costs a server what its connected part costs.

A server keeps at most so many devices connected. Each further one that connects is told when to
come back, or takes the place of one that has been connected for longest and is not needed (pace
steering, Bonawitz et al. 2019, section 2.3). The times are drawn at random and sized by the number
of enrolled devices, so that no more arrive in a second than the server accepts. That holds for a
million devices also when all of them have found no server for a while, and for 5.7 million else: a
device is away for a day at most.

>>> schedule = CheckInSchedule(enrolled=1_000_000, connected=10_000)
>>> round(schedule.period / 3600, 1), round(schedule.arrivals, 1)
(16.0, 17.2)
>>> schedule.spread, CheckInSchedule(enrolled=50, connected=10_000).is_needed
(200.0, False)
>>> CheckInSchedule(enrolled=5_700_000, connected=10_000).arrivals < ARRIVALS_PER_SECOND
True
"""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from isthmus.wire import link_pb2
from isthmus_server.transport.peer import ParticipantListener, Peer

ARRIVALS_PER_SECOND = 100.0
"""Devices that may connect in a second: a third of what a processor accepts over TLS."""

STAY_SECONDS = 600.0
"""How long a device stays connected before another one takes its place."""

SHORTEST_SECONDS = 60.0
LONGEST_SECONDS = 24 * 3600.0
"""A device checks in at least once a day, in which its certificate is renewed in time."""

_JITTER = 0.5
"""A device comes back after the mean time, or by up to this part of it sooner or later."""

_MARGIN = 5.5
"""Devices that find no server try again that many times as often as they check in, at most."""


@dataclasses.dataclass(frozen=True)
class CheckInSchedule:
    """When the devices of one fleet check in."""

    enrolled: int
    """Devices that have joined the server and may connect."""
    connected: int
    """Most that are connected at a time."""

    @property
    def is_needed(self) -> bool:
        """Whether there are more devices than may be connected."""
        return self.enrolled > self.connected

    @property
    def period(self) -> float:
        """Mean seconds between two check-ins of a device.

        It is as long as the places allow a stay of `STAY_SECONDS`, and longer if more devices would
        arrive in a second than may connect; but no device stays away longer than
        `LONGEST_SECONDS`.
        """
        absent = max(0, self.enrolled - self.connected)
        stays = absent * STAY_SECONDS / max(1, self.connected)
        accepted = absent * _MARGIN / ARRIVALS_PER_SECOND
        longest = LONGEST_SECONDS / (1 + _JITTER)
        return min(max(stays, accepted, SHORTEST_SECONDS), longest)

    @property
    def arrivals(self) -> float:
        """Mean number of devices that check in within a second."""
        return max(0, self.enrolled - self.connected) / self.period

    @property
    def spread(self) -> float:
        """Seconds over which connected devices spread their return after all connections broke."""
        # Twice as long as it takes on average: in some seconds more of them come.
        return 2 * self.connected / ARRIVALS_PER_SECOND if self.is_needed else 0.0

    def pause(self, draw: float) -> float:
        """Seconds until a device checks in again, for a draw that is uniform in [0, 1)."""
        return self.period * (1 - _JITTER + 2 * _JITTER * draw)


class CheckIns(ParticipantListener):
    """Who stays connected to a link, and who is called back.

    Guarantees:
      * with no more devices enrolled than may be connected, nobody is sent away;
      * a device that works, and one whose owner wants it to stay, is not sent away;
      * while a job waits for devices, all that come stay, up to `most`;
      * of an absent device nothing is kept in memory.
    """

    def __init__(
        self,
        connected: float = math.inf,
        most: float = math.inf,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """Nobody is connected yet.

        Args:
            connected: devices that stay connected; by default all.
            most: devices that stay while a job waits for them.
            draw: returns numbers that are uniform in [0, 1).
        """
        self.connected = connected
        self.most = max(most, connected)
        self._draw = draw
        self.trains: Callable[[], bool] = lambda: False
        """Whether a job runs: those who are connected may have opened it."""
        self.waits: Callable[[], bool] = lambda: False
        """Whether a job waits for devices."""
        self.away: Callable[[], Iterable[tuple[str, float]]] = tuple
        """Returns devices that are away until they check in, and when that is, in Unix seconds."""
        self._places: OrderedDict[str, Peer] = OrderedDict()
        """The devices that are connected and may be called back, those that came first in front."""
        self._devices = 0

    def schedule(self, enrolled: int) -> CheckInSchedule | None:
        """The schedule of a fleet; None if all devices may be connected."""
        if enrolled <= self.connected:
            return None
        return CheckInSchedule(enrolled, int(self.connected))

    def called_back(self, peer: Peer, enrolled: int) -> list[tuple[Peer, float]]:
        """Who is sent away because a device has connected, and for how many seconds.

        Args:
            peer: the device, which has no place yet.
            enrolled: devices that may connect.

        Returns:
            Another one, whose place the device takes, or the device itself. Both where more are
            connected than may stay, as after a job has waited for them. Often nobody.
        """
        if peer.role != link_pb2.CLIENT:
            return []
        schedule = self.schedule(enrolled)
        limit = self.most if self.waits() else self.connected
        if schedule is None or self._devices < limit:
            return []
        itself = (peer, schedule.pause(self._draw()))
        if self.trains():
            return [itself]
        for name, other in self._places.items():
            if not other.pending and other.stream is not None:
                del self._places[name]  # asked once: its owner may want it to stay
                gone = (other, schedule.pause(self._draw()))
                return [gone] if self._devices <= limit else [gone, itself]
        return [itself]

    def joined(self, peer: Peer) -> None:
        """A device has a place."""
        if peer.role == link_pb2.CLIENT:
            self._devices += 1
            self._places[peer.name] = peer

    def left(self, peer: Peer, reason: str) -> None:
        """A device has none any more, if it had one."""
        if peer.role == link_pb2.CLIENT and not peer.is_new:
            self._devices -= 1
            if self._places.get(peer.name) is peer:
                del self._places[peer.name]


def in_words(at: float) -> str:
    """When a device comes back, for people.

    >>> in_words(1_700_000_000.0)
    'checks in again at 22:13 UTC'
    """
    return f"checks in again at {time.strftime('%H:%M', time.gmtime(at))} UTC"


def away_in_words(count: int, times: Sequence[float]) -> str:
    """How many devices are away until they check in, and when the next ones do, for people.

    >>> away_in_words(90, [1_700_000_000.0, 1_700_000_070.0])
    '90 devices are away until they check in, the next at 22:13 and 22:14 UTC'
    >>> away_in_words(1, [1_700_000_000.0])
    '1 device is away until it checks in, at 22:13 UTC'
    """
    clock = [time.strftime("%H:%M", time.gmtime(at)) for at in times]
    shown = " and ".join([", ".join(clock[:-1]), clock[-1]] if len(clock) > 1 else clock)
    if count == 1:
        return f"1 device is away until it checks in, at {shown} UTC"
    return f"{count} devices are away until they check in, the next at {shown} UTC"
