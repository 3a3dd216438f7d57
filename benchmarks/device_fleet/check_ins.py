"""Devices that check in by schedule, in virtual time, with the code of server and devices.

The server is `isthmus_server.transport.check_ins.CheckIns`, which decides who stays and for how
long the others go; the pauses of devices that find no server are those of
`isthmus.transport.backoff.Backoff`. What is not here is the connection itself.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

from isthmus.transport.backoff import Backoff
from isthmus.wire import link_pb2
from isthmus_server.transport.check_ins import CheckIns, CheckInSchedule

HOUR = 3600.0


class Connected:
    """A device that is connected, as far as `CheckIns` looks at it."""

    __slots__ = ("is_new", "name", "pending", "role", "stream")

    def __init__(self, number: int) -> None:
        self.name = str(number)
        self.role = link_pb2.CLIENT
        self.pending: dict[str, Any] = {}
        self.stream = True
        self.is_new = False


@dataclass(frozen=True)
class Days:
    """What a simulation has counted."""

    mean: float
    """Devices that connected in a second, on average, before the outage."""
    busiest: int
    """Devices that tried to connect in the busiest second that had a server."""
    outage_back_seconds: float
    """From the return of the server until as many devices were connected as before."""
    connected: int
    """Most devices that were connected at a time."""
    waits: float
    """Longest time between two check-ins of a device, in hours, without the outage."""


def simulate(enrolled: int, connected: int, outage: float, seed: int = 1) -> Days:
    """Simulate a day, an outage of some seconds, and half a day."""
    draw = random.Random(seed)
    random.seed(seed)  # of the devices
    schedule = CheckInSchedule(enrolled, connected)
    down = 24 * HOUR
    up = down + outage
    end = up + 12 * HOUR
    # As after some days: each device has a time somewhere in its pause, and some are connected.
    absent = [(draw.random() * schedule.pause(draw.random()), n) for n in range(enrolled)]
    heapq.heapify(absent)
    check_ins = CheckIns(connected, connected, draw.random)
    failing: dict[int, Backoff] = {}
    arrivals: Counter[int] = Counter()
    told: dict[int, float] = {}
    most = 0
    back_at = 0.0
    longest = 0.0
    is_down = False

    def go(number: int, now: float, seconds: float) -> None:
        nonlocal longest
        longest = max(longest, seconds)
        told[number] = seconds
        heapq.heappush(absent, (now + seconds, number))

    while absent and absent[0][0] < end:
        now, number = heapq.heappop(absent)
        if not is_down and down <= now < up:
            is_down = True
            for name in list(check_ins._places):  # all connections break at the same time
                backoff = Backoff(60.0)
                backoff.spread = schedule.spread
                backoff.broke(open_seconds=HOUR)
                failing[int(name)] = backoff
                heapq.heappush(absent, (down + backoff.pause(), int(name)))
            check_ins = CheckIns(connected, connected, draw.random)
        if down <= now < up:
            backoff = failing.get(number)
            if backoff is None:
                backoff = failing[number] = Backoff(60.0)
                backoff.away = told.get(number, schedule.period)
            backoff.broke(open_seconds=0.0)
            heapq.heappush(absent, (now + backoff.pause(), number))
            continue
        failing.pop(number, None)
        arrivals[int(now)] += 1
        peer: Any = Connected(number)
        stays = True
        for who, seconds in check_ins.called_back(peer, enrolled):
            if who is peer:
                stays = False
            else:
                check_ins.left(who, "")
            go(int(who.name), now, seconds)
        if stays:
            check_ins.joined(peer)
        most = max(most, check_ins._devices)
        if now >= up and not back_at and check_ins._devices >= connected:
            back_at = now - up
    quiet = [arrivals[second] for second in range(int(6 * HOUR), int(down))]
    busiest = max(count for second, count in arrivals.items() if second >= 6 * HOUR)
    return Days(sum(quiet) / len(quiet), busiest, back_at, most, longest / HOUR)
