"""Which directory a run is continued in, so that a copy of it is not.

`place.json` has the inode number of the run's directory, and its path. `cp -r`, `rsync`, `tar` and
`isthmus runs export` give a copy another inode; `mv` within one file system keeps it. What nobody
can tell from inside is a copy of the whole file system, such as a snapshot of a virtual machine.

Why a copy is refused: both would ask devices for the same rounds, and two runs with one key of
correlated noise add the same noise to different sums, whose difference has none.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from isthmus.errors import UserError
from isthmus.system.sealed_files import read_sealed, write_sealed

FILE = "place.json"

_NOWHERE = 0
"""Inode number of no directory."""


def record_place(directory: Path) -> None:
    """Note that a run is continued in its directory.

    Raises:
        OSError: it cannot be written.
    """
    place = directory.resolve()
    write_sealed(directory / FILE, {"inode": place.stat().st_ino, "path": str(place)})


def record_copy(directory: Path, source: str) -> None:
    """Note that a directory has a copy of a run, wherever it is moved; `source` is the original.

    Raises:
        OSError: it cannot be written.
    """
    write_sealed(directory / FILE, {"inode": _NOWHERE, "path": source})


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
    moved = known["inode"] == place.stat().st_ino
    put_back = known["path"] == str(place) and known["inode"] != _NOWHERE and not private
    if not moved and not put_back:
        raise UserError(
            f"{directory} is a copy of the run in {known['path']}, and nothing continues a copy: "
            "devices would be asked twice for a round, and the same noise be used twice; continue "
            f"the original, or make a new run of the copy with `{branch_command(directory)}`"
        )
    if known["path"] != str(place) or not moved:
        record_place(directory)


def branch_command(directory: Path) -> str:
    """The command that makes a new run of one that nothing continues."""
    return f"isthmus runs branch {shlex.quote(str(directory))} NEW"
