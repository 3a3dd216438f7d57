"""Pass blobs between processes of one user on one machine, as files that the other one opens.

Only processes that one command started do this (`isthmus run`): they trust each other, so a blob
that is passed this way is copied at most once, and its SHA-256 is not verified. That of an update
is not computed either: it has a random name. It needs Linux, where `/proc/PID/fd` has the open
files of a process, memory included (`memfd_create(2)`).

>>> memory = MemoryFile(5)
>>> memory[:] = b"hello"
>>> file = offered(memoryview(memory))
>>> with opened(file, size=5) as blob:
...     blob.read()
b'hello'
>>> offered(memoryview(b"in the memory of this process only")) is None
True
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from isthmus.system.memory_file import MemoryFile
from isthmus.transport.blobs import Buffer, InFile
from isthmus.wire import link_pb2

Take = Callable[[BinaryIO], object]
"""Destination of a whole blob: called with an open file, which it closes.

Its bytes do not change before the participant gets the receipt.
"""

_RANDOM = bytes(16)
"""Beginning of a random name, which no SHA-256 is found to have."""
_RANDOM_BYTES = 16
"""Random bytes of such a name, so that it is as long as a SHA-256."""


def machine() -> str:
    """Identify this user on this machine; empty where memory cannot be shared.

    Processes with the same result can open each other's files.
    """
    if not hasattr(os, "memfd_create"):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()} {os.getuid()}"
    except OSError:
        return ""


def answer(pull: link_pb2.Pull, payload: Buffer | InFile, machine: str) -> link_pb2.Envelope | None:
    """The answer to a pull of a payload that says which file has it; None: send the bytes.

    Args:
        pull: asks for it.
        payload: what is asked for.
        machine: of this process; empty if it shares no memory.
    """
    file = offered(payload) if machine and pull.machine == machine else None
    if file is None:
        return None
    chunk = link_pb2.Chunk(sha256=pull.sha256, offset=pull.offset, file=file)
    return link_pb2.Envelope(chunk=chunk)


def offered(payload: Buffer | InFile) -> link_pb2.OpenFile | None:
    """The file that holds exactly this payload, for another process; None if there is none."""
    if isinstance(payload, InFile):
        return link_pb2.OpenFile(process=os.getpid(), descriptor=payload.fileno())
    memory = memoryview(payload).obj
    if not isinstance(memory, MemoryFile) or len(memory) != len(payload):
        return None
    return link_pb2.OpenFile(process=os.getpid(), descriptor=memory.handle)


def named(payload: Buffer) -> link_pb2.Blob:
    """A random name of a payload, in place of its SHA-256: who reads it as a file computes none."""
    return link_pb2.Blob(sha256=_RANDOM + os.urandom(_RANDOM_BYTES), size=len(payload))


def has_random_name(blob: link_pb2.Blob) -> bool:
    """Whether `named` has named a blob, so that its bytes have another SHA-256."""
    return blob.sha256.startswith(_RANDOM)


def opened(file: link_pb2.OpenFile, size: int) -> BinaryIO:
    """Open what another process has offered.

    Raises:
        OSError: it cannot be opened, is no regular file, or has less than `size` bytes.
    """
    path = Path(f"/proc/{file.process}/fd/{file.descriptor}")
    status = path.stat()  # before it is opened, which a pipe or a device could notice
    if not stat.S_ISREG(status.st_mode) or status.st_size < size:
        raise OSError(f"{path} does not have {size} bytes")
    return path.open("rb")


def read_into(file: BinaryIO, buffer: Buffer) -> None:
    """Fill a buffer from the start of a file.

    Raises:
        OSError: it is too short, or cannot be read.
    """
    view = memoryview(buffer)
    offset = 0
    while offset < len(view):
        count = os.preadv(file.fileno(), [view[offset:]], offset)
        if not count:
            raise OSError(f"{file.name} was cut short")
        offset += count
