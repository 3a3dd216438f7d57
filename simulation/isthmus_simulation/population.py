"""Which simulated devices are connected: all of a small population, or others in each round.

A server sees only the devices that are connected. In a large population that is a random sample,
drawn anew for each round, and a cohort is a random sample of it: the cost of a round depends on the
cohort, not on the population.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection

from isthmus.job import Job
from isthmus.wire import link_pb2
from isthmus_server.storage.events import (
    Event,
    EventStream,
    ParticipantJoined,
    ParticipantLeft,
    ParticipantReady,
    RoundCommitted,
)
from isthmus_server.transport.inprocess import InProcessLink
from isthmus_simulation.devices.device import VirtualDevice, VirtualHost
from isthmus_simulation.devices.fleet import VirtualFleet

MakeHost = Callable[[VirtualFleet, int], VirtualHost]
"""Makes what runs the task of the device of a fleet with a number."""


class SimulationEvents(EventStream):
    """The events of a simulated run, without the planned changes of a large population."""

    def __init__(self) -> None:
        """No event is left out yet."""
        super().__init__()
        self.whole_population = True

    def publish(self, event: Event) -> None:
        """Pass an event to every subscriber, unless it is a device that comes or goes."""
        comes_or_goes = isinstance(event, ParticipantJoined | ParticipantReady | ParticipantLeft)
        if self.whole_population or not comes_or_goes:
            super().publish(event)


class Population:
    """Connects and disconnects the devices of a fleet."""

    def __init__(
        self,
        job: Job,
        link: InProcessLink,
        fleet: VirtualFleet,
        make_host: MakeHost,
    ) -> None:
        """Set up; `connect` connects devices.

        Raises:
            JobError: fewer can be connected than a round invites.
        """
        self.count = fleet.count
        self.connected = job.simulation.connections(fleet.count, job.federated.invited)
        """Number of devices that are connected at the same time."""
        self._seed = job.seed
        self._link = link
        self._fleet = fleet
        self._make_host = make_host
        self._offline_seconds = job.simulation.offline_seconds
        self._present: set[int] = set()
        """Devices that are connected, or will be when they are back."""

    @property
    def is_whole(self) -> bool:
        """Whether all devices are connected."""
        return self.connected == self.count

    def connect(self, round_: int) -> None:
        """Connect the devices of a round in place of those of the round before."""
        chosen: Collection[int] = range(self.count)
        if not self.is_whole:
            draw = random.Random(f"isthmus/population/{self._seed}/{round_}")  # noqa: S311 - a sample
            chosen = draw.sample(range(self.count), self.connected)
        kept = self._present & set(chosen)
        for index in sorted(self._present - kept):
            name = _name(index)
            if name in self._link.peers:
                self._link.leave(name, "it is not connected in this round")
        self._present = set(chosen)
        for index in chosen:
            if index not in kept:
                self._join(index)

    def follow(self, event: Event) -> None:
        """Change the connected devices after each committed round."""
        if isinstance(event, RoundCommitted) and not self.is_whole:
            self.connect(event.record.round + 1)

    def _join(self, index: int) -> None:
        if index in self._present and _name(index) not in self._link.peers:
            host = self._make_host(self._fleet, index)
            device = VirtualDevice(self._fleet, index, lambda name: self._lose(index, name), host)
            self._link.join(_name(index), link_pb2.CLIENT, device)

    def _lose(self, index: int, name: str) -> None:
        """Disconnect a device for a while."""
        self._link.leave(name, "the connection was lost")
        asyncio.get_running_loop().call_later(self._offline_seconds, self._join, index)


def _name(index: int) -> str:
    return f"client-{index}"
