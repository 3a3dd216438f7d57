"""A process under faults: `isthmus` with a clock that jumps and a disk that fails.

`install` replaces the functions by which Python code reads the time and writes files, in this
process and those forked from it. Without a control block they pass every call on. Nothing of this
is in the product: only processes that `isthmus chaos` starts import it.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import resource
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from isthmus_chaos.control_block import (
    FULL_DISK,
    NO_FAULT,
    TORN_WRITE,
    ControlBlock,
)

_T = TypeVar("_T")

_control: ControlBlock | None = None
_folder = ""
"""Only files in this folder are on the faulty disk."""

_real_time = time.time
_real_time_ns = time.time_ns
_real_open = io.open
_real_os_open = os.open
_real_fsync = os.fsync
_real_replace = os.replace
_real_rename = os.rename
_real_unlink = os.unlink
_real_write = os.write
_real_truncate = os.truncate
_real_connect = sqlite3.connect

_WRITES = ("INSERT", "UPDATE", "DELETE", "REPLACE", "CREATE", "BEGIN", "COMMIT")
_OPTIONS = {"encoding", "errors", "newline", "closefd"}
_PAGE = 4096
_WAL_HEADER = 32
_WAL_FRAME = 24 + 4096


def install() -> None:
    """Replace the functions. Call it before other modules keep references to them."""
    time.time = _time
    time.time_ns = _time_ns
    builtins.open = io.open = _open
    os.open = _os_open
    os.fsync = _fsync  # type: ignore[assignment]  # it takes any argument
    os.replace = _replace  # type: ignore[assignment]  # it takes any arguments
    os.write = _write
    os.truncate = _truncate
    os.ftruncate = _truncate
    os.rename = _rename  # type: ignore[assignment]  # it takes any arguments
    os.unlink = _unlink
    sqlite3.connect = _connect  # type: ignore[assignment]  # it takes any arguments


def run() -> None:
    """Run `isthmus` with the faults of a control block: argv[1] the block, argv[2] the folder."""
    global _control, _folder
    _control = ControlBlock(Path(sys.argv[1]))
    _folder = sys.argv[2] + os.sep
    del sys.argv[1:3]
    from isthmus import cli

    cli.main()


# -- durable steps ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _durable_step(name: str, path: object) -> Iterator[None]:
    """Count a call that changes what is left after a crash, and crash before or after it."""
    if _control is None or not _absolute(path).startswith(_folder):
        yield
        return
    step = _control.steps + 1
    about = f"{name} {Path(os.fsdecode(path)).name}"  # type: ignore[arg-type]  # a path
    _crash_at(2 * step, about)
    yield
    _crash_at(2 * step + 1, about)


def _crash_at(moment: int, about: str) -> None:
    assert _control is not None
    if _control.reach(moment):
        _control.note_crash(about)
        os.kill(os.getpid(), signal.SIGKILL)


# -- the clock -------------------------------------------------------------------------------------
# TLS reads the kernel's clock and certificates are issued by it: their validity is not affected.


def _offset() -> float:
    return 0.0 if _control is None else _control.clock_offset


def _time() -> float:
    return _real_time() + _offset()


def _time_ns() -> int:
    return _real_time_ns() + int(_offset() * 1e9)


# -- the disk --------------------------------------------------------------------------------------


def _fault(path: Any = None) -> int:
    """The fault that an operation meets now, on a file in the folder or an open one."""
    if _control is None or _control.disk == NO_FAULT:
        return NO_FAULT
    if path is not None and not _absolute(path).startswith(_folder):
        return NO_FAULT
    return _control.disk


def _fail(fault: int, path: object = None) -> OSError:
    assert _control is not None
    _control.count_hit()
    number = errno.ENOSPC if fault == FULL_DISK else errno.EIO
    return OSError(number, os.strerror(number), None if path is None else str(path))


class _FaultyFile(io.FileIO):
    """A file on the faulty disk."""

    def write(self, data: Any) -> Any:
        fault = _fault()
        if fault == NO_FAULT:
            return super().write(data)
        if fault == TORN_WRITE:  # part of it arrives; direct I/O writes whole pages
            view = memoryview(data).cast("B")
            half = len(view) // 2
            super().write(view[: half // _PAGE * _PAGE if half >= _PAGE else half])
        raise _fail(fault, self.name)


def _open(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **options: Any) -> Any:
    writing = not {"w", "a", "x", "+"}.isdisjoint(mode)
    if _control is None or not writing or args or not options.keys() <= _OPTIONS:
        return _real_open(file, mode, buffering, *args, **options)
    if isinstance(file, int):
        if not _path_of(file).startswith(_folder):
            return _real_open(file, mode, buffering, **options)
    elif not _absolute(file).startswith(_folder):
        return _real_open(file, mode, buffering, **options)
    elif (fault := _fault()) and not Path(os.fsdecode(file)).exists():
        raise _fail(fault, file)
    raw_mode = mode.replace("b", "").replace("t", "")
    closefd = options.pop("closefd", True)
    with contextlib.nullcontext() if isinstance(file, int) else _durable_step("open", file):
        raw = _FaultyFile(file, raw_mode, closefd=closefd)
    if buffering == 0:
        return raw
    size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
    buffered = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw, size)
    if "b" in mode:
        return buffered
    return io.TextIOWrapper(buffered, line_buffering=buffering == 1, **options)


def _absolute(path: Any) -> str:
    return str(Path(os.fsdecode(path)).absolute())


def _path_of(handle: int) -> str:
    try:
        return str(Path(f"/proc/self/fd/{handle}").readlink())
    except OSError:
        return ""


def _rename(source: Any, target: Any, **options: Any) -> None:
    with _durable_step("rename", target):
        _real_rename(source, target, **options)


def _unlink(path: Any, **options: Any) -> None:
    with _durable_step("unlink", path):
        _real_unlink(path, **options)


def _os_open(path: Any, flags: int, *args: Any, **options: Any) -> int:
    if flags & os.O_CREAT and (fault := _fault(path)) and not Path(os.fsdecode(path)).exists():
        raise _fail(fault, path)
    return _real_os_open(path, flags, *args, **options)


def _write(handle: int, data: Any) -> int:
    path = "" if _control is None else _path_of(handle)
    if not _folder or not path.startswith(_folder):
        return _real_write(handle, data)
    if fault := _fault():
        if fault == TORN_WRITE:
            view = memoryview(data).cast("B")
            _real_write(handle, view[: len(view) // 2])
        raise _fail(fault, path)
    with _durable_step("write", path):
        return _real_write(handle, data)


def _truncate(path: Any, length: int) -> None:
    with _durable_step("truncate", _path_of(path) if isinstance(path, int) else path):
        _real_truncate(path, length)


def _fsync(handle: Any) -> None:
    number = handle if isinstance(handle, int) else handle.fileno()
    if (fault := _fault()) and _path_of(number).startswith(_folder):
        raise _fail(fault)
    with _durable_step("fsync", _path_of(number)):
        _real_fsync(handle)


def _replace(source: Any, target: Any, **options: Any) -> None:
    if fault := _fault(target):
        raise _fail(fault, target)
    with _durable_step("replace", target):
        _real_replace(source, target, **options)


# -- SQLite, which writes in C ---------------------------------------------------------------------


class _FaultyConnection(sqlite3.Connection):
    """A database on the faulty disk.

    On a full disk a statement that writes fails as SQLite reports it. Other faults are real ones:
    the kernel limits the size of files during the statement (RLIMIT_FSIZE), so that SQLite's write
    fails, at once or in the middle of a page, and SQLite has to undo it.
    """

    file = ""

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        execute = super().execute
        return self._guarded(sql, lambda: execute(sql, *parameters))

    def executescript(self, sql: str) -> sqlite3.Cursor:
        execute = super().executescript
        return self._guarded("CREATE", lambda: execute(sql))

    def commit(self) -> None:
        self._guarded("COMMIT", super().commit)

    def _guarded(self, sql: str, call: Callable[[], _T]) -> _T:
        fault = _fault(self.file) if self.file else NO_FAULT
        verb = sql.split(maxsplit=1)[0].upper()
        if not self.file or verb not in _WRITES:
            return call()
        if fault == NO_FAULT:
            with _durable_step(verb, self.file):
                return call()
        assert _control is not None
        if fault == FULL_DISK:
            _control.count_hit()
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            error.sqlite_errorname = "SQLITE_FULL"
            raise error
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        largest = self._middle_of_next_frame() if fault == TORN_WRITE else 0
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, limits[1]))
        try:
            return call()
        except sqlite3.Error:
            _control.count_hit()
            raise
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def _middle_of_next_frame(self) -> int:
        """The size of the write-ahead log in the middle of the first frame that it lacks.

        See https://www.sqlite.org/fileformat2.html#walformat.
        """
        log = Path(f"{self.file}-wal")
        size = log.stat().st_size if log.exists() else 0
        frames = max(0, size - _WAL_HEADER) // _WAL_FRAME
        return _WAL_HEADER + frames * _WAL_FRAME + _WAL_FRAME // 2


def _connect(database: Any, *args: Any, **options: Any) -> sqlite3.Connection:
    if _control is None or args or "factory" in options or options.get("uri"):
        plain: sqlite3.Connection = _real_connect(database, *args, **options)
        return plain
    connection = _real_connect(database, factory=_FaultyConnection, **options)
    assert isinstance(connection, _FaultyConnection)
    connection.file = _absolute(database)
    return connection
