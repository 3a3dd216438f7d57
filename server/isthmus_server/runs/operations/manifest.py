"""The manifest of a copied directory: every file with its SHA-256, so that damage is noticed."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Literal

from isthmus import __version__
from isthmus.errors import DamagedError, UserError
from isthmus.system.private_files import make_private_directory
from isthmus.system.sealed_files import read_sealed_bytes, write_sealed_bytes

FILE = "MANIFEST"
FORMAT = 1

Kind = Literal["server", "run"]


@dataclasses.dataclass(frozen=True)
class CopyManifest:
    """What a backup or an exported run consists of."""

    kind: Kind
    made_at: float
    """Unix seconds."""
    version: str
    """Version of Isthmus that wrote the copy."""
    files: dict[str, tuple[int, str]]
    """Size in bytes and SHA-256 (hexadecimal) by path, with / between folders."""
    format: int = FORMAT


def write_manifest(directory: Path, kind: Kind) -> CopyManifest:
    """Write the manifest of what a directory has now; the directory is complete from then on."""
    files = {}
    for path in _files(directory):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        files[path.relative_to(directory).as_posix()] = path.stat().st_size, digest
    manifest = CopyManifest(kind, time.time(), __version__, files)
    write_sealed_bytes(directory / FILE, json.dumps(dataclasses.asdict(manifest)).encode())
    return manifest


def checked_manifest(directory: Path, kind: Kind) -> CopyManifest:
    """Read a manifest, and check all files.

    Raises:
        DamagedError: a file was changed, is missing, or was added.
        UserError: it is no such copy, or of another version.
    """
    what = "a backup of a server" if kind == "server" else "an exported run"
    try:
        data = read_sealed_bytes(directory / FILE)
    except OSError:
        raise UserError(
            f"{directory} is not {what}: it has no {FILE}, which is written last"
        ) from None
    try:
        table = json.loads(data)
        made = table["format"], table["kind"]
        if made == (FORMAT, kind):
            files = {name: (int(size), str(sha)) for name, (size, sha) in table["files"].items()}
            manifest = CopyManifest(kind, float(table["made_at"]), str(table["version"]), files)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(
            f"{directory} is not {what}: its {FILE} is none that isthmus has written"
        ) from None
    if made != (FORMAT, kind):
        raise UserError(
            f"{directory} is a copy of kind {made[1]!r} in format {made[0]!r}, and this command "
            f"reads {what} in format {FORMAT}"
        )
    found = {path.relative_to(directory).as_posix() for path in _files(directory)}
    for name in sorted(found ^ set(files)):
        raise DamagedError(
            f"{directory} is damaged: {name} {'was added' if name in found else 'is missing'}; use "
            "another copy"
        )
    for name, (size, digest) in files.items():
        path = directory / PurePosixPath(name)
        with path.open("rb") as file:
            intact = path.stat().st_size == size
            intact = intact and hashlib.file_digest(file, "sha256").hexdigest() == digest
        if not intact:
            raise DamagedError(f"{directory} is damaged: {name} was changed; use another copy")
    return manifest


def copy_listed(manifest: CopyManifest, source: Path, target: Path) -> None:
    """Copy the files of a manifest, readable by their owner only."""
    for name in manifest.files:
        copy_private(source / PurePosixPath(name), target / PurePosixPath(name))


def copy_private(source: Path, target: Path) -> None:
    """Copy one file durably, with mode 0600, into a private directory.

    Raises:
        OSError: it cannot be read or written.
    """
    make_private_directory(target.parent)
    with source.open("rb") as reader:
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as writer:
            shutil.copyfileobj(reader, writer, 1 << 20)
            writer.flush()
            os.fsync(writer.fileno())


def refuse_existing(target: Path) -> None:
    """Refuse a target that has anything.

    Raises:
        UserError: it is not empty, or no directory.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} is not empty; nothing was changed. Give a new directory")


@contextlib.contextmanager
def drafted(target: Path) -> Iterator[Path]:
    """Where the block makes a new directory, which appears as `target` when it is complete.

    What an earlier process has left there is removed, and so is everything if the block raises.
    """
    draft = target.with_name(f".{target.name}.part")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        yield draft
        if target.exists():
            target.rmdir()
        draft.rename(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _files(directory: Path) -> Iterator[Path]:
    """The files below a directory, without the manifest."""
    for folder, folders, names in os.walk(directory):
        for name in (*names, *(each for each in folders if (Path(folder) / each).is_symlink())):
            path = Path(folder) / name
            if path.is_symlink() or not path.is_file():
                raise DamagedError(f"{path} is not a plain file, and a copy has no others")
            if path != directory / FILE:
                yield path
