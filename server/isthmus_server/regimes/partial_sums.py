"""Vectors of devices behind aggregators: added there, and their sums fetched once.

    parts = PartialSums(context.link, opening, nbytes, least_rate=job.time.least_rate)
    if (place := parts.place(name)) is not None:
        added = await parts.add(place, blob, name, weight, places)
        ...                          # the last checks here; then
        parts.keep(added)            # or parts.refuse(added)
    async for part in parts.collected():
        ...                          # a sum of exactly the kept vectors, or why it is lost

An aggregator that is lost before its sum is here costs the vectors that were in it, and nothing
else: they are in no sum here.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Iterator, Sequence

from isthmus.errors import ParticipantLost, UpdateError
from isthmus.transport.blobs import into
from isthmus.wire import link_pb2
from isthmus_server.model.mmap_buffer import MmapBuffer
from isthmus_server.regimes.call import NotUsed
from isthmus_server.regimes.upload_places import UploadPlaces
from isthmus_server.transport.aggregators import LEFT
from isthmus_server.transport.link import Link
from isthmus_server.transport.peer import Peer, Place
from isthmus_server.transport.sanitize import reason_of

OPEN_SECONDS = 60.0
"""Time for an aggregator to begin a sum, with the wait for a place."""
HAND_OVER_SECONDS = 60.0
"""Time for an aggregator to answer with its sum; the transfer has as much, and more by its size,
and so has the wait for the transfers of other sums."""


@dataclasses.dataclass(frozen=True)
class Addition:
    """A vector that an aggregator has added, and that counts once it is kept."""

    aggregator: _Aggregator
    device: str
    name: str
    request_id: str


@dataclasses.dataclass(frozen=True)
class PartialSum:
    """The sum of one aggregator, or that it is lost."""

    aggregator: str
    devices: tuple[str, ...]
    """Devices whose vectors are in it."""
    elements: memoryview = dataclasses.field(default=memoryview(b""), repr=False)
    """As the aggregator's memory has them."""
    weight: int = 0
    has_small: bool = False
    lost: str = ""
    """Why there is no sum; empty if there is."""


@dataclasses.dataclass(eq=False)
class _Aggregator:
    """What one process of an aggregator has of a sum."""

    peer: Peer
    sum: str
    opened: asyncio.Task[None] | None = None
    kept: dict[str, str] = dataclasses.field(default_factory=dict)
    """Devices whose vectors count, by the names of these."""

    @property
    def name(self) -> str:
        """Name of the aggregator in the registry."""
        return self.peer.name


class PartialSums:
    """The parts of one sum that are at aggregators.

    Guarantees:
      * a part is of exactly the vectors that were kept, or it counts as lost as a whole;
      * nothing is kept after `collected` has begun.
    """

    def __init__(
        self, link: Link, opening: link_pb2.OpenSum, nbytes: int, *, least_rate: float
    ) -> None:
        """Nothing is asked before the first vector.

        Args:
            link: of the run's participants.
            opening: the sum; it gets a name here.
            nbytes: size of a part, in bytes.
            least_rate: bytes per second of a transfer that is not given up.
        """
        self._link = link
        self._opening = opening
        self._nbytes = nbytes
        self._least_rate = least_rate
        self._aggregators: dict[Peer, _Aggregator] = {}
        self._closed = False

    def place(self, device: str) -> Place | None:
        """Where a device is connected; None if it is at the server itself, or at none."""
        peer = self._link.peers.get(device)
        return None if peer is None else peer.place

    async def add(
        self,
        place: Place,
        vector: link_pb2.Blob,
        device: str,
        weight: int,
        places: UploadPlaces,
    ) -> Addition:
        """Have an aggregator get a device's vector and add it, when it has a place for it.

        Raises:
            ParticipantLost: the aggregator was lost, or the device has left it.
            TransferStalled: others wait, and the vector comes below the least rate.
            NotUsed: the aggregator refuses to begin a sum.
            UpdateError: the vector cannot be used.
        """
        assert not self._closed
        aggregator = self._of(place)
        assert aggregator.opened is not None
        with places.waits(device):
            await asyncio.shield(aggregator.opened)
        room = self._link.aggregators.room(aggregator.peer)
        async with (
            contextlib.AsyncExitStack() as stack,
            places.held(
                device,
                stack.enter_async_context(room.vector(self._link)),
                room=room,
                is_coming=lambda: self._is_coming(device, vector),
            ),
        ):
            name = self._link.new_id()
            asked = link_pb2.AddVector(
                sum=aggregator.sum,
                channel=place.channel,
                vector=vector,
                weight=weight,
                name=name,
            )
            request = link_pb2.Request(id=name, add_vector=asked)
            # The aggregator says what comes, and not that it begins: that would be one message
            # more of each device.
            if (peer := self._link.peers.get(device)) is not None:
                peer.transfer_time.begin(time.monotonic())
                stack.enter_context(_on_its_way(peer, vector.sha256))
            asking = asyncio.create_task(self._asked(aggregator.name, request))
            try:
                await asyncio.shield(asking)
            except asyncio.CancelledError:
                # The aggregator counts it until it has answered, and so does its place.
                cancel = link_pb2.Envelope(cancel=link_pb2.Cancel(id=request.id))
                aggregator.peer.send_and_keep(cancel)
                given_up = self._give_up(aggregator, request.id, asking, stack.pop_all())
                self._link.aggregators.spawn(given_up)
                raise
            return Addition(aggregator, device, name, request.id)

    def _is_coming(self, device: str, vector: link_pb2.Blob) -> bool:
        """Whether some of a device's vector is not at its aggregator."""
        peer = self._link.peers.get(device)
        return peer is not None and not peer.came_to_aggregator(vector)

    async def _give_up(
        self,
        aggregator: _Aggregator,
        request_id: str,
        asking: asyncio.Task[link_pb2.Reply],
        place: contextlib.AsyncExitStack,
    ) -> None:
        """Keep the place of a vector until the aggregator has answered that it is given up."""
        async with place:
            with contextlib.suppress(ParticipantLost, UpdateError, TimeoutError):
                async with asyncio.timeout(HAND_OVER_SECONDS):
                    await asking
                    reason = "the round is over"
                    self._link.acknowledge(aggregator.name, request_id, False, reason)

    def keep(self, added: Addition) -> None:
        """The vector counts."""
        assert not self._closed
        added.aggregator.kept[added.name] = added.device
        self._link.acknowledge(added.aggregator.name, added.request_id, True)

    def refuse(self, added: Addition, reason: str) -> None:
        """The vector does not count."""
        self._link.acknowledge(added.aggregator.name, added.request_id, False, reason)

    async def collected(self) -> AsyncIterator[PartialSum]:
        """Fetch the sum of each aggregator that has kept vectors."""
        self._closed = True
        for key in list(self._aggregators):
            aggregator = self._aggregators[key]
            if not aggregator.kept:
                continue
            yield await self._part(aggregator)
            del self._aggregators[key]

    def end(self) -> None:
        """Have what was not collected forgotten, later; no error if that is not possible."""
        self._closed = True
        left = list(self._aggregators.values())
        self._aggregators.clear()
        if left:
            self._link.aggregators.spawn(self._forget(left))

    async def _forget(self, left: Sequence[_Aggregator]) -> None:
        for aggregator in left:
            hand_over = link_pb2.HandOver(sum=aggregator.sum)
            request = link_pb2.Request(id=self._link.new_id(), hand_over=hand_over)
            with contextlib.suppress(ParticipantLost, UpdateError, TimeoutError):
                async with (
                    self._link.aggregators.room(aggregator.peer).steps,
                    asyncio.timeout(HAND_OVER_SECONDS),
                ):
                    await self._asked(aggregator.name, request)
                    self._link.acknowledge(aggregator.name, request.id, True)

    def _of(self, place: Place) -> _Aggregator:
        """The sum of an aggregator's present process, which is opened for its first vector.

        A process that was away for a lease is a new peer, and has forgotten its sums.
        """
        peer = place.aggregator
        aggregator = self._aggregators.get(peer)
        if aggregator is None:
            aggregator = self._aggregators[peer] = _Aggregator(peer, self._link.new_id())
            aggregator.opened = asyncio.create_task(self._open(aggregator))
            aggregator.opened.add_done_callback(_looked_at)
        return aggregator

    async def _open(self, aggregator: _Aggregator) -> None:
        opening = link_pb2.OpenSum()
        opening.CopyFrom(self._opening)
        opening.sum = aggregator.sum
        request = link_pb2.Request(id=self._link.new_id(), open_sum=opening)
        steps = self._link.aggregators.room(aggregator.peer).steps
        try:
            async with asyncio.timeout(OPEN_SECONDS), steps:
                await self._asked(aggregator.name, request)
                self._link.acknowledge(aggregator.name, request.id, True)
        except TimeoutError:
            late = f"the aggregator {aggregator.name} did not begin a sum in time"
            raise ParticipantLost(late) from None
        except UpdateError as error:
            raise NotUsed(f"the aggregator {aggregator.name} began no sum: {error}") from error

    async def _asked(self, aggregator: str, request: link_pb2.Request) -> link_pb2.Reply:
        """The reply to a request.

        Raises:
            ParticipantLost: the aggregator was lost, or a device has left it.
            UpdateError: it refused.
        """
        try:
            reply = await self._link.ask_aggregator(aggregator, request)
        except ParticipantLost as lost:
            # The reason begins with its name if it was not connected.
            what = f"{aggregator} was {lost}" if lost.reached else str(lost)
            raise ParticipantLost(f"the aggregator {what}") from lost
        if not reply.HasField("failure"):
            return reply
        reason = reason_of(reply)
        self._link.acknowledge(aggregator, request.id, False, reason)
        if reply.failure.code == LEFT:
            raise ParticipantLost(reason, reached=True)
        raise UpdateError(reason)

    async def _part(self, aggregator: _Aggregator) -> PartialSum:
        devices = tuple(sorted(aggregator.kept.values()))
        hand_over = link_pb2.HandOver(sum=aggregator.sum, added=sorted(aggregator.kept))
        request = link_pb2.Request(id=self._link.new_id(), hand_over=hand_over)
        link = self._link
        loop = asyncio.get_running_loop()
        is_used = is_asked = False
        seconds = HAND_OVER_SECONDS + self._nbytes / self._least_rate
        try:
            async with (
                asyncio.timeout(seconds) as limit,
                link.aggregators.room(aggregator.peer).steps,
            ):
                limit.reschedule(loop.time() + HAND_OVER_SECONDS)
                is_asked = True
                reply = await self._asked(aggregator.name, request)
                summed = reply.summed
                if summed.sum.size != self._nbytes:
                    raise UpdateError(f"its sum has {summed.sum.size} bytes and not {self._nbytes}")
                limit.reschedule(loop.time() + seconds)
                buffer = MmapBuffer(self._nbytes)
                await link.fetch(aggregator.name, summed.sum, into(buffer.view))
                is_used = True
        except (ParticipantLost, UpdateError, TimeoutError) as error:
            why = str(error) or "it did not come in time"
            # The sentence names the aggregator already, and that something was lost.
            why = why.removeprefix(f"the aggregator {aggregator.name} was ").removeprefix("lost: ")
            lost = f"the sum of the aggregator {aggregator.name} was lost: {why}"
            return PartialSum(aggregator.name, devices, lost=lost)
        finally:
            # Whatever has happened, so that the aggregator frees its sum.
            if not is_asked:
                link.aggregators.spawn(self._forget([aggregator]))
            link.acknowledge(aggregator.name, request.id, is_used, "" if is_used else "it is lost")
        return PartialSum(
            aggregator.name, devices, buffer.view, int(summed.weight), summed.has_small
        )


@contextlib.contextmanager
def _on_its_way(peer: Peer, sha256: bytes) -> Iterator[None]:
    """Note for the block that a device sends a vector to its aggregator."""
    peer.adding.add(sha256)
    try:
        yield
    finally:
        peer.adding.discard(sha256)


def _looked_at(task: asyncio.Task[None]) -> None:
    """Have asyncio not complain about an error that nobody waits for any more."""
    if not task.cancelled():
        task.exception()
