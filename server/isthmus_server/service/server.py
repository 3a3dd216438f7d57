"""A running server on a network: the link, the join service, revocation and renewal."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from isthmus.identity import tls
from isthmus.system.file_lock import file_lock
from isthmus_server.fleet.authority import CertificateAuthority, is_separate
from isthmus_server.fleet.joining import JoinService
from isthmus_server.fleet.members import Members
from isthmus_server.fleet.remote_authority import RemoteMembers
from isthmus_server.mirror.mirrored_blobs import MirroredBlobs
from isthmus_server.mirror.stored_updates import StoredUpdates
from isthmus_server.transport.balancer_port import MORE_FILES, BalancerPort, Network
from isthmus_server.transport.check_ins import CheckIns
from isthmus_server.transport.limits import Services
from isthmus_server.transport.link import CONNECTIONS, Link
from isthmus_server.transport.one_port import OnePort

LEASE_SECONDS = 10.0
"""Time without a message after which a participant is removed."""

MOST_CONNECTED = CONNECTIONS * 9 // 10
"""Devices that are connected while a job waits for more; the rest of the connections is for those
that come and are sent away."""

_REVOCATION_SECONDS = 0.2
"""Interval of checks for revocations that another process wrote."""

_RENEWAL_SECONDS = 10.0
"""Interval of checks of the server's own certificate. It is short in order to notice that the clock
was set."""

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class BalancerListener:
    """Where balancers that end TLS forward to."""

    host: str
    port: int
    trusted: tuple[Network, ...] = ()
    """Networks of balancers whose `X-Forwarded-For` counts."""


class ControlPlaneServer:
    """Runs the link, the join service, revocation and certificate renewal of a server.

    Without the join service if the authority is another process.

    Guarantees:
      * every participant on the link has a certificate of this authority that is in the registry;
      * a join or a revocation does not affect other participants;
      * its own certificate is renewed in time: new connections use the new one, and open
        connections continue.
    """

    def __init__(
        self,
        directory: Path,
        *,
        lease_seconds: float = LEASE_SECONDS,
        authority: CertificateAuthority | None = None,
        locked: bool = False,
        connected: int | None = None,
        mirror: MirroredBlobs | None = None,
        uploads: StoredUpdates | None = None,
    ) -> None:
        """Use the state directory that `authority.initialise` created.

        Args:
            directory: the state directory.
            lease_seconds: time without a message after which a participant is removed.
            authority: in place of that in the directory.
            locked: this process has the lock of the directory already.
            connected: devices that stay connected; None for all.
            mirror: where devices may fetch blobs besides the link; None for nowhere.
            uploads: where devices may put updates besides the link; None for nowhere.

        Raises:
            UserError: it contains no server.
        """
        self._locked = locked
        self.joining: JoinService | None = None
        self.members: Members
        if authority is None and is_separate(directory):
            self.members = RemoteMembers(directory)
        else:
            self.members = Members(directory, authority or CertificateAuthority(directory))
            self.joining = JoinService(self.members)
        self.link = Link(lease_seconds, self.members)
        if connected is not None:
            self.link.check_ins = CheckIns(connected, MOST_CONNECTED)
        self.link.mirror = mirror
        self.link.uploads = uploads
        self.one_port: OnePort | None = None
        """What accepts the connections of all, if there is one port for everything."""
        self._fair_link: OnePort | None = None
        """What accepts the connections of the link, if it has a port of its own that is fair."""
        self.balancer: BalancerPort | None = None
        """What accepts the connections of balancers, if there are any."""
        self._balancer_at = ("", 0)
        self.link_port = 0
        self.join_port = 0
        self.balancer_port = 0
        self.pair = (b"", b"")
        """Key and certificate (PEM) for new connections."""

    @asynccontextmanager
    async def listening(
        self,
        host: str,
        port: int,
        services: Services | None = None,
        *,
        one_port: bool = False,
        fair_link: bool = False,
        balancer: BalancerListener | None = None,
    ) -> AsyncIterator[None]:
        """Listen: the link at `port`, joining at the next one (0: any free ports).

        Args:
            host: where to listen.
            port: of the link.
            services: further gRPC services on the port of the link.
            one_port: joining is at the port of the link, too.
            fair_link: connections of the link are shared out among addresses, and passed on, at two
                ports as well.
            balancer: where balancers that end TLS forward to; only with one port.

        Raises:
            UserError: a port is in use.
        """
        _allow_many_files()
        directory = self.members.directory
        lock: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if not self._locked:
            lock = file_lock(directory / "lock", f"another server runs from {directory}")
        with lock:
            self.one_port = OnePort() if one_port else None
            self._fair_link = OnePort() if fair_link and not one_port else None
            if self.one_port is not None and balancer is not None:
                self.balancer = BalancerPort(self.one_port, balancer.trusted)
                self._balancer_at = (balancer.host, balancer.port)
            async with self._stores(), self._open(host, port, services or {}):
                yield

    @asynccontextmanager
    async def _stores(self) -> AsyncIterator[None]:
        """Have the mirror and the store of updates during the block, if there are any."""
        # Of the authority, as what is restored from a backup, or a standby, is the same server.
        owner = tls.fingerprint(self.members.authority_certificate).hex()
        async with contextlib.AsyncExitStack() as stack:
            for each in (self.link.mirror, self.link.uploads):
                if each is not None:
                    await stack.enter_async_context(each.running(owner))
            yield

    @asynccontextmanager
    async def _open(self, host: str, port: int, services: Services) -> AsyncIterator[None]:
        await self.members.first_copy()
        self.pair = self.members.server_pair()
        tasks: list[asyncio.Task[None]] = []
        try:
            if self.one_port is None:
                await self._start_two(host, port, services)
            else:
                await self._start_one(self.one_port, host, port, services)
            works = (self._disconnect_revoked(), self._renew(), self.members.follow())
            tasks = [asyncio.create_task(work) for work in works]
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for front in (self.one_port, self._fair_link):
                if front is not None:
                    await front.stop()
            if self.joining is not None:
                await self.joining.stop()
            await self.link.stop()
            if self.balancer is not None:  # through which participants were told of the end
                await self.balancer.stop()
            self.members.close()

    async def _start_two(self, host: str, port: int, services: Services) -> None:
        known = self._credentials(known=True)
        if self._fair_link is None:
            self.link_port = await self.link.start(host, port, known, services)
        else:
            self._fair_link.link = await self.link.start_behind(known, services)
            self.link_port = await self._fair_link.start(host, port)
        if self.joining is not None:
            self.join_port = await self.joining.start(
                host,
                port + 1 if port else 0,
                self._credentials(known=False),
                link_port=self.link_port,
            )

    async def _start_one(self, one: OnePort, host: str, port: int, services: Services) -> None:
        more_files = MORE_FILES if self.balancer is not None else 0
        known = self._credentials(known=True)
        one.link = await self.link.start_behind(known, services, more_files)
        if self.joining is not None:
            one.joining = await self.joining.start_behind(self._credentials(known=False))
        self.link_port = await one.start(host, port)
        self.join_port = self.link_port if self.joining is not None else 0
        if self.balancer is not None:
            self.balancer_port = await self.balancer.start(*self._balancer_at)

    async def _disconnect_revoked(self) -> None:
        while True:
            try:
                self.members.disconnect_revoked(self.link)
            except Exception:
                log.exception("the check for revoked participants failed")
            await asyncio.sleep(_REVOCATION_SECONDS)

    async def _renew(self) -> None:
        """Renew the server's own certificate in time, without a restart."""
        while True:
            await asyncio.sleep(_RENEWAL_SECONDS)
            try:
                pair = await asyncio.to_thread(self.members.server_pair)
            except Exception:
                log.exception("the server's own certificate could not be renewed")
                continue
            if pair != self.pair:
                self.pair = pair
                log.info("the server has a new certificate")

    def _credentials(self, *, known: bool) -> grpc.ServerCredentials:
        """TLS with the current certificate at each handshake; `known` callers must present one."""
        roots = tls.pem(self.members.authority_certificate) if known else None
        presented = self.pair

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal presented
            if presented is self.pair:
                return None  # unchanged
            presented = self.pair
            return grpc.ssl_server_certificate_configuration([presented], root_certificates=roots)

        first = grpc.ssl_server_certificate_configuration([presented], root_certificates=roots)
        return grpc.dynamic_ssl_server_credentials(
            first, fetch, require_client_authentication=known
        )


def _allow_many_files() -> None:
    """Raise the limit on open files, because every participant needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
