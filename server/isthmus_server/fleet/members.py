"""Admit participants that have joined, by their certificates and the registry."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from cryptography import x509

from isthmus.errors import AdmissionRefused, UserError
from isthmus.identity import tls
from isthmus.job.promises import Deployment
from isthmus.wire import link_pb2
from isthmus_server.fleet.authority import CertificateAuthority
from isthmus_server.fleet.registry import ParticipantList, Registry
from isthmus_server.fleet.registry_file import refuse_lost_revocations
from isthmus_server.transport.enrolment import Enrolments
from isthmus_server.transport.limits import Refusal
from isthmus_server.transport.link import Link

_T = TypeVar("_T")

_COUNT_SECONDS = 10.0
"""Interval in which the enrolled devices are counted."""

_COUNT_SHARE = 0.01
"""Most of the time that counting may take: of a million devices it takes seconds."""

log = logging.getLogger(__name__)


class Members(Enrolments):
    """Admission by the registry and the certificate authority.

    Guarantees:
      * a certificate is checked in the registry with every new stream; a signature of the
        authority, which TLS verifies, is not enough;
      * writes and signatures happen on a writer thread, so that the event loop never waits.
    """

    requires_tickets = True

    certified = True
    deployment: Deployment = "one"

    _devices = 1
    """Devices as they were counted last."""
    _count_at = 0.0
    """Monotonic time from which on they are counted anew."""

    def __init__(self, directory: Path, authority: CertificateAuthority) -> None:
        super().__init__(authority.enroller, now=authority.now)
        self.certificate_authority = authority
        self.registry: ParticipantList = Registry(directory, now=self.now)
        try:
            refuse_lost_revocations(directory)
            self._note_revoked()
            self._checked_version = self.registry.version
        except BaseException:
            self.registry.close()
            raise
        self._writer_thread = ThreadPoolExecutor(1, thread_name_prefix="registry")
        self.directory = directory
        self._writer: Registry | None = None

    def close(self) -> None:
        """Close the registry."""
        if self._writer is not None:
            self._writer_thread.submit(self._writer.close)
        self._writer_thread.shutdown()
        self.registry.close()

    def clients(self) -> Iterator[str]:
        """Names of the devices that have joined and may connect."""
        return self.registry.clients()

    @property
    def authority_certificate(self) -> x509.Certificate:
        """The certificate that signed those of all participants."""
        return self.certificate_authority.certificate

    @property
    def authority_pem(self) -> bytes:
        """The authority's certificate as PEM."""
        return tls.pem(self.authority_certificate)

    def server_pair(self) -> tuple[bytes, bytes]:
        """The server's own key and certificate (PEM), renewed in time."""
        return self.certificate_authority.server_pair()

    async def first_copy(self) -> None:
        """The registry is here: there is nothing to copy."""

    async def follow(self) -> None:
        """The registry is here: there is nothing to follow."""

    async def admit(self, hello: link_pb2.Hello, certificate: bytes | None) -> tls.Subject:
        """Check that a hello and the certificate of its connection belong to one participant.

        Raises:
            AdmissionRefused: they do not, or it is not a participant any more.
        """
        if certificate is None:
            raise AdmissionRefused("this server requires a certificate")
        subject = tls.subject_of(tls.read_certificate(certificate))
        role = link_pb2.Role.Name(hello.role).lower()
        if (role, hello.name) != (subject.kind, subject.name):
            raise AdmissionRefused(
                f"the certificate belongs to the {subject.kind} {subject.name!r}, not to the "
                f"{role} {hello.name!r}"
            )
        if hello.identity != subject.identity:
            raise AdmissionRefused(
                f"the identity key of {subject.name!r} is not the one it joined with"
            )
        await self.check(subject)
        return subject

    async def check(self, subject: tls.Subject) -> None:
        """Check that the holder of a certificate is a participant now.

        Raises:
            AdmissionRefused: it is not.
        """
        self.registry.check(subject)

    def population(self) -> int:
        """Number of devices in the registry that are not revoked or expired."""
        # By a clock that is never set: after a time in the future nobody would be counted again.
        now = time.monotonic()
        if now >= self._count_at:  # counting takes longer than a connection should
            self._devices = self.registry.devices()
            took = time.monotonic() - now
            self._count_at = now + max(_COUNT_SECONDS, took / _COUNT_SHARE)
        return self._devices

    async def renew(self, subject: tls.Subject, request: bytes) -> tuple[bytes, tls.Subject]:
        """Issue a participant's next certificate; see `Enrolments.renew`."""

        def write(registry: Registry) -> tuple[bytes, tls.Subject]:
            certificate = registry.renew(
                subject,
                lambda name: self.certificate_authority.issue(
                    request, kind=subject.kind, name=name, identity=subject.identity
                ),
            )
            return certificate, tls.subject_of(tls.read_certificate(certificate))

        return await self.write(write)

    async def write(self, change: Callable[[Registry], _T]) -> _T:
        """Run a change of the registry on the writer thread.

        Raises:
            AdmissionRefused: `change` raised it, or the registry cannot be written.
        """

        def run() -> _T:
            try:
                if self._writer is None:
                    self._writer = Registry(self.directory, now=self.now)
                return change(self._writer)
            except (sqlite3.Error, UserError) as error:
                log.error("the registry in %s cannot be written: %s", self.directory, error)
                raise AdmissionRefused(
                    "the server cannot write its registry now; see its log"
                ) from error

        return await asyncio.get_running_loop().run_in_executor(self._writer_thread, run)

    def _note_revoked(self) -> None:
        self.revoked.update(self.registry.revoked_identities())
        self.revoked_names = self.registry.revoked_names()

    def disconnect_revoked(self, link: Link) -> None:
        """Disconnect participants that are revoked or whose certificate has expired.

        The latter may connect again, for it may be the clock of this server that is wrong.
        Cheap if nothing has changed. Call it often: a revocation takes effect with the next call.
        """
        now = self.now()
        version = self.registry.version
        changed = version != self._checked_version
        if changed:
            self._note_revoked()
        for peer in (*link.peers.values(), *link.aggregating.values()):
            subject = peer.subject
            if subject is None or not (changed or now > subject.not_after):
                continue
            try:
                self.registry.check(subject)
            except AdmissionRefused as error:
                link.disconnect(peer.name, *Refusal.of(error))
        self._checked_version = version  # last, so that a failed check is repeated
