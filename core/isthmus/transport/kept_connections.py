"""An HTTPS connection that is kept for the next request to the same host.

A device asks a mirror again a moment later, for the model that is to be evaluated or for the next
round. A new connection takes three times as long as the answer needs to begin, and as much of a
processor as a megabyte does.
"""

from __future__ import annotations

import contextlib
import http.client
import ssl
import threading
import time
import urllib.error
import urllib.request
import weakref
from typing import cast

from isthmus.transport.timely_answers import TimelyAnswer, TimelyConnection, TimelyHandler

KEPT_SECONDS = 60.0
"""Web servers end connections that are idle for longer."""

_AGAIN_SECONDS = 5.0
"""Limit for the answer on a kept connection, which a router may have forgotten."""


class KeptConnection:
    """At most one idle connection, to the host that was asked last; used from several threads.

    Guarantees:
      * a connection is kept only after an answer was read to its end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: tuple[str, http.client.HTTPSConnection, float] | None = None

    def __del__(self) -> None:
        self._replace(None)

    def take(self, host: str) -> http.client.HTTPSConnection | None:
        """The idle connection to a host; None if there is none."""
        with self._lock:
            if self._idle is None or self._idle[0] != host:
                return None
            _, connection, since = self._idle
            self._idle = None
        if time.monotonic() - since <= KEPT_SECONDS:
            return connection
        connection.close()
        return None

    def keep(self, host: str, connection: http.client.HTTPSConnection) -> None:
        """Keep a connection on which nothing is left to read, in place of another one."""
        self._replace((host, connection, time.monotonic()))

    def _replace(self, idle: tuple[str, http.client.HTTPSConnection, float] | None) -> None:
        with self._lock:
            before = self._idle
            self._idle = idle
        if before is not None:
            before[1].close()


class _Answer(TimelyAnswer):
    """An answer whose connection is kept, or closed, when it is closed."""

    _kept: tuple[KeptConnection, str, http.client.HTTPSConnection] | None = None

    def belongs_to(
        self, kept: KeptConnection, host: str, connection: http.client.HTTPSConnection
    ) -> None:
        """Say where the connection goes."""
        self._kept = kept, host, connection

    def close(self) -> None:
        """See `http.client.HTTPResponse`."""
        is_whole = self.length == 0
        super().close()
        if self._kept is None:
            return
        kept, host, connection = self._kept
        self._kept = None
        # One that the server ends has no socket any more.
        if is_whole and not self.will_close and connection.sock is not None:
            kept.keep(host, connection)
        else:
            connection.close()


class KeepingHandler(TimelyHandler):
    """Opens HTTPS addresses of an opener on a kept connection, if there is one to the host.

    Connections through a proxy, and those of other requests than GET, are not kept.
    """

    def __init__(self, context: ssl.SSLContext, kept: KeptConnection) -> None:
        super().__init__(context=context)
        self._context_of_kept = context
        # Weakly: an opener refers to itself, and what it alone had would be closed late.
        self._kept = weakref.ref(kept)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        """See `urllib.request.HTTPSHandler`.

        Raises:
            OSError: the server cannot be reached.
        """
        kept = self._kept()
        is_get = request.get_method() == "GET"
        if kept is None or not is_get or getattr(request, "_tunnel_host", None):
            return super().https_open(request)
        host = request.host
        connection = kept.take(host)
        if connection is not None:
            connection.sock.settimeout(_AGAIN_SECONDS)
            # The server may have ended it meanwhile. To get something twice changes nothing.
            with contextlib.suppress(OSError, http.client.HTTPException):
                answer = _asked(connection, request, kept)
                if connection.sock is not None:
                    connection.sock.settimeout(request.timeout)
                return answer
        connection = TimelyConnection(host, timeout=request.timeout, context=self._context_of_kept)
        connection.response_class = _Answer
        return _asked(connection, request, kept)


def _asked(
    connection: http.client.HTTPSConnection, request: urllib.request.Request, kept: KeptConnection
) -> _Answer:
    """Send a request on a connection, which is closed if that fails."""
    headers = {**request.headers, **request.unredirected_hdrs}
    try:
        try:
            connection.request("GET", request.selector, headers=headers)
        except OSError as error:
            raise urllib.error.URLError(error) from error
        answer = cast(_Answer, connection.getresponse())
    except BaseException:
        connection.close()
        raise
    answer.belongs_to(kept, request.host, connection)
    # As other handlers of HTTP have it.
    answer.url = request.full_url
    answer.msg = answer.reason  # type: ignore[assignment]  # a text there, as in urllib
    return answer
