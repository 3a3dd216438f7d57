"""An HTTP proxy that tunnels connections (CONNECT), with the faults that real ones have.

    async with ConnectProxy({"hub.example.org": "127.0.0.1"}) as proxy:
        proxy.login = "device:secret"

Faults are attributes, which are looked up for each connection.
"""

import asyncio
import base64
import contextlib
import datetime
import ssl
import tempfile

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import NameOID

from isthmus.identity import tls

INSPECTOR = "Hospital Web Inspection CA"


class ConnectProxy:
    """A proxy on loopback that knows where some names are, and connects to no others."""

    def __init__(self, names):
        self.names = names
        self.login = ""
        """USER:PASSWORD that it asks for; empty for none."""
        self.schemes = ["Basic"]
        """The kinds of login that it offers."""
        self.status = "200 Connection established"
        """The answer to a request; no other one tunnels."""
        self.raw_answer = None
        """Bytes that it sends instead of any answer, before it closes."""
        self.inspects = False
        """Whether it ends TLS itself, with a certificate of its own authority."""
        self.is_malformed = False
        """Whether the issuer of that certificate has bytes that are no text."""
        self.carries = None
        """Bytes towards the client after which it dies, once; None for any number."""
        self.largest = 1 << 16
        """Bytes of the largest part that it passes on to the server; larger ones are lost."""
        self.lost = 0
        self.requests = []
        """The heads of all requests, as text."""
        self.deaths = 0
        self.port = 0
        self._tunnels = set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        self.break_tunnels()
        await asyncio.gather(*self._tunnels, return_exceptions=True)

    def break_tunnels(self):
        """End all open connections."""
        for tunnel in self._tunnels:
            tunnel.cancel()

    async def _accept(self, reader, writer):
        task = asyncio.current_task()
        self._tunnels.add(task)
        task.add_done_callback(self._tunnels.discard)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await self._serve(reader, writer)
        writer.transport.abort()

    async def _serve(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.requests.append(head)
        if self.raw_answer is not None:
            writer.write(self.raw_answer)
            await writer.drain()
            return
        status = self._status(head)
        offers = [f"Proxy-Authenticate: {scheme} realm=x" for scheme in self.schemes]
        lines = [f"HTTP/1.1 {status}", *(offers if status.startswith("407") else ())]
        host, _, port = head.split()[1].rpartition(":")
        if not status.startswith("2"):
            writer.write("\r\n".join([*lines, "", ""]).encode())
            await writer.drain()
            return
        if self.inspects:
            writer.write("\r\n".join([*lines, "", ""]).encode())
            await writer.start_tls(inspecting(host.strip("[]"), self.is_malformed))
            await reader.read()
            return
        server_reader, server_writer = await asyncio.open_connection(self.names[host], int(port))
        writer.write("\r\n".join([*lines, "", ""]).encode())
        try:
            ends = [
                asyncio.create_task(self._carry(reader, server_writer)),
                asyncio.create_task(self._carry(server_reader, writer, towards_client=True)),
            ]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for end in ends:
                    end.cancel()
                await asyncio.gather(*ends, return_exceptions=True)
        finally:
            server_writer.transport.abort()

    def _status(self, head):
        if self.login:
            expected = f"Basic {base64.b64encode(self.login.encode()).decode()}\r\n"
            if f"Proxy-Authorization: {expected}" not in head:
                return "407 Proxy Authentication Required"
        if not head.startswith("CONNECT "):
            return "405 Method Not Allowed"
        if head.split()[1].rpartition(":")[0] not in self.names:
            return "503 Service Unavailable"
        return self.status

    async def _carry(self, source, target, towards_client=False):
        while data := await source.read(1 << 16):
            if towards_client and self.carries is not None:
                self.carries -= len(data)
                if self.carries < 0:
                    self.carries = None
                    self.deaths += 1
                    return
            if not towards_client and len(data) > self.largest:
                self.lost += 1
                continue
            target.write(data)
            await target.drain()


def inspecting(host, is_malformed=False):
    """The TLS of a proxy that reads along: a certificate for the host, of its own authority."""
    authority_key = tls.new_key()
    key = tls.new_key()
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, INSPECTOR)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    data = certificate.public_bytes(serialization.Encoding.DER)
    if is_malformed:  # an IA5String has ASCII only; OpenSSL does not look
        name = INSPECTOR.encode()
        data = data.replace(
            bytes([0x0C, len(name)]) + name, bytes([0x16, len(name)]) + b"\xff" * len(name)
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["h2"])
    with tempfile.NamedTemporaryFile() as file:
        file.write(tls.key_pem(key) + ssl.DER_cert_to_PEM_cert(data).encode())
        file.flush()
        context.load_cert_chain(file.name)
    return context
