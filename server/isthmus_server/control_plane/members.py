"""Who is let in on a server that others can reach: those who joined, under their own names."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from isthmus.errors import AdmissionRefused, UserError
from isthmus.identity import tls
from isthmus.wire import link_pb2
from isthmus_server.control_plane.authority import Authority
from isthmus_server.control_plane.registry import Registry
from isthmus_server.transport.enrolment import Enrolments
from isthmus_server.transport.link import Link

_T = TypeVar("_T")

log = logging.getLogger(__name__)


class Members(Enrolments):
    """The registry and the authority, as the link asks them.

    Guarantees:
      * a certificate is looked up with every new stream: that the authority signed it (TLS has
        checked) is not enough;
      * whatever writes, or signs, happens on one other thread, so that the link never waits.
    """

    def __init__(self, directory: Path, authority: Authority) -> None:
        super().__init__(authority.enroller)
        self.certifier = authority
        self.registry = Registry(directory)
        self.revoked.update(self.registry.revoked_identities())
        self._seen = self.registry.version
        self._clerk = ThreadPoolExecutor(1, thread_name_prefix="registry")
        self.directory = directory
        self._writing: Registry | None = None

    def close(self) -> None:
        """Let the registry go."""
        if self._writing is not None:
            self._clerk.submit(self._writing.close)
        self._clerk.shutdown()
        self.registry.close()

    def admit(self, hello: link_pb2.Hello, certificate: bytes | None) -> tls.Subject:
        """Check that a hello and the certificate of its connection are one participant's.

        Raises:
            AdmissionRefused: they are not, or it is not a participant now.
        """
        if certificate is None:
            raise AdmissionRefused("this server wants a certificate")
        subject = tls.subject_of(tls.read_certificate(certificate))
        role = link_pb2.Role.Name(hello.role).lower()
        if (role, hello.name) != (subject.kind, subject.name):
            raise AdmissionRefused(
                f"the certificate is of the {subject.kind} {subject.name!r}, and the hello says "
                f"{role} {hello.name!r}"
            )
        if hello.identity != subject.identity:
            raise AdmissionRefused(
                f"the identity key of {subject.name!r} is not the one it joined with"
            )
        self.registry.check(subject)
        return subject

    async def renew(self, subject: tls.Subject, request: bytes) -> tuple[bytes, tls.Subject]:
        """The participant's next certificate; see `Enrolments.renew`."""

        def write(registry: Registry) -> tuple[bytes, tls.Subject]:
            made = registry.renew(
                subject,
                lambda name: self.certifier.issue(
                    request, kind=subject.kind, name=name, identity=subject.identity
                ),
            )
            return made, tls.subject_of(tls.read_certificate(made))

        return await self.write(write)

    async def write(self, change: Callable[[Registry], _T]) -> _T:
        """Run a change of the registry on the thread that is for it.

        Raises:
            AdmissionRefused: `change` said so, or the registry cannot be written.
        """

        def run() -> _T:
            try:
                if self._writing is None:
                    self._writing = Registry(self.directory)
                return change(self._writing)
            except (sqlite3.Error, UserError) as error:
                log.error("the registry in %s cannot be written: %s", self.directory, error)
                raise AdmissionRefused(
                    "the server cannot write its registry now; its log says why"
                ) from error

        return await asyncio.get_running_loop().run_in_executor(self._clerk, run)

    def watch(self, link: Link) -> None:
        """Cut whoever has been revoked, or let a certificate run out; cheap when nothing happened.

        Call it often: this is how soon a revocation takes effect.
        """
        now = time.time()
        version = self.registry.version
        changed = version != self._seen
        if changed:
            self.revoked.update(self.registry.revoked_identities())
        for peer in list(link.peers.values()):
            subject = peer.subject
            if subject is None or not (changed or now > subject.not_after):
                continue
            try:
                self.registry.check(subject)
            except AdmissionRefused as error:
                link.disconnect(peer.name, str(error))
        self._seen = version  # not before: what failed is looked at again
