"""Files and directories that only their owner can read, written durably."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path

from isthmus.errors import UserError

_DRAFT = ".draft"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def write_private_file(path: Path, data: bytes) -> None:
    """Write a file atomically and durably, readable by its owner only (mode 0600).

    See `write_private_file_of`.
    """
    write_private_file_of(path, lambda _handle: data)


def write_private_file_of(path: Path, content: Callable[[int], bytes]) -> None:
    """Write a file atomically and durably, readable by its owner only (mode 0600).

    `content` gets the open file, which may be what it is about, and returns what is written.

    Drafts of writers that were killed are removed. Of several processes that write at the same
    time, the last one's data stays.
    """
    for abandoned in path.parent.glob(f".{glob.escape(path.name)}.*{_DRAFT}"):
        _remove_abandoned(abandoned)
    while not _write_draft(path, content):
        pass  # another process took the draft for an abandoned one before it was locked
    sync_directory(path.parent)


def _write_draft(path: Path, content: Callable[[int], bytes]) -> bool:
    """Write a draft and put it in the file's place; returns whether it was still there."""
    handle, draft = tempfile.mkstemp(  # with mode 0600
        dir=path.parent, prefix=f".{path.name}.", suffix=_DRAFT
    )
    try:
        with os.fdopen(handle, "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(content(file.fileno()))
            file.flush()
            os.fsync(file.fileno())
            with contextlib.suppress(FileNotFoundError):
                Path(draft).replace(path)  # before it is unlocked
                return True
            return False
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def _remove_abandoned(draft: Path) -> None:
    """Delete a draft unless its writer, which holds a lock on it, is at work."""
    with contextlib.suppress(FileNotFoundError, BlockingIOError), draft.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        draft.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Return when the names of a directory's files are on disk."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
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


def make_state_directory(path: Path) -> None:
    """Make a directory with mode 0700, whatever the umask is; an existing one keeps its mode.

    Its parents, which may be anybody's, get the mode that the umask gives.

    Raises:
        OSError: it cannot be made.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def create_state_file(path: Path) -> None:
    """Create an empty file with mode 0600, for what opens it by its name.

    An existing one is not opened: to close it would release locks of this process, as SQLite's.

    Raises:
        OSError: it cannot be created; `FileExistsError` if there is one.
    """
    os.close(state_file_opener(str(path), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))


def state_file_opener(path: str, flags: int) -> int:
    """Open a file, with mode 0600 if it is new; the `opener` of `open`."""
    return os.open(path, flags, 0o600)


def remove_directory(path: Path) -> None:
    """Delete a directory and what a program that is not trusted has made in it.

    Neither its depth nor the modes in it are an obstacle, and no symbolic link is followed, even if
    the program still runs. What cannot be deleted is left.
    """
    with contextlib.suppress(OSError):
        top = os.open(path, _DIRECTORY)
        try:
            _empty(top)
        finally:
            os.close(top)
        path.rmdir()


def _empty(top: int) -> None:
    """Delete all in a directory; subdirectories move up to it, so that nothing is recursive."""
    pending = [entry.name for entry in os.scandir(top)]
    while pending:
        name = pending.pop()
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=top)
            continue
        with contextlib.suppress(OSError):
            _open_up(name, top)
            inner = os.open(name, _DIRECTORY, dir_fd=top)
            try:
                for child in [entry.name for entry in os.scandir(inner)]:
                    with contextlib.suppress(OSError):  # not a directory
                        _open_up(child, inner)
                    moved = uuid.uuid4().hex
                    os.rename(child, moved, src_dir_fd=inner, dst_dir_fd=top)
                    pending.append(moved)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=top)


def _open_up(name: str, parent: int) -> None:
    """Let this user list, change and move a directory."""
    handle = os.open(name, os.O_PATH | _DIRECTORY, dir_fd=parent)
    try:
        Path(f"/proc/self/fd/{handle}").chmod(0o700)
    finally:
        os.close(handle)


def check_private(path: Path) -> None:
    """Refuse a secret that other users of this machine can read.

    Raises:
        UserError: the file's mode gives access to its group or to others.
    """
    if path.stat().st_mode & 0o077:
        raise UserError(f"{path} can be read by others on this machine; chmod 600 {path}")
