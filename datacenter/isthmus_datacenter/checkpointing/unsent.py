"""What a datacenter has not sent of its compressed updates yet, on disk.

What an update leaves belongs to the round and attempt that it was made for. It counts once that
round is committed, which the server says with the next request; until then what was left before is
kept too. So an attempt that fails, or a kill at any moment, neither loses nor repeats what is to be
sent later.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from pathlib import Path

import torch

from isthmus.system.private_files import sync_directory
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import Buffer
from isthmus_privacy.compression.single_updates import DatacenterMessages

NO_ROUND = (0, 0)
_NAME = "unsent"


class UnsentUpdates:
    """What the updates of one run leave: files of float32 elements (N), each with its SHA-256.

    Guarantees:
      * a file that has its name is complete;
      * there are at most two: of the last committed round, and of the attempt after it;
      * they are mapped, so that this process has no copy in its own memory.
    """

    def __init__(self, directory: Path, layout: TensorLayout, messages: DatacenterMessages) -> None:
        """Set up; `directory` has the checkpoints of the run, too, which are folders."""
        self._directory = directory
        self._layout = layout
        self._messages = messages

    def apply(self, committed: tuple[int, int], model: Buffer) -> str:
        """Bring what earlier updates left into a model that was received, before it is trained.

        So this datacenter trains on from all that it has found itself, and only the others wait
        for what it sends later: elements whose message is late would be trained again otherwise.

        Args:
            committed: as for `compress`, which is to be called with the changed model.
            model: the encoded model, changed in place.

        Returns:
            The SHA-256 of what was left, in hexadecimal digits; "" if the model is unchanged.
        """
        if committed == NO_ROUND:
            return ""
        try:
            left = self._load(self._file(committed))
        except (OSError, ValueError):  # `compress` reports it
            return ""
        self._layout.decode(model).sub_(left)
        return _digest(left).hex()

    def compress(
        self, about: tuple[int, int], committed: tuple[int, int], before: Buffer, after: Buffer
    ) -> tuple[bytearray, list[str]]:
        """Compress an update with what earlier ones left, and store what it leaves itself.

        Args:
            about: round and attempt of the update.
            committed: those of the last committed round with a compressed update of this
                datacenter; `NO_ROUND` for none.
            before: the encoded model that the datacenter received, after `apply`.
            after: its new model.

        Returns:
            The message, and a sentence if what was left before cannot be used.

        Raises:
            UpdateError: the update is not finite, or the codec failed.
            OSError: the disk is full.
        """
        draft = self._directory / f"{_NAME}-{uuid.uuid4().hex}.draft"
        for other in self._directory.glob(f"{_NAME}-*"):
            if other != self._file(committed):
                other.unlink()
        try:
            payload, notes = self._compress(draft, about[0], committed, before, after)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        draft.replace(self._file(about))
        sync_directory(self._directory)
        return payload, notes

    def _compress(
        self, draft: Path, round_: int, committed: tuple[int, int], before: Buffer, after: Buffer
    ) -> tuple[bytearray, list[str]]:
        notes = []
        with draft.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 4 * self._layout.size)
            update = self._mapped(draft, shared=True)
            torch.sub(self._layout.decode(before), self._layout.decode(after), out=update)
            if committed != NO_ROUND:
                try:
                    update += self._load(self._file(committed))
                except (OSError, ValueError) as error:
                    notes.append(
                        f"what was not sent up to round {committed[0]} is lost, because its file "
                        f"cannot be used ({error}); this update is sent without it"
                    )
            payload = self._messages.encode(update, round_)
            file.seek(0, os.SEEK_END)
            file.write(_digest(update))
            file.flush()
            os.fsync(file.fileno())
        return payload, notes

    def _load(self, path: Path) -> torch.Tensor:
        """What an update has left (N).

        Raises:
            OSError: it cannot be read.
            ValueError: it is damaged.
        """
        length = 4 * self._layout.size
        with path.open("rb") as file:
            file.seek(length)
            digest = file.read()
        left = self._mapped(path, shared=False)
        if digest != _digest(left):
            raise ValueError("it is damaged")
        return left

    def _mapped(self, path: Path, *, shared: bool) -> torch.Tensor:
        """The elements of a file, which has them."""
        if path.stat().st_size < 4 * self._layout.size:
            raise ValueError("it is damaged")
        return torch.from_file(
            str(path), shared=shared, size=self._layout.size, dtype=torch.float32
        )

    def _file(self, about: tuple[int, int]) -> Path:
        return self._directory / f"{_NAME}-{about[0]}-{about[1]}"


def _digest(elements: torch.Tensor) -> bytes:
    return hashlib.sha256(elements.numpy().data).digest()
