"""Digests of the files of a sharded checkpoint, so that a damaged one is never loaded.

Each rank hashes the files it has written, in the thread that wrote them; the first rank merges the
digests into one sealed file. A checkpoint without that file is incomplete.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from isthmus.errors import DamagedError
from isthmus.system.sealed_files import read_sealed, write_sealed

_FILE = "digests.json"
_METADATA = ".metadata"


class HashingWriter(FileSystemWriter):
    """Writes a sharded checkpoint, and the digests of its files."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._directory = directory

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files, then their digests."""
        written = super().write_data(plan, planner)
        files = sorted({result.storage_data.relative_path for result in written.wait()})
        if files:
            values = {name: _digest(self._directory / name) for name in files}
            write_sealed(self._directory / f"{files[0]}.sha256", values)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata, when all ranks have written, then all digests."""
        super().finish(metadata, results)
        digests = {_METADATA: _digest(self._directory / _METADATA)}
        for part in sorted(self._directory.glob("*.sha256")):
            digests |= read_sealed(part)
        write_sealed(self._directory / _FILE, digests)


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint was written to its end."""
    return (checkpoint / _FILE).is_file()


def check_files(checkpoint: Path, rank: int = 0, ranks: int = 1) -> None:
    """Check every `ranks`-th file of a checkpoint, from number `rank` on.

    Raises:
        DamagedError: a file is not the one that was written.
    """
    for path, digest in list(_files(checkpoint))[rank::ranks]:
        try:
            intact = _digest(path) == digest
        except OSError as error:
            raise DamagedError(f"{path} cannot be read ({error.strerror}); {_REMEDY}") from None
        if not intact:
            raise DamagedError(f"{path} is damaged: its digest differs; {_REMEDY}")


_REMEDY = (
    "restore the checkpoint from a backup, or have the operator of the server go back one round "
    "with `isthmus runs rollback`"
)


def _files(checkpoint: Path) -> Iterator[tuple[Path, str]]:
    try:
        digests = read_sealed(checkpoint / _FILE)
    except OSError as error:
        raise DamagedError(f"{error.filename} cannot be read; {_REMEDY}") from None
    except DamagedError as error:
        raise DamagedError(f"{error}; {_REMEDY}") from None
    for name, digest in digests.items():
        yield checkpoint / name, str(digest)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
