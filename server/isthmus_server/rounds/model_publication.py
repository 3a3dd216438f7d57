"""Decide what participants are sent of the model, for every purpose, and offer it to them.

A participant gets what it lacks. It has the model of a request if it received that before, or the
beginning of several models; of an earlier one it needs the change, if there is one. It knows what
it holds, so it chooses among what an `Offer` names (`isthmus_clients.device.received_models`,
`isthmus_datacenter.service.transfer_files`). The link counts what it then fetches.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import torch

from isthmus.transport.blobs import InFile
from isthmus.transport.stream import to_the_end
from isthmus.wire import link_pb2
from isthmus_server.model.global_model import GlobalModel
from isthmus_server.model.mmap_buffer import LARGE_BYTES
from isthmus_server.transport.bundle import offered, published
from isthmus_server.transport.link import Link


@dataclasses.dataclass(frozen=True)
class Offer:
    """What a request names, of which each participant fetches what it lacks."""

    blob: link_pb2.Blob
    """One model, or several vectors one after the other."""
    first_model: bytes = b""
    """SHA-256 of the model that the blob is, or begins with; empty if that is not known."""
    changes: Sequence[link_pb2.ModelChange] = ()
    """What leads to the model from those of earlier rounds."""


class ModelPublication:
    """Publishes models for as long as an attempt needs them."""

    def __init__(self, link: Link, model: GlobalModel, spool: Path, *, may_spill: bool) -> None:
        """Prepare.

        Args:
            link: of the run's participants.
            model: the global model.
            spool: directory that a large model is spilled to.
            may_spill: whether the model may leave memory; an extension needs it there.
        """
        self._link = link
        self._model = model
        self._spool = spool
        self._may_spill = may_spill

    @asynccontextmanager
    async def current(
        self, *, summing: bool, devices: bool, leaves: bool = False
    ) -> AsyncIterator[Offer]:
        """Offer the model for the duration of the block.

        Args:
            summing: updates are summed meanwhile. A large model is spilled to disk and sent from
                its file, so that the sum can use its memory.
            devices: changes of the model are offered, too.
            leaves: a datacenter changes the model and keeps it. A large one is spilled, and not
                read again if the block succeeds.
        """
        model = self._model
        # Hashing and encoding a large model takes seconds, in which the link has to go on.
        blob = await asyncio.to_thread(lambda: model.blob)
        try:
            # A thread cannot be cancelled: whatever ends the attempt waits for it, since `restore`
            # below may not run at the same time.
            if (summing or leaves) and blob.size >= LARGE_BYTES and self._may_spill:
                await to_the_end(asyncio.to_thread(model.spill, self._spool))
            file = model.spilled
            self._link.publish(blob, model.payload if file is None else InFile(file, blob.size))
            changes = model.offered_changes if devices else []
            with offered(self._link, [(each.message.blob, each.payload) for each in changes]):
                yield Offer(blob, blob.sha256, [each.message for each in changes])
            if leaves:
                model.abandon_spilled()
        finally:
            self._link.retract(blob)
            await to_the_end(asyncio.to_thread(model.restore))

    @asynccontextmanager
    async def served(self) -> AsyncIterator[Offer]:
        """Offer the served model to devices for the duration of the block."""
        model = self._model
        if not model.served_average:
            async with self.current(summing=False, devices=True) as offer:
                yield offer
            return
        async with self.bundle([model.served_vector], 1) as offer:
            yield dataclasses.replace(offer, first_model=offer.blob.sha256)

    @asynccontextmanager
    async def bundle(
        self, vectors: Iterable[torch.Tensor], count: int, first_model: bytes = b""
    ) -> AsyncIterator[Offer]:
        """Offer several vectors as one blob for the duration of the block.

        Args:
            vectors: `count` vectors, float32 (N) each; first the one that most participants hold.
            count: number of vectors.
            first_model: SHA-256 of the first one as an encoded model, if it is known.

        Raises:
            OSError: the disk has no room.
        """
        layout = self._model.layout
        async with published(self._link, layout, self._spool, vectors, count) as blob:
            yield Offer(blob, first_model)
