"""Which directory a run is continued in, so that a copy of it is not.

`place.json` has the identity of the run's directory and its own one (`FileIdentity`), and the path.
`cp -r`, `rsync`, `tar` and `isthmus runs export` give a copy another one; `mv` within one file
system keeps both. The directory alone is not enough: it may be the first of a volume, of which each
volume has the same. Nor is the file: a copy of hard links has it. What nobody can tell from inside
is a copy of the whole file system, such as a snapshot of a virtual machine.

Why a copy is refused: both would ask devices for the same rounds, and two runs with one key of
correlated noise add the same noise to different sums, whose difference has none.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

from isthmus.errors import DamagedError, UserError
from isthmus.system.file_identity import FileIdentity
from isthmus.system.private_files import write_private_file_of
from isthmus.system.sealed_files import read_sealed, sealed_json, write_sealed

FILE = "place.json"

_DESCRIPTION = "job.json"
"""See `run_description`, which needs this module."""

_NOWHERE = 0
"""Inode number of no directory."""


def record_place(directory: Path, place: Path | None = None) -> None:
    """Note that a run is continued in its directory.

    Args:
        directory: of the run.
        place: where the directory will be renamed to, which keeps its identity; None if it stays.

    Raises:
        OSError: it cannot be written.
    """
    place = (place or directory).resolve()
    of_directory = dataclasses.asdict(FileIdentity.of(directory.resolve()))

    def content(handle: int) -> bytes:
        of_file = dataclasses.asdict(FileIdentity.of_open(handle))
        return sealed_json({**of_directory, "file": of_file, "path": str(place)})

    write_private_file_of(directory / FILE, content)


def record_copy(directory: Path, source: str, shared: Collection[str] = ()) -> None:
    """Note that a directory has a copy of a run, wherever it is moved.

    Args:
        directory: of the copy.
        source: that of the original.
        shared: populations whose budget the original shares with other runs.

    Raises:
        OSError: it cannot be written.
    """
    values: dict[str, Any] = {"inode": _NOWHERE, "path": source}
    if shared:
        values["shared"] = sorted(shared)
    write_sealed(directory / FILE, values)


def shared_by_original(directory: Path) -> Collection[str]:
    """The populations whose budget the original of a copy shares; none if it is no such copy.

    Raises:
        DamagedError: the file is damaged.
        OSError: it cannot be read.
    """
    try:
        return list(read_sealed(directory / FILE).get("shared", ()))
    except FileNotFoundError:  # of a version that recorded nothing
        return []


def original_of(directory: Path) -> str | None:
    """Where the run of a directory that is a copy was continued; None if it is the original.

    Raises:
        DamagedError: the file is damaged.
        OSError: it cannot be read; `FileNotFoundError` if nothing was recorded.
    """
    known = read_sealed(directory / FILE)
    return None if _is_recorded(known, directory) else str(known["path"])


def original_in_words(directory: Path, original: str) -> str:
    """Where the original of a copy is, as far as it can be seen from here.

    Args:
        directory: the copy.
        original: what `original_of` returned. The run may have been moved since, or another one
            may be there now.
    """
    place = Path(original)
    if place == directory.resolve():
        return "a run that was in this place before"
    found = _run_id(place)
    if found is not None and found == _run_id(directory) and _is_original(place):
        return f"the run in {original}"
    return f"a run that was in {original} and is not found there"


def _is_original(directory: Path) -> bool:
    try:
        return original_of(directory) is None
    except FileNotFoundError:  # of a version that recorded nothing
        return True
    except (DamagedError, OSError):
        return False


def _run_id(directory: Path) -> str | None:
    """The id in a run's `job.json`, if it can be read."""
    try:
        return str(json.loads((directory / _DESCRIPTION).read_bytes())["run_id"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def refuse_copy(directory: Path, *, private: bool) -> None:
    """Refuse a directory that is a copy of the one in which its run is continued.

    A run of a version that recorded nothing is accepted, and recorded. In the same place a
    directory may be another one, as after a restore of files, unless the run is `private`: it may
    be older than what devices have answered.

    Raises:
        UserError: it is a copy.
        DamagedError: the file is damaged.
        OSError: the file cannot be written.
    """
    place = directory.resolve()
    try:
        known = read_sealed(directory / FILE)
    except FileNotFoundError:
        record_place(directory)
        return
    original = _is_recorded(known, directory)
    put_back = known["path"] == str(place) and known["inode"] != _NOWHERE and not private
    if not original and not put_back:
        raise UserError(
            f"{directory} is a copy of {original_in_words(directory, known['path'])}, and nothing "
            "continues a copy: devices would be asked twice for a round, and the same noise be "
            "used twice; continue the original where it is, make a new run of the copy with "
            f"`{branch_command(directory)}`, or, if the original is gone for good, have the copy "
            f"take its place with `{adopt_command(directory)}`"
        )
    # Also what a file of an earlier version does not have.
    if known["path"] != str(place) or not original or "file" not in known:
        record_place(directory)


def _is_recorded(known: dict[str, Any], directory: Path) -> bool:
    """Whether a directory and the file in it are those of which the file was written."""
    of_file = known.get("file")  # a version before did not have it
    return FileIdentity.read(known).accepts(FileIdentity.of(directory.resolve())) and (
        of_file is None or FileIdentity.read(of_file).accepts(FileIdentity.of(directory / FILE))
    )


def branch_command(directory: Path) -> str:
    """The command that makes a new run of one that nothing continues."""
    return f"isthmus runs branch {shlex.quote(str(directory))} NEW"


def adopt_command(directory: Path) -> str:
    """The command by which an operator states that a copy is the run from now on."""
    return f"isthmus runs adopt {shlex.quote(str(directory))} --original-is-gone"
