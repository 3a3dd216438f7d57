"""Failures to write or read a checkpoint, agreed on by all ranks and described in one sentence.

PyTorch's serializer replaces the error of a file by its own, which does not even mention that a
disk is full. `ReportingFileSystem` keeps the first error of a file, so that the sentence can name
it.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem

from isthmus.errors import StorageError
from isthmus_datacenter.checkpointing.shard_files import OtherRankFailedError
from isthmus_datacenter.rank_messages import TEXT_CHARACTERS, RankMessages

_ANSWERS: RankMessages[tuple[bool, str | None]] = RankMessages(
    "whether ranks could use a checkpoint", tuple[bool, str | None]
)


class ReportingFileSystem(FileSystem):
    """The files of one checkpoint that is written, with the first error of any of them."""

    def __init__(self) -> None:
        super().__init__()
        self.error: OSError | None = None

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file; see the base class."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        try:
            with _ReportingWriter(io.FileIO(path, "wb"), self) as stream:
                yield stream
        except OSError as error:
            self.report(error)
            raise

    def report(self, error: OSError) -> None:
        """Keep the first error."""
        self.error = self.error or error


class _ReportingWriter(io.BufferedWriter):
    """A file whose errors are reported even if the caller replaces them."""

    def __init__(self, raw: io.FileIO, files: ReportingFileSystem) -> None:
        super().__init__(raw)
        self._files = files

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self._files.report(error)
            raise


def describe_failure(error: BaseException, files: ReportingFileSystem | None = None) -> str | None:
    """What this rank knows of a failure; None if it happened on other ranks only."""
    known: BaseException | None = None if files is None else files.error
    if known is None and not isinstance(error, OtherRankFailedError):
        known = error
    if isinstance(known, OSError) and known.strerror:
        return known.strerror
    if known is None:
        return None
    return f"{type(known).__name__}: {known}".splitlines()[0][:TEXT_CHARACTERS]


def agree_on_failure(what: str, directory: Path, failed: bool, reason: str | None) -> None:
    """Return if no rank failed, and else raise on every rank. All ranks call this together.

    Args:
        what: what was done with the checkpoint, such as "written to".
        directory: the directory of the checkpoints.
        failed: whether this rank failed, or knows that another did.
        reason: what this rank knows of the failure.

    Raises:
        StorageError: some rank failed; with the reason of the first rank that knows one.
    """
    answers = _ANSWERS.all_gather((failed, reason))
    if not any(failed for failed, _ in answers):
        return
    for rank, (_, each) in enumerate(answers):
        if each is not None:
            raise StorageError(
                f"a checkpoint could not be {what} {directory}: {each} (rank {rank})"
            )
    raise StorageError(f"a checkpoint could not be {what} {directory}")
