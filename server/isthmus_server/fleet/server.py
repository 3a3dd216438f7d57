"""A server that others can reach, running: the link, the joins, and who may stay."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import resource
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from isthmus import tls
from isthmus.errors import UserError
from isthmus_server.fleet.authority import Authority
from isthmus_server.fleet.joining import JoinService
from isthmus_server.fleet.members import Members
from isthmus_server.link import Link

LEASE_SECONDS = 10.0
"""Silence after which a participant counts as gone."""

_WATCH_SECONDS = 0.2
"""How soon a revocation that another process wrote cuts a live stream."""

_CERTIFICATE_SECONDS = 3600.0
"""Between two looks at whether the server's own certificate ends soon."""

log = logging.getLogger(__name__)


class FleetServer:
    """Everything of a server but its jobs.

    Guarantees:
      * nobody is on the link without a certificate of this authority that is in the registry;
      * who joins, or is revoked, changes nothing for the others.
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

    @asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[None]:
        """Be reachable: the link at `port`, joining at the one after it (0: any free ones).

        Raises:
            UserError: a port is in use.
        """
        _allow_many_files()
        lock = _locked(self.members.directory)
        watching: asyncio.Task[None] | None = None
        try:
            self.link_port = await self.link.start(host, port, self._credentials(known=True))
            self.joining.link_port = self.link_port
            self.join_port = await self.joining.start(
                host, port + 1 if port else 0, self._credentials(known=False)
            )
            watching = asyncio.create_task(self._watch())
            yield
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            await self.joining.stop()
            await self.link.stop()
            self.members.close()
            os.close(lock)

    async def _watch(self) -> None:
        while True:
            try:
                self.members.watch(self.link)
            except Exception:
                log.exception("could not look whether somebody was revoked")
            await asyncio.sleep(_WATCH_SECONDS)

    def _credentials(self, *, known: bool) -> grpc.ServerCredentials:
        """The server's certificate, renewed while it runs; `known` callers must show theirs."""
        roots = tls.pem(self.members.certifier.certificate) if known else None
        looked = time.monotonic()

        def current() -> grpc.ServerCertificateConfiguration:
            pair = self.members.certifier.server_pair()
            return grpc.ssl_server_certificate_configuration([pair], root_certificates=roots)

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal looked
            if time.monotonic() - looked < _CERTIFICATE_SECONDS:
                return None
            looked = time.monotonic()
            return current()

        return grpc.dynamic_ssl_server_credentials(
            current(), fetch, require_client_authentication=known
        )


def _locked(directory: Path) -> int:
    """Be the only server of a state directory; returns the open file that says so.

    Raises:
        UserError: another one runs.
    """
    handle = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UserError(f"another server runs from {directory}") from None
    return handle


def _allow_many_files() -> None:
    """Every participant is an open file: take as many as this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
