"""The files of a device's history: where they begin, and what happens when they are lost.

The membership notes that a history was begun, so that a device which has lost both of its files
does not go on with an empty one. What is lost together with the membership, or replaced by an older
copy of the whole state directory, cannot be noticed.

This module does not import PyTorch: it is used before a device connects.
"""

from __future__ import annotations

import hashlib
import shlex
from pathlib import Path

from isthmus.errors import UserError
from isthmus.identity.membership import Membership
from isthmus.system.chained_log import LogEnd
from isthmus.system.private_files import write_private_file

EMPTY = LogEnd(0, hashlib.sha256(b"isthmus/history/1").hexdigest())
"""The end of a history without entries."""


def head_of(path: Path) -> Path:
    """The head of a log: where it ends."""
    return path.with_suffix(".head")


def write_head(path: Path, *ends: LogEnd) -> None:
    """Write the head of a log durably; with two ends, either may be that of the log."""
    lines = [f"{end.number} {end.digest}\n" for end in ends]
    write_private_file(head_of(path), "".join(lines).encode())


def lost_file(member: Membership) -> Path | None:
    """The file of a device's history that is lost; None if none is.

    Its log begins with the first sum.

    Raises:
        OSError: the head cannot be read.
    """
    head = head_of(member.history)
    if not head.exists():
        return head if member.has_history or member.history.exists() else None
    is_empty = any(line.startswith(b"0 ") for line in head.read_bytes().splitlines())
    return None if is_empty or member.history.exists() else member.history


def begin_history(member: Membership) -> Path:
    """Begin the history of a device that has none yet; returns its file.

    The head of an empty history is written before the note that there is one, and both before the
    first entry, so that no crash makes a history look lost.

    Raises:
        UserError: a history was begun, and its files or its head are missing; or they cannot be
            written.
    """
    path = member.history
    head = head_of(member.history)
    state = str(member.directory)
    if not head.exists():
        if member.has_history or path.exists():
            lost = f"{head} is" if path.exists() else f"{path} and {head.name} are"
            raise UserError(
                f"{lost} missing, and with it the record of the sums this device was in; move it "
                "back if you have moved it, or begin a new record with `isthmus client new-history "
                f"--state {shlex.quote(state)}`, after which a lying server could repeat an "
                "earlier sum without some of its devices"
            )
        _begin(path)
    if not member.has_history:
        member.note_history()
    return path


def replace_history(member: Membership) -> Path | None:
    """Begin a new history in place of one that is lost or damaged, on behalf of the owner.

    Returns:
        Where the files of the old one are now; None if there were none.

    Raises:
        UserError: they cannot be moved, or the new ones not written.
    """
    path = member.history
    moved = member.directory / "old-history"
    present = [file for file in (path, head_of(path)) if file.exists()]
    try:
        for file in present:
            moved.mkdir(mode=0o700, exist_ok=True)
            file.replace(moved / file.name)
    except OSError as error:
        raise UserError(f"{path} cannot be moved to {moved}: {error.strerror}") from None
    _begin(path)
    member.note_history()
    return moved if present else None


def _begin(path: Path) -> None:
    try:
        write_head(path, EMPTY)
    except OSError as error:
        raise UserError(f"{head_of(path)} cannot be written: {error.strerror}") from None
