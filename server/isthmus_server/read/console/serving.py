"""Serve the console: where it may listen, in a thread or in the foreground."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import uvicorn
from cryptography import x509
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from isthmus.errors import UserError
from isthmus.identity import tls
from isthmus_server.fleet.callers import CallerCheck
from isthmus_server.read.console.access import CERTIFICATE, GuardedApp
from isthmus_server.read.console.app import ConsoleApp
from isthmus_server.transport.places import least_needed, network_of

MAX_CONNECTIONS = 128
"""Connections at a time; how a further one finds a place says `places.least_needed`."""

_IDLE_SECONDS = 4.0
"""A connection on which the caller has said nothing for this time is idle."""

_STOP_SECONDS = 2

OPTION = "--console"


class _Protocol(H11Protocol):
    """Passes the certificate that TLS has verified to the application, and finds a place."""

    network = ""
    """The caller's address, see `network_of`."""
    _heard = 0.0
    """When the caller said something."""

    @property
    def is_idle(self) -> bool:
        """See `Placed`."""
        return self.dispensable[1] > _IDLE_SECONDS

    @property
    def dispensable(self) -> tuple[bool, float]:
        """A connection without a request that is being answered is needed least."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        return not is_answering, time.monotonic() - self._heard

    def data_received(self, data: bytes) -> None:
        """Note when the caller said something."""
        self._heard = time.monotonic()
        super().data_received(data)

    def connection_made(self, transport: Any) -> None:
        """Give the connection a place, and note the caller's certificate."""
        self.network = network_of(transport.get_extra_info("peername")[0])
        self._heard = time.monotonic()
        placed = cast("set[_Protocol]", self.connections)
        if len(placed) >= MAX_CONNECTIONS - 1:  # at MAX_CONNECTIONS each request gets status 503
            leaving = least_needed(self.network, placed)
            if leaving is not None:
                placed.discard(leaving)
                leaving.transport.abort()
        super().connection_made(transport)
        secured = transport.get_extra_info("ssl_object")
        found = None if secured is None else secured.getpeercert(True)
        if not found:
            return
        certificate = x509.load_der_x509_certificate(found)
        app = self.app

        async def with_certificate(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, CERTIFICATE: certificate}, receive, send)

        self.app = with_certificate


class _ConsoleServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, console: ConsoleApp) -> None:
        super().__init__(config)
        self._console = console

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams, which browsers would hold open, then everything else."""
        self._console.live.end()
        await super().shutdown(sockets)


class ConsoleListener:
    """One console at one address.

    Guarantees:
      * beyond loopback it answers only holders of an operator's certificate, over TLS 1.3;
      * it runs in a thread and an event loop of its own, so that nothing waits for a browser.
    """

    def __init__(
        self,
        path: Path,
        host: str,
        port: int,
        *,
        token: str,
        check: CallerCheck | None = None,
        option: str = OPTION,
    ) -> None:
        """Listen; callers wait until `serve` or `serving` answers.

        Args:
            path: what to show.
            host: where to listen.
            port: 0 for any that is free.
            token: of a console on loopback.
            check: knows callers from other machines; None if there is no way to know them.
            option: how the address was given, for messages.

        Raises:
            UserError: there is nothing to show, the address is in use, or it is not loopback and
                callers could not be known.
        """
        self._local = tls.is_loopback(host)
        if not self._local and check is None:
            raise UserError(
                f"{option} {host}:{port} is not loopback, and others could read it there; use "
                "127.0.0.1, or `isthmus server start --console`, which asks for an operator's "
                "certificate"
            )
        self.console = ConsoleApp(path)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host.strip("[]"), port))
            self._socket.listen(MAX_CONNECTIONS)
        except OSError as error:
            self._socket.close()
            raise UserError(f"{option} {host}:{port} cannot be used: {error.strerror}") from None
        self.port: int = self._socket.getsockname()[1]
        scheme = "http" if self._local else "https"
        self.address = f"{scheme}://{host}:{self.port}/"
        guarded = GuardedApp(
            self.console.app,
            token=token if self._local else None,
            cookie=f"isthmus-console-{self.port}",
            check=None if self._local or check is None else check.check,
        )
        config = uvicorn.Config(
            guarded,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=_STOP_SECONDS,
        )
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        config.load()
        if not self._local and check is not None:
            config.ssl = _current(check)
        self._server = _ConsoleServer(config, self.console)

    async def serve(self) -> None:
        """Answer until `stop`, or in the main thread until SIGINT or SIGTERM."""
        try:
            await self._server.serve([self._socket])
        finally:
            self._socket.close()
            await self.console.close()

    def stop(self) -> None:
        """End `serve`."""
        self._server.should_exit = True

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Answer during the block, in a thread."""
        thread = threading.Thread(
            target=lambda: asyncio.run(self.serve()), name="web-console", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            self.stop()
            await asyncio.to_thread(thread.join, 2 * _STOP_SECONDS)


def _current(check: CallerCheck) -> ssl.SSLContext:
    """TLS that takes the server's current certificate at each handshake."""
    context = check.context()

    def take(connection: Any, name: str | None, old: ssl.SSLContext) -> None:
        connection.context = check.context()

    context.sni_callback = take
    return context
