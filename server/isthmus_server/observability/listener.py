"""Serve `/metrics`, `/healthz` and `/readyz` over HTTP on a listener of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue
from typing import Any

from cryptography import x509

from isthmus.errors import AdmissionRefused, UserError
from isthmus.identity import tls
from isthmus.printable import in_a_line
from isthmus_server.fleet.callers import CallerCheck
from isthmus_server.observability.metrics import RunMetrics
from isthmus_server.transport.event_loop import LoopNotAnswering
from isthmus_server.transport.places import least_needed, network_of

CONNECTIONS = 32
"""Connections at a time; how a further one finds a place says `places.least_needed`."""

CONNECTION_SECONDS = 15.0
"""Time for a whole connection, its TLS handshake included."""

_IDLE_SECONDS = 1.0
"""A connection that has lasted for this time is idle: an answer takes milliseconds."""

_REFUSED_SECONDS = 60.0
"""Time in which the same refusal is logged once."""

TEXT = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of Prometheus' text format."""

log = logging.getLogger(__name__)

Take = Callable[[socket.socket, str], None]
"""Takes over a connection, of which nothing has been read, and its caller's address."""

Ready = Callable[[], Sequence[str]]
"""Returns why the process cannot do its work now, one sentence each; none if it can."""


class MetricsListener:
    """Answers GET requests in threads of its own, whatever the process is busy with.

    Guarantees:
      * at an address that other machines reach, only holders of an operator's certificate get an
        answer;
      * callers hold at most `CONNECTIONS` places, each for at most `CONNECTION_SECONDS`, and one
        address with many of them keeps no other one out.
    """

    def __init__(
        self,
        host: str,
        port: int,
        metrics: RunMetrics,
        *,
        certified: bool = False,
        shared: bool = False,
    ) -> None:
        """Prepare; `serving` listens.

        Args:
            host: where to listen.
            port: 0 for any.
            metrics: what to serve.
            certified: the process has a certificate, and knows its callers by theirs.
            shared: the port is that of a server, which accepts the connections; see `taking`. There
                every caller has to present a certificate, on loopback as well.

        Raises:
            UserError: others could read the metrics there.
        """
        if not certified and not tls.is_loopback(host):
            raise UserError(
                f"--metrics {host}:{port} is not loopback, and without a server's certificate "
                "others could read it; use 127.0.0.1, or `isthmus server start`"
            )
        self.metrics = metrics
        self.port = port
        """The port; after `serving` began, the one in use."""
        self._host = host
        self._shared = shared
        self._server: _SharedServer | None = None

    def taking(self, port: int) -> Take | None:
        """What takes over connections that a server has accepted at its one port.

        None if this listener has a port of its own.
        """
        if not self._shared:
            return None
        self.port = port
        return self._take

    def _take(self, connection: socket.socket, network: str) -> None:
        if self._server is None:  # it does not serve yet, or not any more
            connection.close()
        else:
            self._server.take(connection, network)

    @property
    def is_open(self) -> bool:
        """Whether callers need no certificate."""
        return tls.is_loopback(self._host) and not self._shared

    @property
    def url(self) -> str:
        """Where the metrics are."""
        scheme = "http" if self.is_open else "https"
        return f"{scheme}://{self._host}:{self.port}/metrics"

    def check_free(self) -> None:
        """Refuse an address that cannot be used, before anything is written.

        Raises:
            UserError: it is in use, or not of this machine.
        """
        if self._shared:
            return
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        with socket.socket(family) as probe, self._refusing():
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((self._host.strip("[]"), self.port))

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"--metrics {self._host}:{self.port} cannot be used: {error.strerror or error}"
            ) from None

    @contextlib.contextmanager
    def serving(
        self, ready: Ready = tuple, caller_check: CallerCheck | None = None
    ) -> Iterator[None]:
        """Listen during the block.

        Args:
            ready: answers `/readyz`.
            caller_check: knows callers; needed unless the host is loopback and the port its own.

        Raises:
            UserError: the address is in use.
        """
        check = None if self.is_open else caller_check
        assert check is not None or self.is_open
        address = (self._host.strip("[]"), self.port)
        server: _Server
        if self._shared:
            server = self._server = _SharedServer(address, self.metrics, ready, check)
        else:
            with self._refusing():
                server = _Server(address, self.metrics, ready, check)
            self.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._server = None
            server.shutdown()
            thread.join()
            server.server_close()


@dataclasses.dataclass(frozen=True)
class _MetricsCaller:
    """A connection that has one of the places."""

    connection: socket.socket
    network: str
    since: float
    """When it began."""

    @property
    def is_idle(self) -> bool:
        """See `Placed`."""
        return time.monotonic() - self.since > _IDLE_SECONDS

    @property
    def dispensable(self) -> tuple[bool, float]:
        """The oldest one is needed least."""
        return self.is_idle, -self.since

    def cut(self) -> None:
        """End the connection, whose thread then ends, too."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class _Server(ThreadingHTTPServer):
    """Bounds connections, and makes the TLS handshake in the connection's thread."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(
        self, address: tuple[str, int], metrics: RunMetrics, ready: Ready, check: CallerCheck | None
    ) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self.metrics = metrics
        self.ready = ready
        self.check = check
        self._refused = ("", 0.0)
        """Why the last caller was refused, and when that was logged."""
        self._open: dict[socket.socket, _MetricsCaller] = {}
        super().__init__(address, BaseHTTPRequestHandler)

    def server_bind(self) -> None:
        """Bind without the name lookup of the base class."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name = "isthmus"
        self.server_port = self.server_address[1]

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is room for the connection, for which another one may have to go."""
        network = self.network_of(client_address)
        placed = list(self._open.values())
        if len(placed) >= CONNECTIONS:
            leaving = least_needed(network, placed)
            if leaving is None:
                return False
            self._open.pop(leaving.connection, None)
            leaving.cut()
        self._open[request] = _MetricsCaller(request, network, time.monotonic())
        return True

    def network_of(self, client_address: Any) -> str:
        """The address of a caller, see `isthmus_server.transport.places.network_of`."""
        return network_of(client_address[0])

    def service_actions(self) -> None:
        """Cut connections that have lasted too long."""
        now = time.monotonic()
        for place in list(self._open.values()):
            if now - place.since > CONNECTION_SECONDS:
                place.cut()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer, behind TLS if callers must be known."""
        request.settimeout(CONNECTION_SECONDS)
        if self.check is None:
            _Handler(request, client_address, self)
            return
        context = self.check.context()
        secured = context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        place = self._open.pop(request, None)  # which has no connection any more
        try:
            if place is None:  # another caller has it
                return
            self._open[secured] = dataclasses.replace(place, connection=secured)
            secured.do_handshake()
            certificate = x509.load_der_x509_certificate(secured.getpeercert(True) or b"")
            self.check.check(certificate)
            _Handler(secured, client_address, self)
        except (AdmissionRefused, LoopNotAnswering, ValueError) as error:
            self._warn(in_a_line(str(error)))
        finally:
            self.shutdown_request(secured)

    def _warn(self, reason: str) -> None:
        """Log why a caller was refused, but not for each try of the same one."""
        last, at = self._refused
        now = time.monotonic()
        if reason != last or now - at > _REFUSED_SECONDS:
            self._refused = (reason, now)
            log.warning("a caller was refused metrics: %s", reason)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error; a caller that breaks off is none."""
        level = logging.DEBUG if isinstance(sys.exc_info()[1], OSError) else logging.ERROR
        log.log(level, "a request for metrics failed", exc_info=True)


class _SharedServer(_Server):
    """Serves connections that a server's one port has accepted.

    `serve_forever` waits for a byte, which says that there is one.
    """

    def server_bind(self) -> None:
        """Listen nowhere."""
        self._given: SimpleQueue[tuple[socket.socket, str]] = SimpleQueue()
        self.socket.close()
        self.socket, self._bell = socket.socketpair()
        self._bell.setblocking(False)
        self.server_name = "isthmus"
        self.server_port = self.server_address[1]

    def server_activate(self) -> None:
        """Listen nowhere: connections come by `take`."""

    def take(self, connection: socket.socket, network: str) -> None:
        """Serve a connection, unless too many wait."""
        if self._given.qsize() >= CONNECTIONS:
            connection.close()
            return
        self._given.put((connection, network))
        self._bell.send(b"!")

    def get_request(self) -> tuple[socket.socket, Any]:
        """The next connection, and its caller's address."""
        self.socket.recv(1)
        return self._given.get_nowait()

    def network_of(self, client_address: Any) -> str:
        """What `take` was told."""
        return str(client_address)

    def server_close(self) -> None:
        """Close what waits, too."""
        super().server_close()
        self._bell.close()
        while not self._given.empty():
            self._given.get_nowait()[0].close()


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: _Server
    server_version = "isthmus"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer with a page."""
        if self.server.check is None and not self._is_named_locally():
            self._answer(403, "use the address 127.0.0.1 or the name localhost\n")
        elif self.path == "/metrics":
            self._answer(200, self.server.metrics.text(), TEXT)
        elif self.path == "/healthz":
            self._answer(200, "ok\n")
        elif self.path == "/readyz":
            problems = [in_a_line(problem) for problem in self.server.ready()]
            self._answer(503 if problems else 200, "\n".join(problems or ["ready"]) + "\n")
        else:
            self._answer(404, "there are /metrics, /healthz and /readyz\n")

    do_HEAD = do_GET  # noqa: N815 - of http.server

    def _is_named_locally(self) -> bool:
        """Whether the caller named a loopback address: a web page elsewhere names its own host."""
        host = self.headers.get("Host", "localhost")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        return tls.is_loopback(name)

    def _answer(
        self, code: int, text: str | bytes, kind: str = "text/plain; charset=utf-8"
    ) -> None:
        body = text.encode() if isinstance(text, str) else text
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - of http.server
        """Log nothing: a scraper comes every few seconds."""
