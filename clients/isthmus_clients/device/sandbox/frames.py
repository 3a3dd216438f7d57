"""Messages and shared memory between the agent and a task's process.

A frame is the length of an encoded `Envelope` in four bytes, and the envelope. Models and records
are in shared memory, whose descriptors accompany the frame of the request.
"""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import socket
import struct
import weakref
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from isthmus.errors import UpdateError
from isthmus.wire import link_pb2

MAX_REPLY_BYTES = 256 << 10
"""Largest frame that the agent reads: a reply has a few figures or one sentence."""

_LENGTH = struct.Struct("=I")
_MAX_HANDLES = 2


class SharedMemory(mmap.mmap):
    """Memory of a fixed size in both processes (memfd_create(2)).

    Guarantees:
      * neither process can shorten it, so that no access to it fails (its size is sealed).
    """

    handle: int

    def __new__(cls, size: int) -> SharedMemory:
        """Allocate `size` bytes, at least one; pages are taken when they are written."""
        handle = os.memfd_create("isthmus", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(handle, size)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(handle, fcntl.F_ADD_SEALS, seals)
            self = super().__new__(cls, handle, size)
        except BaseException:
            os.close(handle)
            raise
        self.handle = handle
        weakref.finalize(self, os.close, handle)
        return self

    def copy(self, start: int, out: memoryview) -> None:
        """Read `len(out)` bytes from `start` into private memory."""
        done = 0
        while done < len(out):
            done += os.preadv(self.handle, [out[done:]], start + done)


def send(
    end: socket.socket,
    message: link_pb2.Envelope,
    handles: Sequence[int] = (),
    *,
    wait: bool = True,
) -> None:
    """Send a frame; descriptors are duplicated for the receiver.

    With `wait` False it must be short, and is not sent if the other process does not read.

    Raises:
        OSError: the other process has ended, or does not read.
    """
    data = message.SerializeToString()
    frame = memoryview(_LENGTH.pack(len(data)) + data)
    more = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", handles))] if handles else []
    sent = end.sendmsg([frame], more, 0 if wait else socket.MSG_DONTWAIT)
    end.sendall(frame[sent:])


def receive(end: socket.socket, max_bytes: int) -> link_pb2.Envelope:
    """Receive a frame, and no descriptors.

    Raises:
        EOFError: the other process has ended.
        UpdateError: the frame is larger than `max_bytes` or not an envelope.
    """
    (length,) = _LENGTH.unpack(_exactly(end, _LENGTH.size))
    if length > max_bytes:
        raise UpdateError(f"a message of {length} bytes was announced")
    try:
        return link_pb2.Envelope.FromString(_exactly(end, length))
    except DecodeError as error:
        raise UpdateError("a message cannot be read") from error


def receive_with_handles(end: socket.socket) -> tuple[link_pb2.Envelope, list[int]]:
    """Receive a frame of any size with its descriptors, from a trusted process.

    Raises:
        EOFError: the other process has ended.
    """
    head, handles, _, _ = socket.recv_fds(end, _LENGTH.size, _MAX_HANDLES)
    if not head:
        raise EOFError
    head += _exactly(end, _LENGTH.size - len(head))
    return link_pb2.Envelope.FromString(_exactly(end, *_LENGTH.unpack(head))), list(handles)


def _exactly(end: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        try:
            count = end.recv_into(view)
        except ConnectionError:
            count = 0
        if count == 0:
            raise EOFError
        view = view[count:]
    return bytes(data)
