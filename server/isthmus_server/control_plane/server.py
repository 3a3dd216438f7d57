"""A server that others can reach, running: the link, the joins, and who may stay."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from isthmus.identity import tls
from isthmus.system.file_lock import file_lock
from isthmus_server.control_plane.authority import Authority
from isthmus_server.control_plane.joining import JoinService
from isthmus_server.control_plane.members import Members
from isthmus_server.transport.link import Link, Services

LEASE_SECONDS = 10.0
"""Silence after which a participant counts as gone."""

_WATCH_SECONDS = 0.2
"""How soon a revocation that another process wrote cuts a live stream."""

_LOOKS = 100
"""At the server's own certificate, in its life: it is renewed when a third is left."""

log = logging.getLogger(__name__)


class ControlPlaneServer:
    """Everything of a server but its jobs.

    Guarantees:
      * nobody is on the link without a certificate of this authority that is in the registry;
      * who joins, or is revoked, changes nothing for the others;
      * its own certificate is renewed in time: new connections meet the new one, and those that
        are open stay.
    """

    def __init__(
        self,
        directory: Path,
        *,
        lease_seconds: float = LEASE_SECONDS,
        authority: Authority | None = None,
    ) -> None:
        """Use the state directory that `authority.initialise` made.

        Raises:
            UserError: it holds no server.
        """
        self.members = Members(directory, authority or Authority(directory))
        self.link = Link(lease_seconds, self.members)
        self.joining = JoinService(self.members)
        self.link_port = 0
        self.join_port = 0
        self._pair = (b"", b"")
        """Key and certificate that are shown to whoever connects now."""

    @asynccontextmanager
    async def listening(
        self, host: str, port: int, services: Services | None = None
    ) -> AsyncIterator[None]:
        """Listen: the link at `port`, joining at the next one (0: any free ports).

        `services` are further gRPC services on the port of the link.

        Raises:
            UserError: a port is in use.
        """
        _allow_many_files()
        directory = self.members.directory
        with file_lock(directory / "lock", f"another server runs from {directory}"):
            async with self._open(host, port, services or {}):
                yield

    @asynccontextmanager
    async def _open(self, host: str, port: int, services: Services) -> AsyncIterator[None]:
        self._pair = self.members.certifier.server_pair()
        tasks: list[asyncio.Task[None]] = []
        try:
            self.link_port = await self.link.start(
                host, port, self._credentials(known=True), services
            )
            self.joining.link_port = self.link_port
            self.join_port = await self.joining.start(
                host, port + 1 if port else 0, self._credentials(known=False)
            )
            tasks = [asyncio.create_task(work) for work in (self._watch(), self._renew())]
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.joining.stop()
            await self.link.stop()
            self.members.close()

    async def _watch(self) -> None:
        while True:
            try:
                self.members.watch(self.link)
            except Exception:
                log.exception("could not look whether somebody was revoked")
            await asyncio.sleep(_WATCH_SECONDS)

    async def _renew(self) -> None:
        """Have a certificate of our own that is good for a while, without a restart."""
        certifier = self.members.certifier
        while True:
            await asyncio.sleep(certifier.server_life.total_seconds() / _LOOKS)
            try:
                pair = await asyncio.to_thread(certifier.server_pair)
            except Exception:
                log.exception("the server's own certificate could not be renewed")
                continue
            if pair != self._pair:
                self._pair = pair
                log.info("the server has a new certificate")

    def _credentials(self, *, known: bool) -> grpc.ServerCredentials:
        """Our certificate as it is at each handshake; `known` callers must show theirs."""
        roots = tls.pem(self.members.certifier.certificate) if known else None
        shown = self._pair

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal shown
            if shown is self._pair:
                return None  # gRPC goes on with what it has
            shown = self._pair
            return grpc.ssl_server_certificate_configuration([shown], root_certificates=roots)

        first = grpc.ssl_server_certificate_configuration([shown], root_certificates=roots)
        return grpc.dynamic_ssl_server_credentials(
            first, fetch, require_client_authentication=known
        )


def _allow_many_files() -> None:
    """Every participant is an open file: take as many as this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
