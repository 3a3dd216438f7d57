"""The files through which models cross, and the lock on the directory that they are in."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import shutil
import time
import uuid
from pathlib import Path
from typing import Any

from isthmus.errors import UpdateError, UserError
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import Buffer, describe
from isthmus.wire import link_pb2

_LOCK_SECONDS = 5.0


class TransferFiles:
    """Models between the link and the ranks: for a request one file in and one out, at most."""

    def __init__(self, directory: Path) -> None:
        """`directory` is made anew: nothing is on its way when a service begins."""
        self.incoming: dict[str, Path] = {}
        """Models that came with a request, by its id."""
        self.outgoing: dict[str, Path] = {}
        """Results that were not handed over yet."""
        self._directory = directory
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()

    def room_for_model(self, request_id: str, size: int) -> Buffer:
        """A mapped file, where the ranks can read what the link writes.

        Raises:
            OSError: there is no room for it.
        """
        path = self.incoming[request_id] = self._directory / f"in-{uuid.uuid4().hex}"
        try:
            return mapped(path, size)
        except OSError:
            self.drop_model(request_id)
            raise

    def room_for_result(self, request_id: str, layout: TensorLayout) -> Path:
        """A file of the result's size with its header; the ranks write the rest.

        Raises:
            OSError: there is no room for it.
        """
        path = self.outgoing[request_id] = self._directory / f"out-{uuid.uuid4().hex}"
        with path.open("wb") as file:
            file.write(layout.header)
            os.posix_fallocate(file.fileno(), 0, layout.nbytes)
        return path

    async def result(self, request_id: str, layout: TensorLayout) -> tuple[link_pb2.Blob, Buffer]:
        """What the ranks have written, and what it is called."""
        payload = mapped(self.outgoing[request_id], layout.nbytes)
        return await asyncio.to_thread(describe, payload), payload

    def drop_model(self, request_id: str) -> None:
        """Delete a file, if it is there; a mapping that somebody still reads keeps its bytes."""
        _delete(self.incoming.pop(request_id, None))

    def drop_result(self, request_id: str) -> None:
        """The same of what went out."""
        _delete(self.outgoing.pop(request_id, None))


def _delete(path: Path | None) -> None:
    if path is not None:
        path.unlink(missing_ok=True)


def mapped(path: Path, size: int) -> memoryview:
    """A file of that size as memory, shared with whoever else maps it.

    Its room on the disk is taken now: where there is none when a page is written, the process dies.

    Raises:
        OSError: there is none.
    """
    with path.open("a+b") as file:
        file.truncate(size)
        os.posix_fallocate(file.fileno(), 0, size)
        return memoryview(mmap.mmap(file.fileno(), size))


def check_model(model: Buffer, layout: TensorLayout) -> None:
    """Refuse a model of another layout before the ranks read it.

    Raises:
        UpdateError: with the first difference.
    """
    if len(model) != layout.nbytes:
        raise UpdateError(
            f"a model of {len(model)} bytes came where this run's takes {layout.nbytes}"
        )
    header = bytes(memoryview(model)[: len(layout.header)])
    if header != layout.header:
        difference = TensorLayout.from_header(header).explain_difference(layout)
        raise UpdateError(f"a model of another exchange set came: {difference}")


def locked(state: Path) -> Any:
    """An open, locked file; the kernel unlocks it when this process ends, however it ends."""
    try:
        state.mkdir(parents=True, exist_ok=True)
        file = (state / "lock").open("w")
    except OSError as error:
        raise UserError(f"the state directory {state} cannot be used: {error}") from error
    # A service that was killed a moment ago may still be going.
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.1)  # `flock` waits for ever, or not at all
                continue
            file.close()
            raise UserError(
                f"another datacenter service uses the state directory {state}; give each its own"
            ) from None
        return file
