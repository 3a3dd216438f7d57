"""Checkpoints of a run: models and the server optimizer's state, each named by what is in it.

A checkpoint is complete on disk before a commit names it, and its digest is in the commit: what is
read back is what was written, or an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import os
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.errors import UserError
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_server.model.mmap_buffer import MmapBuffer

if TYPE_CHECKING:
    import torch


_BLOCK_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Saved:
    """A file under `checkpoints/`, and what was written into it."""

    file: str
    sha256: str
    """In hexadecimal."""


class Checkpoints:
    """The files of one run's checkpoints."""

    def __init__(self, directory: Path) -> None:
        """`directory` holds nothing else."""
        self.directory = directory

    def write_model(
        self, round_: int, payload: bytes | bytearray | memoryview, kind: str = "model"
    ) -> Saved:
        """Write an encoded model durably, as `<kind>-<round>.safetensors`."""
        name = f"{kind}-{round_:06d}.safetensors"
        with ThreadPoolExecutor(1) as beside:  # hashing takes as long as the disk does
            hashed = beside.submit(hashlib.sha256, payload)
            with replacing(self.directory / name) as file:
                file.write(payload)
            return Saved(name, hashed.result().hexdigest())

    def read_model(self, saved: Saved, payload: bytearray | memoryview) -> None:
        """Fill `payload` from a checkpoint.

        Raises:
            UserError: it is missing, of another size, or not what was written.
        """
        path = self.directory / saved.file
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size != len(payload):
                    raise UserError(
                        f"{path} is not a model of this task any more; was the task changed?"
                    )
                file.readinto(payload)
        except OSError as error:
            raise UserError(f"the checkpoint {path} cannot be read: {error}") from error
        _check_digest(path, payload, saved)

    def write_tensors(self, round_: int, tensors: Mapping[str, torch.Tensor]) -> Saved | None:
        """Write the server optimizer's tensors, one at a time; None if there are none.

        Raises:
            UserError: one is not float32, which this format does not hold.
        """
        if not tensors:
            return None
        import torch

        for name, tensor in tensors.items():
            if tensor.dtype != torch.float32:
                raise UserError(
                    f"the server optimizer keeps {name!r} as {tensor.dtype}, which cannot be "
                    "stored; choose another server optimizer"
                )
        layout = TensorLayout.from_shapes(
            {name: tuple(value.shape) for name, value in tensors.items()}
        )
        name = f"optimizer-{round_:06d}.safetensors"
        with replacing(self.directory / name) as replaced:
            file = _Hashed(replaced)
            file.write(layout.header)
            for entry in layout.entries:
                piece = bytearray(4 * entry.count)
                if entry.count:
                    torch.frombuffer(piece, dtype=torch.float32).copy_(
                        tensors[entry.name].detach().reshape(-1)
                    )
                file.write(piece)
        return Saved(name, file.hash.hexdigest())

    def read_tensors(self, saved: Saved) -> dict[str, torch.Tensor]:
        """Read back what `write_tensors` wrote.

        Raises:
            UserError: it is missing or damaged.
        """
        path = self.directory / saved.file
        try:
            payload = bytearray(path.read_bytes())
        except OSError as error:
            raise UserError(f"the checkpoint {path} cannot be read: {error}") from error
        _check_digest(path, payload, saved)
        length = 8 + int.from_bytes(payload[:8], "little")
        layout = TensorLayout.from_header(memoryview(payload)[:length])
        return dict(layout.parts(layout.decode(payload)))

    def keep_only(self, files: Collection[str]) -> None:
        """Delete every other file: no commit that counts names it."""
        for path in self.directory.iterdir():
            if path.name not in files:
                path.unlink(missing_ok=True)


class _Hashed:
    """A file that is being written, and the SHA-256 of what was."""

    def __init__(self, file: Written) -> None:
        self.file = file
        self.hash = hashlib.sha256()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.file.write(data)
        self.hash.update(data)


class Written:
    """A file that is being written from its start, past the page cache where that can be done.

    Fresh pages of cache take longer than the disk, and who reads it while the run goes on, for a
    model too large to stay in memory, does so for all devices from the pages that it reads first.
    """

    def __init__(self, file: FileIO) -> None:
        """`file` has no buffer of its own."""
        self._file = file
        self._block = MmapBuffer(
            _BLOCK_BYTES
        ).view  # aligned, as what goes to a disk directly must be
        self._filled = 0
        self._direct = getattr(os, "O_DIRECT", 0)
        """The flag for it; 0 once it is known that this file system, or machine, cannot."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Take the next bytes; they are in the file when a block is full, or after `sync`."""
        left = memoryview(data)
        while left:
            part = left[: _BLOCK_BYTES - self._filled]
            self._block[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            left = left[len(part) :]
            if self._filled == _BLOCK_BYTES:
                self._flush(self._direct)

    def sync(self) -> None:
        """Have everything on the disk."""
        self._flush(0)
        os.fsync(self._file.fileno())

    def _flush(self, direct: int) -> None:
        left, self._filled = self._block[: self._filled], 0
        while left:
            try:
                flags = fcntl.fcntl(self._file, fcntl.F_GETFL) & ~self._direct
                fcntl.fcntl(self._file, fcntl.F_SETFL, flags | direct)
                left = left[self._file.write(left) :]
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    raise
                fcntl.fcntl(self._file, fcntl.F_SETFL, flags)
                self._direct = direct = 0


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Written]:
    """Write a file that appears under its name complete and durable, or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb", buffering=0) as file:
        written = Written(file)
        yield written
        written.sync()
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _check_digest(path: Path, payload: bytearray | memoryview, saved: Saved) -> None:
    if hashlib.sha256(payload).hexdigest() != saved.sha256:
        raise UserError(
            f"the checkpoint {path} is damaged: it is not what was written; restore it from a copy"
        )
