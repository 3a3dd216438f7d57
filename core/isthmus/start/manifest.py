"""The list of the files that a model starts from: by it they can be fetched from anywhere.

The job has one digest (`model.sha256`), which a list either has or has not, so that the list itself
may come from a server that is not trusted with it.

>>> file = ListedFile("model", "model.safetensors", "ab" * 32, 10)
>>> StartManifest((file,)).digest == file.sha256
True
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from isthmus.errors import UserError
from isthmus.start.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, StartFiles, digest_of, joined

MODEL = "model"
BASE = "base"
ADAPTER = "adapter"
PARTS = ((MODEL,), (BASE, ADAPTER))
"""The parts of a start: a model; or an adapter of PEFT, after the model under it."""

MAX_FILES = 4096
"""Most files of a start."""
_MAX_NAME = 255
_MAX_BYTES = 1 << 62
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True)
class ListedFile:
    """One file."""

    part: str
    """`model`, `base` or `adapter`."""
    name: str
    """Name of the file, without a folder."""
    sha256: str
    """In hexadecimal digits."""
    size: int
    """In bytes."""


@dataclasses.dataclass(frozen=True)
class StartManifest:
    """All files of a start.

    Guarantees:
      * names are of single files, printable, and different within a part, and sizes are bounded.
    """

    files: tuple[ListedFile, ...]

    def __post_init__(self) -> None:
        """Raises `UserError` for a list that no start has."""
        parts = tuple(dict.fromkeys(file.part for file in self.files))
        if parts not in PARTS or len(self.files) > MAX_FILES:
            raise UserError(f"a list of {len(self.files)} files in the parts {parts} is no model's")
        for file in self.files:
            if not _is_usable(file):
                raise UserError(f"{file.name[:80]!r} is listed, which is no file of a model")
        if len({(file.part, file.name) for file in self.files}) != len(self.files):
            raise UserError("a list of a model's files has a name twice")
        sizes = {(file.sha256, file.size) for file in self.files}
        if len({sha256 for sha256, _ in sizes}) != len(sizes):
            raise UserError("a list of a model's files has two sizes for one SHA-256")

    @classmethod
    def of(cls, found: Sequence[StartFiles]) -> StartManifest:
        """The list of what `StartFiles.find_all` has found; reads all of it.

        Raises:
            UserError: a file cannot be read, or has changed.
        """
        parts = PARTS[len(found) - 1]
        files = []
        for part, each in zip(parts, found, strict=True):
            digests = each.digests()
            sizes = {file.path.name: file.size for file in each.files}
            sizes[ADAPTER_CONFIG] = each.config_bytes
            files += [ListedFile(part, name, digests[name], sizes[name]) for name in digests]
            each.check_unchanged()
        return cls(tuple(files))

    @functools.cached_property
    def digest(self) -> str:
        """The digest of the start, as `model.sha256` of a job has it."""
        parts = tuple(dict.fromkeys(file.part for file in self.files))
        return joined(
            [digest_of({f.name: f.sha256 for f in self.files if f.part == part}) for part in parts]
        )

    @property
    def size(self) -> int:
        """Bytes of all files, each of the same content once."""
        return sum({file.sha256: file.size for file in self.files}.values())


def _is_usable(file: ListedFile) -> bool:
    """Whether a file may be in a list: its name is safe to create, and says what it is."""
    expected = file.name.endswith(".safetensors") and file.name != ADAPTER_WEIGHTS
    if file.part == ADAPTER:
        expected = file.name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG)
    return (
        expected
        and PurePosixPath(file.name).name == file.name
        and file.name.isprintable()
        and len(file.name.encode()) <= _MAX_NAME
        and _SHA256.fullmatch(file.sha256) is not None
        and 0 < file.size < _MAX_BYTES
    )


@dataclasses.dataclass(frozen=True)
class StartPlace:
    """Where a machine has a model's files, as a task opens them."""

    start: Path
    """In place of the job's `model.start`."""
    base: Path | None
    """In place of its `model.base`."""
    readable: tuple[Path, ...]
    """What a process has to be able to read: the folder, and the files that are linked from it."""
    mapped: bool
    """Whether all files are in a store, where nothing changes them, so that they may be mapped."""
