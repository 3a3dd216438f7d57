"""The audit log of a state directory: who changed what, and when, in a chain of hashes.

One JSON object per line, with the SHA-256 of the line before. Changing, removing or inserting a
line is noticed. `audit.head` has the size of the log and the hash of its last line, so that an
accident to the end is noticed too, also after further lines: the next one continues the lost one.
Removing the last lines on purpose, or writing the whole file anew, is noticed only by comparing the
last hash with a copy kept elsewhere. A last line without its end, after all that the head names, is
one that a crash cut short before anybody was told that it is recorded: readers pass over it, and
the next record takes its place; both say so.

>>> import tempfile
>>> state = Path(tempfile.mkdtemp())
>>> record(state, "revoke", by="alice", name="phone-0")
>>> record(state, "cancel", by="bob", job="job-1")
>>> [(entry.by, entry.action, entry.details) for entry in read(state)]
[('alice', 'revoke', {'name': 'phone-0'}), ('bob', 'cancel', {'job': 'job-1'})]
>>> log = state / "audit.log"
>>> _ = log.write_text(log.read_text().replace("phone-0", "phone-1"))
>>> read(state)
Traceback (most recent call last):
    ...
isthmus.errors.UserError: ...audit.log was changed: line 2 does not continue line 1
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import getpass
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from isthmus.errors import DamagedError, UserError
from isthmus.system.chained_log import NO_LINE, ChainedLog, LogEnd, append_line, line_digest
from isthmus.system.sealed_files import read_sealed, write_sealed

log = logging.getLogger(__name__)

_FILE = "audit.log"
_HEAD = "audit.head"
_MAX_LINE = 64 << 10
_LATEST = 2e11
"""Unix seconds, in the year 8307: later ones cannot be printed."""


@dataclasses.dataclass(frozen=True)
class AuditEntry:
    """One recorded action."""

    time: float
    """Unix seconds."""
    by: str
    """An operator or participant by its certificate, or a user of the server's machine."""
    action: str
    details: Mapping[str, str]
    digest: str
    """SHA-256 of the line, in hexadecimal."""
    mark: str = ""
    """What its writer recognises it by, who may not know whether it was written; or empty."""


def record(state: Path, action: str, *, by: str, mark: str = "", **details: str) -> None:
    """Append an action to the audit log of a state directory; it is on disk on return.

    Args:
        state: the state directory of a server or an authority.
        action: such as `revoke`.
        by: the operator's name, or `local_user()`.
        mark: see `AuditEntry.mark`.
        details: what the action was applied to.

    Raises:
        UserError: the log cannot be written.
    """
    path = state / _FILE
    try:
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)  # commands and the server write at the same time
            size = os.fstat(handle).st_size
            end = os.pread(handle, _MAX_LINE, max(0, size - _MAX_LINE))
            torn = _unconfirmed(state, size, end)
            if torn:
                size -= torn
                end = end[:-torn]
                os.ftruncate(handle, size)
                log.warning(
                    "%s ended in a line that a crash had cut short, and that nobody was told was "
                    "recorded; it is removed (%d bytes)",
                    path,
                    torn,
                )
            before = end.rstrip(b"\n").rpartition(b"\n")[2]
            entry = {"time": round(time.time(), 3), "by": by, "action": action, **details}
            if mark:
                entry["mark"] = mark
            entry["previous"] = line_digest(before) if size else NO_LINE
            with contextlib.suppress(OSError, DamagedError):  # then only the log itself counts
                written, last = _read_head(state)
                if size < written:  # lines are lost: the chain has to show it from now on
                    entry["previous"] = last
            line = json.dumps(entry, ensure_ascii=False).encode()
            # Half of a line that was recorded is ended and not removed: the loss stays visible.
            ended = end.endswith(b"\n") or not size
            append_line(handle, line if ended else b"\n" + line)
            write_sealed(
                state / _HEAD, {"bytes": os.fstat(handle).st_size, "last": line_digest(line)}
            )
        finally:
            os.close(handle)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}), so that {action!r} is not recorded there"
        ) from None


def _unconfirmed(state: Path, size: int, end: bytes) -> int:
    """Bytes at the end of the log of a line that a crash cut short, and of which no head tells."""
    torn = len(end) - (end.rfind(b"\n") + 1)
    if torn == _MAX_LINE and size > torn:
        return 0  # no record is as long
    try:
        written, _ = _read_head(state)
    except (OSError, DamagedError):
        return 0
    return torn if size - torn >= written else 0


def size(state: Path) -> int:
    """Bytes of the audit log of a state directory; 0 if there is none.

    Raises:
        UserError: it cannot be read.
    """
    path = state / _FILE
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def marks_since(state: Path, start: int) -> set[str]:
    """The marks of entries after the first `start` bytes of the audit log, which are not verified.

    A line that a crash cut short has none, also if only its end is missing: it is removed.

    Raises:
        UserError: the log cannot be read.
    """
    path = state / _FILE
    try:
        with path.open("rb") as log:
            log.seek(start)
            text = log.read()
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    marks = set()
    for line in text.split(b"\n")[:-1]:
        with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
            marks.add(str(json.loads(line)["mark"]))
    return marks


def read(state: Path) -> list[AuditEntry]:
    """Read and verify the audit log of a state directory; empty if nothing was recorded.

    Raises:
        UserError: it cannot be read, or a line does not continue the one before.
    """
    path = state / _FILE
    chain = ChainedLog(path)
    entries: list[AuditEntry] = []

    def take(line: bytes, before: LogEnd) -> str:
        entries.append(_entry(path, line, before))
        return entries[-1].digest

    try:
        with _unwritten(path):
            size, last = _read_head(state)
            if size or path.exists():
                chain.read(take)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    read_bytes = chain.size
    if chain.torn and chain.size < size:
        read_bytes += len(chain.torn)
        take(chain.torn, chain.end)
    elif chain.torn:
        log.warning(
            "%s ends in a line that a crash cut short, and that nobody was told was recorded; the "
            "next record takes its place",
            path,
        )
    if read_bytes < size:
        raise DamagedError(
            f"{path} was cut short to {read_bytes} of {size} bytes; restore it from a backup"
        )
    if entries and read_bytes == size and entries[-1].digest != last:
        raise UserError(f"{path} was changed: its last line is not the one in {_HEAD}")
    return entries


@contextlib.contextmanager
def _unwritten(path: Path) -> Iterator[None]:
    """Wait until no other process appends, and keep them waiting; a line is never half written."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


def _entry(path: Path, line: bytes, before: LogEnd) -> AuditEntry:
    number = before.number + 1
    try:
        fields = json.loads(line)
        previous = fields.pop("previous")
        time_ = float(fields.pop("time"))
        by = fields.pop("by")
        action = fields.pop("action")
        mark = fields.pop("mark", "")
        texts = all(isinstance(each, str) for each in (by, action, mark))
        if not (0 <= time_ < _LATEST and texts):
            raise ValueError
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path} was changed: line {number} is not a record") from None
    if previous != before.digest:
        raise UserError(
            f"{path} was changed: line {number} does not continue "
            + (f"line {before.number}" if before.number else "an empty log")
        )
    return AuditEntry(time_, by, action, fields, line_digest(line), mark)


def revoked(entries: Iterable[AuditEntry]) -> tuple[dict[str, str], dict[str, str]]:
    """What was revoked, with the names: identity keys, and digests of tokens (hexadecimal)."""
    joined: dict[str, set[str]] = {}
    invited: dict[tuple[str, bool], set[str]] = {}  # a rollout may have the name of another token
    identities: dict[str, str] = {}
    tokens: dict[str, str] = {}
    for entry in entries:
        name = entry.details.get("name", "")
        if entry.action == "join":
            joined.setdefault(entry.by, set()).add(entry.details.get("identity", ""))
        elif entry.action == "token":
            many = "uses" in entry.details
            invited.setdefault((name, many), set()).add(entry.details.get("token", ""))
        elif entry.action == "revoke":
            many = entry.details.get("rollout") == name
            if not many:  # those who joined with it have records of their own
                identities.update(dict.fromkeys(joined.get(name, ()), name))
            tokens.update(dict.fromkeys(invited.get((name, many), ()), name))
    return identities, tokens


def refuse_lost_registry(registry: Path) -> None:
    """Refuse to begin a registry of participants anew where the audit log next to it has entries.

    Raises:
        DamagedError: the registry is missing.
        UserError: the audit log cannot be read.
    """
    if not registry.exists() and read(registry.parent):
        raise DamagedError(
            f"{registry} is missing, and {registry.parent / _FILE} says that there was one; "
            "restore it with its -wal and .head files from a backup"
        )


def refuse_lost_log(state: Path) -> None:
    """Refuse an audit log without entries next to a registry with participants.

    Raises:
        DamagedError: the log is missing.
    """
    if not read(state):
        raise DamagedError(
            f"{state / _FILE} is missing, although participants have joined; restore it and "
            f"{_HEAD} from a backup. Without one, later entries begin a new log"
        )


def _read_head(state: Path) -> tuple[int, str]:
    """Size of the log when it was last written, and the hash of its last line; 0 without a head."""
    try:
        values = read_sealed(state / _HEAD)
        return int(values["bytes"]), str(values["last"])
    except FileNotFoundError:
        return 0, ""
    except DamagedError as error:
        raise DamagedError(f"{error}; remove it if {_FILE} is complete") from None


def local_user() -> str:
    """The user of this machine who runs this process, for actions of the command line."""
    try:
        return f"user {getpass.getuser()}"
    except (KeyError, OSError):  # a user without a name
        return f"user {os.getuid()}"
