"""Messages and vectors between a simulation and a process that trains its devices."""

from __future__ import annotations

import socket
import struct

from isthmus.transport.blobs import Buffer

_LENGTH = struct.Struct(">I")
_MESSAGE_BYTES = 64 << 20
"""Most bytes of a message: the job and the layout of a model are the largest."""


class Channel:
    """Messages and vectors on a connected stream socket.

    A message has its length in front of it, in 4 bytes. The size of a vector is known from a
    message before it. Methods raise `EOFError` or `OSError` if the other process has ended.
    """

    def __init__(self, connected: socket.socket) -> None:
        """Use a socket that blocks; `close` closes it."""
        self._socket = connected

    def fileno(self) -> int:
        """File descriptor of the socket, to wait until there is something to receive."""
        return self._socket.fileno()

    def send(self, message: bytes) -> None:
        """Send a message."""
        self._socket.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self, most: int = _MESSAGE_BYTES) -> bytes:
        """The next message; an `OSError` too if it has more bytes than `most`."""
        length = bytearray(_LENGTH.size)
        self.receive_into(length)
        (size,) = _LENGTH.unpack(length)
        if size > most:
            raise OSError(f"a message of {size} bytes")
        message = bytearray(size)
        self.receive_into(message)
        return bytes(message)

    def send_vector(self, vector: Buffer) -> None:
        """Send an encoded vector."""
        self._socket.sendall(vector)

    def receive_into(self, place: Buffer) -> None:
        """Receive a vector that has the size of `place`."""
        rest = memoryview(place)
        while rest:
            count = self._socket.recv_into(rest)
            if not count:
                raise EOFError
            rest = rest[count:]

    def close(self) -> None:
        """Close the socket, which the other process notices."""
        self._socket.close()
