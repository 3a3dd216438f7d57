"""Several vectors in one content, one encoded behind the other."""

from __future__ import annotations

import asyncio
import mmap
import os
import tempfile
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import torch

from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import describe
from isthmus.wire import link_pb2
from isthmus_server.transport.link import Link


@asynccontextmanager
async def published(
    link: Link, layout: TensorLayout, spool: Path, vectors: Iterable[torch.Tensor], count: int
) -> AsyncIterator[link_pb2.Blob]:
    """Have so many vectors (N) for participants to fetch, for as long as the block lasts.

    They lie in a file under `spool`, in the page cache and not in this process's own memory.

    Raises:
        OSError: there is no room for it. A mapped page without room would end the process.
    """
    size = count * layout.nbytes
    with tempfile.TemporaryFile(dir=spool) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        payload = memoryview(mmap.mmap(file.fileno(), size))
        blob = await asyncio.to_thread(_fill, payload, layout, vectors)
        link.publish(blob, payload)
        try:
            yield blob
        finally:
            link.retract(blob)


def _fill(
    payload: memoryview, layout: TensorLayout, vectors: Iterable[torch.Tensor]
) -> link_pb2.Blob:
    pieces = range(0, len(payload), layout.nbytes)
    for at, vector in zip(pieces, vectors, strict=True):
        piece = payload[at : at + layout.nbytes]
        piece[: len(layout.header)] = layout.header
        layout.decode(piece).copy_(vector)
    return describe(payload)
