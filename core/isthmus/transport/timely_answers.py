"""Answers of web servers whose lines come in time, on connections that are made in time.

The limit of a socket is for each of its reads. A server that sends the lines of an answer, or those
between its chunks, a byte at a time would never exceed it, and take days for one line. Nor would a
name with thousands of addresses where nobody answers, of which each has that limit.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPResponse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

LINES_SECONDS = 20.0
"""Limit for the lines of an answer, and for those between two chunks of what it has."""


CONNECTION_SECONDS = 30.0
"""Limit for a connection, with all addresses of the server's name."""


class _LimitedReads(io.RawIOBase):
    """What a socket receives, as long as there is time."""

    def __init__(self, raw: io.RawIOBase) -> None:
        super().__init__()
        self._raw = raw
        self._until: float | None = None

    @contextlib.contextmanager
    def limited(self) -> Iterator[None]:
        """Within it reads begin for `LINES_SECONDS`."""
        self._until = time.monotonic() + LINES_SECONDS
        try:
            yield
        finally:
            self._until = None

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int | None:
        """See `io.RawIOBase`.

        Raises:
            TimeoutError: there is no time left.
        """
        if self._until is not None and time.monotonic() > self._until:
            raise TimeoutError(f"the lines of its answer take longer than {LINES_SECONDS:g} s")
        return self._raw.readinto(buffer)

    def close(self) -> None:
        """See `io.RawIOBase`."""
        super().close()
        self._raw.close()


class TimelyAnswer(HTTPResponse):
    """An answer whose lines come in time, which is read by `read1`."""

    def __init__(
        self,
        sock: socket.socket,
        debuglevel: int = 0,
        method: str | None = None,
        url: str | None = None,
    ) -> None:
        super().__init__(sock, debuglevel, method, url)
        self._reads = _LimitedReads(self.fp.detach())
        self.fp = io.BufferedReader(self._reads)

    def begin(self) -> None:
        """See `http.client.HTTPResponse`."""
        with self._reads.limited():
            super().begin()

    def read1(self, n: int = -1) -> bytes:
        """See `http.client.HTTPResponse`."""
        with self._reads.limited():
            return super().read1(n)


class TimelyConnection(http.client.HTTPSConnection):
    """A connection with such answers."""

    response_class = TimelyAnswer

    def __init__(self, host: str, **more: Any) -> None:
        """See `http.client.HTTPSConnection`."""
        super().__init__(host, **more)
        self._create_connection = _connected  # all that `connect` leaves to others


def _connected(address: tuple[str, int], timeout: object, source: None) -> socket.socket:
    """A connection to one of the addresses of a name, in time.

    Each may take half of the time that is left, and the last one all of it.

    Args:
        address: host and port.
        timeout: limit for each address, and for each read and write afterwards; no number for
            that of all sockets.
        source: this machine's own address, which is not chosen here.

    Raises:
        OSError: there is none.
    """
    seconds = timeout if isinstance(timeout, int | float) else socket.getdefaulttimeout()
    until = time.monotonic() + CONNECTION_SECONDS
    why = OSError("its name has no address")
    found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    for number, (family, kind, protocol, _, place) in enumerate(found, 1):
        left = until - time.monotonic()
        if left <= 0:
            break
        limit = left if number == len(found) else left / 2
        made = socket.socket(family, kind, protocol)
        try:
            made.settimeout(limit if seconds is None else min(seconds, limit))
            made.connect(place)
            made.settimeout(seconds)
        except OSError as error:
            made.close()
            why = error
        else:
            return made
    raise why


class TimelyHandler(urllib.request.HTTPSHandler):
    """Opens HTTPS addresses of an opener with such answers."""

    def do_open(
        self,
        http_class: Callable[..., HTTPConnection],
        req: urllib.request.Request,
        **http_conn_args: Any,
    ) -> HTTPResponse:
        """See `urllib.request.AbstractHTTPHandler`."""
        return super().do_open(TimelyConnection, req, **http_conn_args)
