"""Files and directories that only their owner can read, written durably."""

from __future__ import annotations

import glob
import os
import tempfile
from pathlib import Path

from isthmus.errors import UserError

_DRAFT = ".draft"


def write_private_file(path: Path, data: bytes) -> None:
    """Write a file atomically and durably, readable by its owner only (mode 0600).

    Drafts of writers that were killed are removed. At most one process may write a file at a time;
    another one would fail, with the file unchanged.
    """
    for abandoned in path.parent.glob(f".{glob.escape(path.name)}.*{_DRAFT}"):
        abandoned.unlink(missing_ok=True)
    handle, draft = tempfile.mkstemp(  # with mode 0600
        dir=path.parent, prefix=f".{path.name}.", suffix=_DRAFT
    )
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def make_private_directory(path: Path) -> None:
    """Make a directory with mode 0700; an existing one gets that mode.

    Raises:
        UserError: it cannot be made, or another user owns it.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)
    except OSError as error:
        raise UserError(f"{path} cannot be a private directory: {error.strerror}") from None


def check_private(path: Path) -> None:
    """Refuse a secret that other users of this machine can read.

    Raises:
        UserError: the file's mode gives access to its group or to others.
    """
    if path.stat().st_mode & 0o077:
        raise UserError(f"{path} can be read by others on this machine; chmod 600 {path}")
