"""A web server over HTTPS for the folder of the server's mirror, from which devices get models."""

from __future__ import annotations

import http.server
import ssl
import threading
from functools import partial
from pathlib import Path


class _QuietFiles(http.server.SimpleHTTPRequestHandler):
    server: _MirrorServer
    protocol_version = "HTTP/1.1"
    timeout = 30.0

    def log_message(self, *args: object) -> None:
        """Nothing: a cut connection is what is tried here."""

    def log_request(self, code: object = "-", size: object = "-") -> None:
        if self.command == "GET" and code == http.HTTPStatus.OK:
            self.server.sent += 1


class _MirrorServer(http.server.ThreadingHTTPServer):
    daemon_threads = True
    sent = 0

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing, as above."""


class MirrorWeb:
    """Serves a folder on a free port of loopback until it is closed."""

    def __init__(self, folder: Path, certificate: Path) -> None:
        """`certificate` is a file (PEM) with the server's private key and certificate."""
        self._server = _MirrorServer(("127.0.0.1", 0), partial(_QuietFiles, directory=str(folder)))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        # The handshake is made by a connection's thread: one that hangs holds up no other.
        self._server.socket = context.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )
        self.port = int(self._server.server_address[1])
        """Where it listens."""
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def sent(self) -> int:
        """Files that it has begun to send."""
        return self._server.sent

    def close(self) -> None:
        """Accept no further connections."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
