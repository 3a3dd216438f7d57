"""Checkpoints of a run: models and the server optimizer's tensors, with their SHA-256.

A checkpoint is complete on disk before a commit names it with its digest. Reading a checkpoint
checks the digest, and raises if the file was changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import mmap
import os
import re
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.errors import DamagedError, TakenOver, UserError
from isthmus.system.private_files import state_file_opener, sync_directory
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_server.storage.fence import Fence, held

if TYPE_CHECKING:
    import torch


_BLOCK_BYTES = 1 << 20
_ROUND = re.compile(r"[a-z]+-(\d{6,12})\.safetensors")
_REMEDY = "restore it from a copy, or go back with `isthmus runs rollback`"


@dataclasses.dataclass(frozen=True)
class Saved:
    """A file under `checkpoints/`, and the digest of its contents."""

    file: str
    sha256: str
    """SHA-256 of the whole file, in hexadecimal."""


class Checkpoints:
    """Reads and writes the checkpoint files of one run."""

    def __init__(self, directory: Path, fence: Fence | None = None) -> None:
        """Use a directory that has no other files: `keep_only` deletes what is not named.

        `fence` is that of the server that writes them.
        """
        self.directory = directory
        self._fence = fence

    def write_model(
        self, round_: int, payload: bytes | bytearray | memoryview, kind: str = "model"
    ) -> Saved:
        """Write an encoded model durably, as `<kind>-<round>.safetensors`."""
        name = f"{kind}-{round_:06d}.safetensors"
        with ThreadPoolExecutor(1) as pool:  # hashing takes as long as writing
            digest = pool.submit(hashlib.sha256, payload)
            with replacing(self.directory / name, self._fence) as file:
                file.write(payload)
            return Saved(name, digest.result().hexdigest())

    def read_model(self, saved: Saved, payload: bytearray | memoryview) -> None:
        """Fill `payload` from a checkpoint.

        Raises:
            UserError: the file is missing, has another size, or does not match its digest.
        """
        path = self.directory / saved.file
        try:
            with path.open("rb") as file:
                # Damage is the likelier cause and says more, so it is looked for first.
                if os.fstat(file.fileno()).st_size != len(payload):
                    self.check(saved)
                    raise UserError(
                        f"{path} is not a model of this task any more; was the task changed?"
                    )
                file.readinto(payload)
        except OSError as error:
            raise DamagedError(
                f"the checkpoint {path} cannot be read: {error.strerror}; {_REMEDY}"
            ) from error
        _check_digest(path, payload, saved)

    def write_tensors(self, round_: int, tensors: Mapping[str, torch.Tensor]) -> Saved | None:
        """Write the server optimizer's tensors, one at a time; None if there are none.

        Raises:
            UserError: a tensor is not float32, the only type of this format.
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
        # One tensor at a time: a copy of all would be as large as the optimizer's state.
        layout = TensorLayout.from_shapes(
            {name: tuple(value.shape) for name, value in tensors.items()}
        )
        name = f"optimizer-{round_:06d}.safetensors"
        with replacing(self.directory / name, self._fence) as writer:
            file = _HashedFile(writer)
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
        """Read the tensors of a file that `write_tensors` wrote.

        Raises:
            UserError: the file is missing or damaged.
        """
        path = self.directory / saved.file
        try:
            payload = bytearray(path.read_bytes())
        except OSError as error:
            raise DamagedError(
                f"the checkpoint {path} cannot be read: {error.strerror}; {_REMEDY}"
            ) from error
        _check_digest(path, payload, saved)
        length = 8 + int.from_bytes(payload[:8], "little")
        layout = TensorLayout.from_header(memoryview(payload)[:length])
        return dict(layout.parts(layout.decode(payload)))

    def newest_round(self) -> int:
        """The highest round that has a file; 0 without files."""
        matches = (_ROUND.fullmatch(path.name) for path in self.directory.glob("*"))
        return max((int(match[1]) for match in matches if match), default=0)

    def check(self, saved: Saved) -> None:
        """Check a checkpoint without loading it.

        Raises:
            DamagedError: it is missing, or does not match its digest.
        """
        self.check_file(self.directory / saved.file, saved.sha256)

    def check_file(self, path: Path, sha256: str) -> None:
        """Check a file of the run.

        Raises:
            DamagedError: it is missing, or does not match the digest.
        """
        try:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise DamagedError(f"{path} cannot be read: {error.strerror}; {_REMEDY}") from error
        if found != sha256:
            raise DamagedError(f"{path} is damaged: its digest differs; {_REMEDY}")

    def read_file(self, path: Path, sha256: str, size: int) -> bytearray:
        """Read a file of the run that should have `size` bytes.

        Raises:
            DamagedError: it is missing, or does not match the digest.
        """
        try:
            with path.open("rb") as file:
                payload = bytearray(file.read(size + 1))
        except OSError as error:
            raise DamagedError(f"{path} cannot be read: {error.strerror}; {_REMEDY}") from error
        if hashlib.sha256(payload).hexdigest() == sha256:
            return payload
        # Intact and of another size: the task was changed, which the layout tells.
        self.check_file(path, sha256)
        raise UserError(f"{path} is not a model of this task any more; was the task changed?")

    def keep_only(self, files: Collection[str]) -> None:
        """Delete every file that is not listed.

        Raises:
            TakenOver: another server writes them now.
        """
        with held(self._fence):
            for path in self.directory.iterdir():
                if path.name not in files:
                    path.unlink(missing_ok=True)


class _HashedFile:
    """A file that is being written, and the SHA-256 of what was written so far."""

    def __init__(self, file: DirectWriter) -> None:
        self.file = file
        self.hash = hashlib.sha256()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.file.write(data)
        self.hash.update(data)


class DirectWriter:
    """Writes a file from its start, with direct I/O where the file system supports it.

    Allocating pages of the page cache takes longer than writing to the disk. A model that is served
    from its file is read into the page cache once, by the first reader.
    """

    def __init__(self, file: FileIO) -> None:
        """`file` is opened without a buffer."""
        self._file = file
        # Direct I/O needs page-aligned memory.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._block = memoryview(mmap.mmap(-1, _BLOCK_BYTES, flags=flags))
        self._filled = 0
        self._direct = getattr(os, "O_DIRECT", 0)
        """The flag for direct I/O; 0 where the file system or the platform does not support it."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes; they are in the file when a block is full, or after `sync`."""
        rest = memoryview(data)
        while rest:
            part = rest[: _BLOCK_BYTES - self._filled]
            self._block[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            rest = rest[len(part) :]
            if self._filled == _BLOCK_BYTES:
                self._flush(self._direct)

    def sync(self) -> None:
        """Write the last block, and wait until the file is on the disk."""
        self._flush(0)
        os.fsync(self._file.fileno())

    def _flush(self, direct: int) -> None:
        rest = self._block[: self._filled]
        self._filled = 0
        while rest:
            try:
                # Direct I/O takes whole blocks only, so the flag is set for each write and the last
                # one has none.
                flags = fcntl.fcntl(self._file, fcntl.F_GETFL) & ~self._direct
                fcntl.fcntl(self._file, fcntl.F_SETFL, flags | direct)
                rest = rest[self._file.write(rest) :]
            except OSError as error:
                # Some file systems accept the flag and refuse the write. What was not written yet
                # is written without it, and so is the rest of the file.
                if not direct or error.errno != errno.EINVAL:
                    raise
                fcntl.fcntl(self._file, fcntl.F_SETFL, flags)
                self._direct = direct = 0


@contextlib.contextmanager
def replacing(path: Path, fence: Fence | None = None) -> Iterator[DirectWriter]:
    """Replace a file atomically: after a crash it has the old contents or the new ones.

    Raises:
        TakenOver: another server has taken over from that of the `fence`; the file is as it was.
    """
    # In the same directory: a rename across file systems would copy. Its name is fixed, so that
    # what a crash has left is removed, and is not that of another server. It is made anew: in a
    # folder that others can write, it could be a link to another file.
    mark = "" if fence is None else f".{fence.epoch}"
    temporary = path.with_name(f"{path.name}{mark}.tmp")
    temporary.unlink(missing_ok=True)
    with open(temporary, "xb", buffering=0, opener=state_file_opener) as file:
        writer = DirectWriter(file)
        yield writer
        # In this order: contents, then the name, then the directory that has the name. Any other
        # one can leave a name without contents after a loss of power.
        writer.sync()
    try:
        with held(fence):
            temporary.replace(path)
            if fence is not None:  # what earlier servers left: they put nothing in place any more
                for left in path.parent.glob(f"{path.name}.*.tmp"):
                    left.unlink(missing_ok=True)
            sync_directory(path.parent)
    except TakenOver:
        temporary.unlink(missing_ok=True)
        raise


def _check_digest(path: Path, payload: bytearray | memoryview, saved: Saved) -> None:
    if hashlib.sha256(payload).hexdigest() != saved.sha256:
        raise DamagedError(f"the checkpoint {path} is damaged: its digest differs; {_REMEDY}")
