"""Files that transfer models between the link and the ranks without copies in memory."""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import os
import shutil
import uuid
import weakref
from io import BufferedReader
from pathlib import Path

from isthmus.errors import UpdateError
from isthmus.system.private_files import make_state_directory
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import Buffer, InFile
from isthmus.wire import link_pb2


class TransferFiles:
    """The files of the open requests: at most one model and one result for each."""

    def __init__(self, directory: Path) -> None:
        """Create `directory`, empty: no request is open when a service starts."""
        self._models: dict[str, Path] = {}
        """Models that came with a request, by its id."""
        self._results: dict[str, Path] = {}
        """Results that the server has not acknowledged yet, by the id of the request."""
        self._directory = directory
        self._held: tuple[bytes, Path] | None = None
        """SHA-256 and file of the last model that came, which is not sent again."""
        # What an earlier service has left belongs to requests that are sent anew.
        shutil.rmtree(directory, ignore_errors=True)
        make_state_directory(directory)

    @property
    def has_results(self) -> bool:
        """Whether a result is not acknowledged yet."""
        return bool(self._results)

    def create_model(self, request_id: str, size: int) -> Buffer:
        """Create a mapped file of `size` bytes; the link writes it and the ranks read it.

        Raises:
            OSError: the disk is full.
        """
        path = self._models[request_id] = self._directory / f"in-{uuid.uuid4().hex}"
        try:
            return _map_file(path, size)
        except OSError:
            self.delete_model(request_id)
            raise

    def model_path(self, request_id: str) -> Path:
        """The file that `create_model` made."""
        return self._models[request_id]

    def keep_model(self, request_id: str, sha256: bytes, *, changed: bool) -> None:
        """Keep a request's model, after the link has checked it, when the request has ended.

        Args:
            request_id: of the request.
            sha256: of the model.
            changed: the request changes the model in its file.

        Raises:
            OSError: the disk is full.
        """
        if self._held is not None and self._held[0] == sha256:
            return
        self.forget_model()
        path = self._directory / f"held-{uuid.uuid4().hex}"
        if changed:
            shutil.copyfile(self._models[request_id], path)
        else:
            path.hardlink_to(self._models[request_id])
        self._held = sha256, path

    def held_model(self, sha256: bytes) -> Buffer | None:
        """The model with this SHA-256, if it was kept."""
        if self._held is None or self._held[0] != sha256:
            return None
        path = self._held[1]
        return _map_file(path, path.stat().st_size)

    def forget_model(self) -> None:
        """Delete the model that was kept."""
        if self._held is not None:
            _delete(self._held[1])
            self._held = None

    def create_result(self, request_id: str, layout: TensorLayout) -> Path:
        """Create a file of the result's size with its header; the ranks write the rest.

        Raises:
            OSError: the disk is full.
        """
        path = self._results[request_id] = self._directory / f"out-{uuid.uuid4().hex}"
        with path.open("wb") as file:
            file.write(layout.header)
            # The whole file, before the ranks map it: a page without disk space would kill them.
            os.posix_fallocate(file.fileno(), 0, layout.nbytes)
        return path

    async def describe_result(
        self, request_id: str, layout: TensorLayout
    ) -> tuple[link_pb2.Blob, InFile]:
        """Describe the result that the ranks have written; returns also where its bytes are.

        They are sent from the file: pages of a mapping would count as this process's memory.
        """
        file = _open_until_forgotten(self._results[request_id])
        digest = await asyncio.to_thread(hashlib.file_digest, file, "sha256")
        blob = link_pb2.Blob(sha256=digest.digest(), size=layout.nbytes)
        return blob, InFile(file, layout.nbytes)

    def result(self, request_id: str, layout: TensorLayout) -> Buffer:
        """Map the result that the ranks have written."""
        return _map_file(self._results[request_id], layout.nbytes)

    def delete_model(self, request_id: str) -> None:
        """Delete the request's model, if it has one; existing mappings keep their bytes."""
        _delete(self._models.pop(request_id, None))

    def delete_result(self, request_id: str) -> None:
        """Delete the request's result, if it has one; existing mappings keep their bytes."""
        _delete(self._results.pop(request_id, None))


def release_pages(buffer: Buffer) -> None:
    """Release the memory of a mapped file, which keeps its bytes; they are read again if needed."""
    mapped = memoryview(buffer).obj
    if isinstance(mapped, mmap.mmap):
        mapped.madvise(mmap.MADV_DONTNEED)


def check_model(model: Buffer, layout: TensorLayout) -> None:
    """Refuse a model of another layout before the ranks read it.

    Raises:
        UpdateError: with the first difference.
    """
    if len(model) != layout.nbytes:
        raise UpdateError(f"the model has {len(model)} bytes; this run's model has {layout.nbytes}")
    header = bytes(memoryview(model)[: len(layout.header)])
    if header != layout.header:
        difference = TensorLayout.from_header(header).explain_difference(layout)
        raise UpdateError(f"the model has another exchange set: {difference}")


def _open_until_forgotten(path: Path) -> BufferedReader:
    """Open a file, which is closed when nobody refers to it any longer.

    A result may still be on its way when its request ends.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    file = os.fdopen(descriptor, "rb", closefd=False)
    weakref.finalize(file, os.close, descriptor).atexit = False
    return file


def _map_file(path: Path, size: int) -> memoryview:
    """Map a file of `size` bytes, shared with every other process that maps it.

    Its disk space is allocated first: without it, writing a page would kill the process.

    Raises:
        OSError: the disk is full.
    """
    with path.open("a+b") as file:
        file.truncate(size)
        os.posix_fallocate(file.fileno(), 0, size)
        return memoryview(mmap.mmap(file.fileno(), size))


def _delete(path: Path | None) -> None:
    if path is not None:
        path.unlink(missing_ok=True)
