"""A running aggregator: a listener for devices, and one stream to the server."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

import grpc

from isthmus.errors import AdmissionRefused, UserError
from isthmus.identity import tls
from isthmus.identity.membership import Membership
from isthmus.identity.proxies import OtherFleet, ProxyChoice, RoadBlocked
from isthmus.transport.blobs import Piece
from isthmus.transport.stream import Stream
from isthmus.transport.uplink import Uplink
from isthmus.wire import link_pb2
from isthmus_server.aggregator.blobs import KeptBlobs
from isthmus_server.aggregator.devices import Devices
from isthmus_server.aggregator.sums import VectorSums
from isthmus_server.transport.limits import (
    IDLE_SECONDS,
    MAX_MESSAGE_BYTES,
    listen,
    server_options,
)
from isthmus_server.transport.link import CONNECTIONS

WRAPPING_BYTES = 64
"""Most bytes by which a device's message grows when it is passed to the server, which reads no
larger message than the devices of its own may send."""
LEASE_SECONDS = 10.0
"""Time without a message after which the stream of a device is ended, as at the server."""


class ServerLink(Uplink):
    """The aggregator's stream to the server, on which the channels of its devices are too."""

    def __init__(self, address: str, member: Membership, sums: VectorSums) -> None:
        """`sums` does what the server asks for."""
        super().__init__(
            address,
            member.name,
            link_pb2.AGGREGATOR,
            sums,
            membership=member,
            wanted=lambda request: None,
            on_welcome=self._greeted,
            proxy=ProxyChoice(),
            stays=True,
        )
        self.devices: Devices
        self.linked = asyncio.Event()
        """Set for good when the server has admitted this aggregator."""
        self._sums = sums
        self._server = ""

    @property
    def is_linked(self) -> bool:
        """Whether there is a stream."""
        return self._stream is not None

    async def tell(self, message: link_pb2.Envelope) -> None:
        """Send a message of a device's stream, if there is a stream to the server."""
        if self._stream is not None:
            await self._stream.send_quietly(message)

    def _greeted(self, welcome: link_pb2.Welcome) -> None:
        if welcome.is_new or welcome.instance != self._server:
            self._sums.forget()
        self._server = welcome.instance
        self.linked.set()

    def _found(self, blocked: RoadBlocked) -> None:
        """End an aggregator that was set up for another server.

        One that has been linked goes on, because its server will be at this address again.

        Raises:
            AdmissionRefused: the server there is of another fleet.
        """
        if isinstance(blocked, OtherFleet) and not self.linked.is_set():
            raise AdmissionRefused(f"the aggregator {self.name!r} cannot be used here: {blocked}")

    async def _serve_one_stream(self) -> None:
        try:
            await super()._serve_one_stream()
        finally:
            self.devices.end_all()

    async def _take(self, stream: Stream, message: link_pb2.Envelope | Piece) -> None:
        if isinstance(message, link_pb2.Envelope) and (
            message.HasField("through") or message.HasField("hang_up")
        ):
            self.devices.take(message)
            return
        await super()._take(stream, message)


class AggregatorProcess:
    """Serves devices for a server.

    Guarantees:
      * a device is served only if the fleet's authority has signed its certificate and the server
        admits it;
      * of what devices send it keeps nothing on disk under a name.
    """

    def __init__(self, member: Membership, folder: Path | None = None) -> None:
        """Use the membership that `join` saved.

        Models and vectors are in `folder` while they move, in files without names that a killed
        process leaves no trace of; by default in the temporary folder.

        Raises:
            UserError: it is not an aggregator's.
        """
        if member.kind != tls.AGGREGATOR:
            raise UserError(f"{member.directory} is the membership of a {member.kind}")
        self.member = member
        self.folder = folder
        self.port = 0
        self.devices: Devices
        """Devices with a stream here, while it runs."""

    async def run(
        self, host: str, port: int, *, server: str = "", ready: Callable[[], object] = lambda: None
    ) -> None:
        """Serve devices at an address until cancelled.

        Args:
            host: where to listen.
            port: likewise; 0 for any, which `port` then has.
            server: address of the server's link, if it is not the one that was joined.
            ready: is called when devices can connect.

        Raises:
            UserError: it cannot listen there.
            AdmissionRefused: the server refuses this aggregator, now or later.
        """
        directory = self.folder or Path(tempfile.gettempdir())
        sums = VectorSums(directory, lambda *asked: devices.fetch(*asked))
        link = ServerLink(server or self.member.server, self.member, sums)
        devices = self.devices = link.devices = Devices(link, LEASE_SECONDS)
        blobs = devices.blobs = KeptBlobs(directory, link.piece, devices.arrived)
        running = asyncio.create_task(link.run())
        listener: grpc.aio.Server | None = None
        try:
            linked = asyncio.create_task(link.linked.wait())
            await asyncio.wait((running, linked), return_when=asyncio.FIRST_COMPLETED)
            linked.cancel()
            if not running.done():
                listener, self.port = await self._listen(devices, host, port)
                ready()
            await running
        finally:
            if listener is not None:
                await listener.stop(grace=0.2)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            blobs.close()
            sums.forget()

    async def _listen(self, devices: Devices, host: str, port: int) -> tuple[grpc.aio.Server, int]:
        handler = grpc.stream_stream_rpc_method_handler(devices.connect)
        return await listen(
            {"isthmus.link.v1.Link": {"Connect": handler}},
            f"{host}:{port}",
            self._credentials(),
            server_options(CONNECTIONS, MAX_MESSAGE_BYTES - WRAPPING_BYTES, IDLE_SECONDS),
            calls=CONNECTIONS,
        )

    def _credentials(self) -> grpc.ServerCredentials:
        """TLS with this aggregator's certificate as it is then; callers must present one."""
        roots = tls.pem(self.member.authority)
        presented = self.member.certificate

        def configuration() -> grpc.ServerCertificateConfiguration:
            pair = (tls.key_pem(self.member.key), tls.pem(presented))
            return grpc.ssl_server_certificate_configuration([pair], root_certificates=roots)

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal presented
            if presented is self.member.certificate:
                return None
            presented = self.member.certificate
            return configuration()

        return grpc.dynamic_ssl_server_credentials(
            configuration(), fetch, require_client_authentication=True
        )
