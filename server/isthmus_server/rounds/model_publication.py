"""Offer a round's model to its participants, from memory or from a file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from isthmus.transport.blobs import InFile
from isthmus.transport.stream import to_the_end
from isthmus.wire import link_pb2
from isthmus_server.model.global_model import GlobalModel
from isthmus_server.model.mmap_buffer import LARGE_BYTES
from isthmus_server.transport.link import Link


class ModelPublication:
    """Publishes the global model for as long as an attempt needs it."""

    def __init__(self, link: Link, model: GlobalModel, spool: Path, *, may_spill: bool) -> None:
        """Prepare; `published` publishes.

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
    async def published(self, *, summing: bool) -> AsyncIterator[link_pb2.Blob]:
        """Publish the model for participants to fetch, for the duration of the block.

        While updates are summed (`summing`), a large model is spilled to disk and sent from its
        file, so that the sum can use its memory.
        """
        model = self._model
        # Hashing and encoding a large model takes seconds, in which the link has to go on.
        blob = await asyncio.to_thread(lambda: model.blob)
        try:
            # A thread cannot be cancelled: whatever ends the attempt waits for it, since `restore`
            # below may not run at the same time.
            if summing and blob.size >= LARGE_BYTES and self._may_spill:
                await to_the_end(asyncio.to_thread(model.spill, self._spool))
            file = model.spilled
            self._link.publish(blob, model.payload if file is None else InFile(file, blob.size))
            yield blob
        finally:
            self._link.retract(blob)
            await to_the_end(asyncio.to_thread(model.restore))
