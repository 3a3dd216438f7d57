"""Answers of web servers whose lines come in time.

The limit of a socket is for each of its reads. A server that sends the lines of an answer, or those
between its chunks, a byte at a time would never exceed it, and take days for one line.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPResponse
from socket import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

LINES_SECONDS = 20.0
"""Limit for the lines of an answer, and for those between two chunks of what it has."""


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
        sock: socket,
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
