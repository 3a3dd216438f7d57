"""A web server over HTTPS, as mirrors and stores are, on a port of loopback: ranges, and PUTs."""

from __future__ import annotations

import datetime
import http.server
import ipaddress
import re
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


class StaticHttps:
    """What is served, how, and what was asked for."""

    def __init__(self, folder: Path, certificate: Path) -> None:
        self.folder = folder
        self.certificate = certificate
        """Of the server, which clients have to trust (`SSL_CERT_FILE`)."""
        self.port = 0
        self.asked: list[tuple[str, str | None]] = []
        """Path and range of each request."""
        self.headers: list[dict[str, str]] = []
        """All headers of each request."""
        self.sends: int | None = None
        """Bytes after which each answer is cut off; None for all of them."""
        self.gate: threading.Event | None = None
        """What answers wait for after `sends` bytes, instead of being cut off."""
        self.sent = threading.Event()
        """An answer has reached `sends`."""
        self.slow: float | None = None
        """Seconds between two bytes after `sends`, instead of being cut off."""
        self.drips_answers = False
        """Whether no answer has an end: its first line comes a byte at a time, `slow` apart."""
        self.drips_chunks = False
        """Whether it is the line before the first chunk that comes so."""
        self.forgets_next = False
        """Whether the next request on a connection that had one before is never answered."""
        self.closing = threading.Event()
        """The server ends."""
        self.lies = False
        """Whether zeros are sent in place of what is there."""
        self.has_ranges = True
        """Whether parts of a file can be asked for; else all of it is sent."""
        self.redirect = ""
        """Where to send clients instead."""
        self.redirects_at_length = False
        """Whether 256 MB come with each."""
        self.redirect_bytes = 0
        """What was sent with it."""
        self.put: list[tuple[str, str | None]] = []
        """Path and length of each file that was to be put."""
        self.takes: list[int] = []
        """Bytes after which each of the next PUTs is cut off."""
        self.status = 0
        """What PUTs are answered in place of being done."""

    @property
    def address(self) -> str:
        """Of the folder."""
        return f"https://127.0.0.1:{self.port}/"


@contextmanager
def static_https(folder: Path, keys: Path) -> Iterator[StaticHttps]:
    """Serve a folder during the block; the certificate is written to `keys`."""
    certificate, key = new_certificate(keys)
    served = StaticHttps(folder, certificate)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        answered = 0

        def log_message(self, *_: Any) -> None:
            """Nothing."""

        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            served.asked.append((self.path, asked))
            served.headers.append(dict(self.headers))
            self.answered += 1
            if served.forgets_next and self.answered > 1:
                served.closing.wait(60)
                self.close_connection = True
                return
            if served.drips_answers:
                self.wfile.write(b"HTTP/1.1 200 ")
                if served.drips_chunks:
                    self.wfile.write(b"OK\r\nTransfer-Encoding: chunked\r\n\r\n40000;")
                while not served.closing.wait(served.slow):
                    self.wfile.write(b"O")
                return
            if served.redirect:
                self.send_response(302)
                self.send_header("Location", served.redirect)
                if served.redirects_at_length:
                    self.send_header("Connection", "close")
                    self.end_headers()
                    while served.redirect_bytes < 256 << 20:
                        served.redirect_bytes += self.wfile.write(bytes(1 << 20))
                    return
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            path = served.folder / self.path.partition("?")[0].lstrip("/")
            data = path.read_bytes() if path.is_file() else None
            if data is not None and served.lies:
                data = bytes(len(data))
            if not served.has_ranges:
                asked = None
            found = re.fullmatch(r"bytes=(\d+)-(\d*)", asked or "bytes=0-")
            assert found is not None
            begin = int(found[1])
            if data is None or begin >= len(data):
                self.send_response(404 if data is None else 416)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            end = min(int(found[2]) + 1, len(data)) if found[2] else len(data)
            self.send_response(206 if asked else 200)
            if asked:
                self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
            self.send_header("Content-Length", str(end - begin))
            self.end_headers()
            body = data[begin:end]
            if served.sends is None or len(body) <= served.sends:
                self.wfile.write(body)
                return
            self.wfile.write(body[: served.sends])
            self.wfile.flush()
            gate = served.gate
            rest = body[served.sends :]
            served.sent.set()
            if served.slow is not None:
                for byte in rest:
                    if served.closing.wait(served.slow):
                        return
                    self.wfile.write(bytes([byte]))
            elif gate is not None:
                gate.wait(60)
                self.wfile.write(rest)
            else:
                self.close_connection = True

        def do_PUT(self) -> None:
            length = int(self.headers.get("Content-Length", "0"))
            served.put.append((self.path, self.headers.get("Content-Length")))
            if served.takes:
                self.rfile.read(served.takes.pop(0))
                self.close_connection = True
                return
            if served.gate is not None:
                served.gate.wait(60)
            body = self.rfile.read(length)
            if not served.status:
                path = served.folder / self.path.partition("?")[0].lstrip("/")
                path.write_bytes(bytes(length) if served.lies else body)
            self.send_response(served.status or 200)
            if served.status == 307:
                self.send_header("Location", f"{served.address}{'0' * 64}")
            self.send_header("Content-Length", "0")
            self.end_headers()

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """Clients that end are a part of the tests."""

    server = Server(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    served.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield served
    finally:
        served.closing.set()
        if served.gate is not None:
            served.gate.set()
        server.shutdown()
        server.server_close()
        thread.join()


def new_certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate of 127.0.0.1 and its key into a folder; returns both paths."""
    folder.mkdir(exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    number = x509.random_serial_number()
    name = x509.Name(
        [
            x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1"),
            # So that who trusts several of them can tell them apart.
            x509.NameAttribute(x509.NameOID.SERIAL_NUMBER, f"{number:x}"),
        ]
    )
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(number)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "https.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "https.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return folder / "https.pem", folder / "https.key"
