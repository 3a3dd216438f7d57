"""Publish blobs for the duration of a block: several vectors as one, or some in memory."""

from __future__ import annotations

import asyncio
import mmap
import os
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import torch

from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import Buffer, describe
from isthmus.wire import link_pb2
from isthmus_server.transport.link import Link


@asynccontextmanager
async def published(
    link: Link, layout: TensorLayout, spool: Path, vectors: Iterable[torch.Tensor], count: int
) -> AsyncIterator[link_pb2.Blob]:
    """Publish `count` encoded vectors for participants to pull while the block runs.

    They are in a temporary file under `spool`, so they use the page cache and not the memory of
    this process.

    Args:
        link: where the blob is published.
        layout: encodes each vector.
        spool: directory of the temporary file.
        vectors: `count` vectors, each of shape (N,) for the N parameters of the layout.
        count: number of vectors.

    Raises:
        OSError: the disk has no room. The file is allocated in advance, because a page of the
            mapping without room on the disk would end the process.
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
    offsets = range(0, len(payload), layout.nbytes)
    for offset, vector in zip(offsets, vectors, strict=True):
        encoded = payload[offset : offset + layout.nbytes]
        encoded[: len(layout.header)] = layout.header
        layout.decode(encoded).copy_(vector)
    return describe(payload)


@contextmanager
def offered(link: Link, blobs: Sequence[tuple[link_pb2.Blob, bytes | Buffer]]) -> Iterator[None]:
    """Let participants pull blobs that are in memory while the block lasts."""
    try:
        for blob, payload in blobs:
            link.publish(blob, payload)
        yield
    finally:
        for blob, _ in blobs:
            link.retract(blob)
