"""Messages between two processes on a connected stream socket: the one framing of all of them.

A message is its length in four bytes, big-endian, and that many bytes: JSON among the processes of
one command, Protobuf with a task's process, and never pickle. The receiver says how long a message
may be. Vectors follow a message without a length, because the message says their size.

>>> import socket
>>> one, other = map(Channel, socket.socketpair())
>>> one.send(b"hello")
>>> other.receive(most=5)
b'hello'
>>> one.close()
>>> other.receive()
Traceback (most recent call last):
EOFError: the other process has closed the connection
>>> other.close()
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

MESSAGE_BYTES = 64 << 20
"""Most bytes of a message unless a receiver takes fewer: a job and the layout of a model are the
largest."""

_LENGTH = struct.Struct(">I")
_HANDLES = 32
"""Most descriptors that accompany a message."""


class TooLarge(OSError):
    """A message was announced that is larger than the receiver takes; nothing is allocated."""


def framed(message: bytes) -> bytes:
    """A message with its length, for a sender that has no `Channel`."""
    return _LENGTH.pack(len(message)) + message


async def read_message(stream: asyncio.StreamReader, most: int = MESSAGE_BYTES) -> bytes:
    """The next message on a stream of an event loop.

    Raises:
        EOFError: the other process has ended.
        TooLarge: it has more bytes than `most`.
    """
    return await stream.readexactly(_size(await stream.readexactly(_LENGTH.size), most))


def _size(length: bytes | bytearray, most: int) -> int:
    (size,) = _LENGTH.unpack(length)
    if size > most:
        raise TooLarge(f"a message of {size} bytes was announced")
    return int(size)


class Channel:
    """One end of a connection.

    Methods raise `EOFError` or `OSError` if the other process has ended. One thread may send while
    another one receives.
    """

    def __init__(self, connected: socket.socket) -> None:
        """Use a socket that blocks; `close` closes it."""
        self._socket = connected

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """One end, and the socket for another process, which closes it there."""
        own, other = socket.socketpair()
        return cls(own), other

    def fileno(self) -> int:
        """File descriptor of the socket, to wait until there is something to receive."""
        return self._socket.fileno()

    def send(self, message: bytes, handles: Sequence[int] = (), *, wait: bool = True) -> None:
        """Send a message; descriptors are duplicated for the receiver (Unix sockets only).

        With `wait` False it must be short, and `BlockingIOError` says that it was not sent because
        the other process does not read.
        """
        frame = framed(message)
        if handles or not wait:
            more = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", handles))]
            flags = 0 if wait else socket.MSG_DONTWAIT
            sent = self._socket.sendmsg([frame], more if handles else [], flags)
            frame = frame[sent:]
        if frame:
            self._socket.sendall(frame)

    def receive(self, most: int = MESSAGE_BYTES) -> bytes:
        """The next message, without descriptors.

        Raises:
            TooLarge: it has more bytes than `most`.
        """
        length = bytearray(_LENGTH.size)
        self.receive_into(length)
        return self._rest(length, most)

    def receive_with_handles(self, most: int = MESSAGE_BYTES) -> tuple[bytes, list[int]]:
        """The next message and its descriptors, which the caller closes.

        Only for messages of a process that this one trusts: they may be anything that is open.

        Raises:
            TooLarge: it has more bytes than `most`.
            OSError: it has too many descriptors, or this process has too many open files.
        """
        length = bytearray(_LENGTH.size)
        # Descriptors arrive with the first byte of their message. `socket.recv_fds` ignores its
        # flags in Python 3.11, and programs that this process starts would inherit them.
        handles = array.array("i")
        space = socket.CMSG_SPACE(_HANDLES * handles.itemsize)
        head, ancillary, flags, _ = self._socket.recvmsg(
            len(length), space, socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                handles.frombytes(data[: len(data) - len(data) % handles.itemsize])
        try:
            if not head:
                raise _ended()
            if flags & socket.MSG_CTRUNC:
                raise OSError("descriptors of a message were lost; are too many files open?")
            length[: len(head)] = head
            self.receive_into(memoryview(length)[len(head) :])
            return self._rest(length, most), handles.tolist()
        except BaseException:
            for handle in handles:
                os.close(handle)
            raise

    def send_vector(self, vector: bytearray | memoryview) -> None:
        """Send bytes whose number the receiver knows."""
        self._socket.sendall(vector)

    def receive_into(self, place: bytearray | memoryview) -> None:
        """Receive as many bytes as `place` has."""
        rest = memoryview(place)
        while rest:
            try:
                count = self._socket.recv_into(rest)
            except ConnectionError:
                count = 0
            if not count:
                raise _ended()
            rest = rest[count:]

    def shut_down(self) -> None:
        """Have both sides find the connection ended, also a thread that receives; then `close`."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, which the other process notices."""
        self._socket.close()

    def _rest(self, length: bytearray, most: int) -> bytes:
        message = bytearray(_size(length, most))
        self.receive_into(message)
        return bytes(message)


def _ended() -> EOFError:
    return EOFError("the other process has closed the connection")
