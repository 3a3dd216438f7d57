"""The sums of an aggregator: vectors of its devices, added for the server, which gets their sum.

The server names each vector that it has added, and names them again when it asks for the sum: what
it does not name is subtracted before. So the sum is of exactly those whose receipts it writes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from isthmus.errors import UpdateError
from isthmus.printable import counted, in_a_line
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import Buffer, InFile, Write, describe
from isthmus.transport.stream import to_the_end
from isthmus.transport.worker import ReportProgress
from isthmus.wire import link_pb2
from isthmus_privacy.compression.round_vector import RoundVector
from isthmus_server.model.fixed_point_sum import WeightedSum
from isthmus_server.model.update_decoding import StreamingUpdate, UpdateSpool
from isthmus_server.transport.aggregators import LEFT

MAX_SUMS = 1024
"""Most sums at a time, of all jobs and their groups."""
MAX_ABOUT = 250
"""Characters of what a sum is of."""
MAX_ELEMENTS = 1 << 34
"""Most elements of a vector: 64 GB of float32."""

Fetch = Callable[[int, link_pb2.Blob, Write], Awaitable[None]]
"""Gets a blob of the device on a channel; raises `UpdateError` if that is not possible."""

log = logging.getLogger(__name__)


class Vector(Protocol):
    """A vector of one device, that is in a sum or on its way into it."""

    async def fetch(self, get: Callable[[Write], Awaitable[None]]) -> None:
        """Get the vector, check it and add it; nothing of it is in the sum after an error."""
        ...

    async def withdraw(self) -> None:
        """Subtract the vector again."""
        ...

    def close(self) -> None:
        """Free what is needed to subtract it."""
        ...


class _Update:
    """An update of a weighted sum."""

    def __init__(self, spool: UpdateSpool, begin: Callable[[], StreamingUpdate]) -> None:
        """`begin` reserves its weight in the sum."""
        self._spool = spool
        self._begin = begin
        self._update: StreamingUpdate | None = None

    async def fetch(self, get: Callable[[Write], Awaitable[None]]) -> None:
        """See `Vector.fetch`."""
        update = self._update = self._begin()  # here, as a task may end before its first step
        try:
            await get(update.write)
            if not update.complete:
                raise UpdateError("it is not an update of this exchange set")
        except BaseException:
            await self.withdraw()
            raise

    async def withdraw(self) -> None:
        """See `Vector.withdraw`."""
        if self._update is not None:
            await to_the_end(asyncio.to_thread(self._update.withdraw))

    def close(self) -> None:
        """See `Vector.close`."""
        self._spool.__exit__()


class _UpdateSum:
    """A weighted sum of updates, as the server keeps one."""

    def __init__(self, asked: link_pb2.UpdateSum, directory: Path) -> None:
        try:
            self._layout = TensorLayout.from_header(asked.layout)
        except ValueError as error:
            raise UpdateError(f"the server's layout cannot be used: {error}") from None
        _check_size(self._layout.size)
        self._directory = directory
        weight = int(asked.declared_weight)
        self._total = WeightedSum(self._layout.size, weight, clip=asked.clip or None)
        if self._total.fraction_bits != asked.fraction_bits:
            raise UpdateError(
                f"this aggregator would round to {self._total.fraction_bits} binary digits where "
                f"the server rounds to {asked.fraction_bits}; install the same version on both"
            )

    def vector(self, asked: link_pb2.AddVector) -> Vector:
        if asked.vector.size != self._layout.nbytes:
            raise UpdateError(
                f"its update has {asked.vector.size} bytes where this exchange set takes "
                f"{self._layout.nbytes}"
            )
        spool = UpdateSpool(self._directory, expected_bytes=self._layout.nbytes)
        weight = int(asked.weight)
        return _Update(spool, lambda: StreamingUpdate(spool, self._total, self._layout, weight))

    def summed(self) -> tuple[link_pb2.Summed, Buffer]:
        part = self._total.part()
        elements = part.elements
        assert isinstance(elements, memoryview)
        return link_pb2.Summed(weight=part.weight, has_small=part.has_small), elements


class _Masked:
    """A masked vector of a secure sum, which is added as a whole."""

    def __init__(self, spool: UpdateSpool, total: _MaskedSum) -> None:
        self._spool = spool
        self._total = total

    async def fetch(self, get: Callable[[Write], Awaitable[None]]) -> None:
        """See `Vector.fetch`."""
        await get(self._spool.write)
        adding = asyncio.ensure_future(self._total.add(self._spool))
        try:
            await to_the_end(adding)
        except asyncio.CancelledError:
            if not adding.cancelled() and adding.exception() is None:
                await to_the_end(self.withdraw())
            raise

    async def withdraw(self) -> None:
        """See `Vector.withdraw`."""
        await self._total.withdraw(self._spool)

    def close(self) -> None:
        """See `Vector.close`."""
        self._spool.__exit__()


class _MaskedSum:
    """The sum of masked vectors in the ring of a round; without masks it says nothing."""

    def __init__(self, asked: link_pb2.MaskedSum, directory: Path) -> None:
        _check_size(asked.length + asked.figures)
        if not 1 <= asked.bits <= 64:
            raise UpdateError(f"there is no ring of {asked.bits} bits")
        self._form = {"length": asked.length, "bits": asked.bits, "figures": asked.figures}
        self._directory = directory
        self._bytes = RoundVector.payload_bytes(**self._form)
        self._total = RoundVector(**self._form)
        self._adding = asyncio.Lock()
        self._unfinished: set[UpdateSpool] = set()
        """Vectors that are being added or subtracted, or of which only a part was."""

    def vector(self, asked: link_pb2.AddVector) -> Vector:
        if asked.vector.size != self._bytes:
            raise UpdateError(
                f"its masked vector has {asked.vector.size} bytes where this round takes "
                f"{self._bytes}"
            )
        return _Masked(UpdateSpool(self._directory, expected_bytes=self._bytes), self)

    async def add(self, spool: UpdateSpool) -> None:
        """Add a whole vector; if only a part of it can be added, the sum is lost."""
        async with self._adding:
            await to_the_end(asyncio.to_thread(self._add, spool))

    def _add(self, spool: UpdateSpool) -> None:
        with spool.view() as payload:
            self._unfinished.add(spool)
            self._total.add(payload)
            self._unfinished.remove(spool)

    async def withdraw(self, spool: UpdateSpool) -> None:
        """Subtract a vector that was added; if it cannot be subtracted, the sum is lost."""
        self._unfinished.add(spool)
        async with self._adding:
            await to_the_end(asyncio.to_thread(self._withdraw, spool))

    def _withdraw(self, spool: UpdateSpool) -> None:
        with spool.view() as payload:
            self._total.subtract(payload)
        self._unfinished.remove(spool)

    def summed(self) -> tuple[link_pb2.Summed, Buffer]:
        if self._unfinished:
            raise OSError("a vector could not be added or subtracted as a whole")
        return link_pb2.Summed(), self._total.payload()


def _no_room(why: str) -> UpdateError:
    log.warning("a vector cannot be kept here: %s", why)
    error = UpdateError(f"the aggregator cannot keep its vector: {why}")
    error.code = LEFT
    return error


def _check_size(elements: int) -> None:
    if not 0 < elements <= MAX_ELEMENTS:
        raise UpdateError(f"a vector of {elements} elements cannot be summed")


@dataclasses.dataclass(eq=False)
class _Sum:
    total: _UpdateSum | _MaskedSum
    about: str = ""
    """What it is of, as the server says; empty if it does not."""
    vectors: dict[str, Vector] = dataclasses.field(default_factory=dict)
    """Vectors that are in it, or were on their way, by the server's names."""
    settled: set[str] = dataclasses.field(default_factory=set)
    """Names of vectors of which the server has said that they count."""
    adding: dict[str, asyncio.Task[None]] = dataclasses.field(default_factory=dict)
    """What is on its way, by the same names."""
    is_closed: bool = False

    async def withdraw(self, name: str) -> None:
        """Take a vector out, whether it is in or on its way."""
        task = self.adding.pop(name, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if name in self.settled:
            raise UpdateError("a vector that counts cannot be taken out again")
        vector = self.vectors.pop(name, None)
        if vector is not None:
            try:
                await vector.withdraw()
            finally:
                vector.close()

    def free(self) -> None:
        """Forget everything."""
        for task in self.adding.values():
            task.cancel()
        for vector in self.vectors.values():
            vector.close()
        self.vectors.clear()


class VectorSums:
    """The worker of an aggregator: adds vectors, and hands sums over.

    Guarantees:
      * a sum that is handed over is of exactly the vectors that the server names, or it is refused;
      * a vector that is lost, damaged or out of range leaves nothing in the sum;
      * memory is one sum for any number of devices, and a file for each vector that the server has
        not accepted yet.
    """

    def __init__(self, directory: Path, fetch: Fetch) -> None:
        """`directory` is for vectors that are on their way; `fetch` gets them."""
        self._directory = directory
        self._fetch = fetch
        self._sums: dict[str, _Sum] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._forgotten = 0
        """How often the sums were forgotten."""
        self._coming = 0
        """Bytes of the vectors that are on their way."""

    def forget(self) -> None:
        """The server has started anew: nobody asks for these sums any more."""
        self._forgotten += 1
        for name in list(self._sums):
            self._drop(name)

    def _drop(self, name: str) -> None:
        found = self._sums.pop(name, None)
        if found is not None:
            found.is_closed = True
            found.free()

    # -- the worker of an uplink -------------------------------------------------------------------

    def buffer(self, request: link_pb2.Request, size: int) -> Buffer | None:
        """No request has a blob."""
        return None

    async def work(
        self, request: link_pb2.Request, model: Buffer | None, progress: ReportProgress
    ) -> tuple[link_pb2.Reply, Buffer | InFile | None]:
        """Execute a request of the server; see `isthmus.transport.worker.Worker`."""
        kind = request.WhichOneof("work")
        if kind == "open_sum":
            await self._open(request.open_sum)
            return link_pb2.Reply(added=link_pb2.Added()), None
        if kind == "add_vector":
            await self._add(request.add_vector)
            return link_pb2.Reply(added=link_pb2.Added()), None
        if kind == "hand_over":
            return await self._hand_over(request.hand_over)
        raise UpdateError("an aggregator adds vectors and trains nothing")

    def acknowledged(self, request: link_pb2.Request, accepted: bool, reason: str) -> None:
        """The server has used a reply, or not."""
        kind = request.WhichOneof("work")
        if kind == "hand_over":
            self._drop(request.hand_over.sum)
            return
        found = self._sums.get(request.add_vector.sum) if kind == "add_vector" else None
        if found is None:
            return
        name = request.add_vector.name
        if accepted and name in found.vectors:
            found.settled.add(name)
            found.vectors[name].close()
        elif not found.is_closed:
            self._spawn(found.withdraw(name))

    def cancel(self, request: link_pb2.Request, reason: str) -> None:
        """The round has ended without a vector that is on its way."""
        found = self._sums.get(request.add_vector.sum)
        task = None if found is None else found.adding.get(request.add_vector.name)
        if task is not None:
            task.cancel()

    # -- sums --------------------------------------------------------------------------------------

    async def _open(self, asked: link_pb2.OpenSum) -> None:
        self._check_new(asked.sum)
        forgotten = self._forgotten
        kind = asked.WhichOneof("of")
        total: _UpdateSum | _MaskedSum
        if kind == "updates":
            total = _UpdateSum(asked.updates, self._directory)
        elif kind == "masked":
            # Its memory is zeroed, which takes a while.
            total = await asyncio.to_thread(_MaskedSum, asked.masked, self._directory)
        else:
            raise UpdateError("this aggregator does not know such a sum; upgrade it")
        if forgotten != self._forgotten:
            raise UpdateError("the server has started anew")
        self._check_new(asked.sum)
        self._sums[asked.sum] = _Sum(total, in_a_line(asked.about[:MAX_ABOUT]))

    def _check_new(self, name: str) -> None:
        if name in self._sums:
            raise UpdateError("the server has opened this sum already")
        if len(self._sums) >= MAX_SUMS:  # the oldest may be in use
            raise UpdateError(f"this aggregator has {MAX_SUMS} open sums; start it anew")

    def _of(self, name: str) -> _Sum:
        found = self._sums.get(name)
        if found is None or found.is_closed:
            error = UpdateError("the sum is not open at this aggregator: it was started anew")
            error.code = LEFT
            raise error
        return found

    async def _add(self, asked: link_pb2.AddVector) -> None:
        found = self._of(asked.sum)
        name = asked.name
        if name in found.vectors or name in found.adding:
            raise UpdateError("this vector is in the sum already")
        try:
            vector = found.total.vector(asked)
        except OSError as error:
            raise _no_room(error.strerror or str(error)) from error
        # Before anything is added: of one that is cut off in the file nothing could be subtracted.
        if shutil.disk_usage(self._directory).free < self._coming + asked.vector.size:
            vector.close()
            raise _no_room("its disk is full")

        async def get(write: Write) -> None:
            await self._fetch(asked.channel, asked.vector, write)

        task = found.adding[name] = asyncio.create_task(vector.fetch(get))
        self._coming += asked.vector.size
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            vector.close()
            if (own := asyncio.current_task()) is not None and own.cancelling():
                raise
            raise UpdateError("the round is over") from None
        except OSError as error:
            vector.close()
            raise _no_room(error.strerror or str(error)) from error
        except BaseException:
            vector.close()
            raise
        finally:
            self._coming -= asked.vector.size
            if found.adding.get(name) is task:
                del found.adding[name]
        found.vectors[name] = vector

    async def _hand_over(self, asked: link_pb2.HandOver) -> tuple[link_pb2.Reply, Buffer | None]:
        found = self._of(asked.sum)
        found.is_closed = True  # nothing is added from here on
        wanted = set(asked.added)
        if not wanted:
            return link_pb2.Reply(summed=link_pb2.Summed()), None
        for name in list(found.adding):
            await found.withdraw(name)
        await asyncio.gather(*self._leaving, return_exceptions=True)
        if not wanted <= found.vectors.keys():
            raise UpdateError("some of the vectors are not in the sum of this aggregator")
        try:
            for name in [name for name in found.vectors if name not in wanted]:
                await found.withdraw(name)
            summed, elements = await asyncio.to_thread(found.total.summed)
        except (OSError, MemoryError) as error:
            why = str(error) or "this aggregator has too little memory"
            raise UpdateError(f"the sum is not of the vectors that count: {why}") from error
        of = f" of {found.about}" if found.about else ""
        log.info("hands over the sum of %s%s", counted(len(wanted), "vector"), of)
        summed.sum.CopyFrom(await asyncio.to_thread(describe, elements))
        return link_pb2.Reply(summed=summed), elements

    def _spawn(self, work: Awaitable[None]) -> None:
        async def quietly() -> None:
            try:
                await work
            except UpdateError:
                pass
            except (OSError, MemoryError) as error:  # the sum knows, and is not handed over
                log.warning("a vector could not be taken out of its sum: %r", error)

        task = asyncio.create_task(quietly())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
