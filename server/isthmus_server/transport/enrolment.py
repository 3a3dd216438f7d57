"""Admit participants, and sign the identities that secure aggregation relies on.

`Enrolments` is for runs on one machine, on loopback: every participant that connects is admitted
and enrolled by the server process. `isthmus_server.fleet.members` is for a server that can
be reached over a network.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from isthmus.errors import AdmissionRefused
from isthmus.identity.tls import Subject
from isthmus.job.promises import Deployment
from isthmus.wire import link_pb2
from isthmus_privacy.secagg.identity import Authority, Enrolment
from isthmus_server.transport.device_draws import DeviceDraws

log = logging.getLogger(__name__)

VALID_SECONDS = 10 * 365 * 24 * 3600
"""Validity of an enrolment for a run on this machine: longer than the run, whatever happens to the
clock. A server on a network signs identities only until the end of their certificates."""


class Enrolments:
    """Admits every participant, and enrols it under an authority of this process."""

    certified = False
    """Whether participants have certificates, so that they can be on other machines."""

    deployment: Deployment = "local"
    """Who runs the authority, see `isthmus.job.promises`."""

    simulated = False
    """Whether all participants are computed in this process, so that sums need no masks."""

    requires_tickets = False
    """Whether devices accept only cohorts that were selected by tickets."""

    def __init__(
        self, authority: Authority | None = None, *, now: Callable[[], float] = time.time
    ) -> None:
        """`authority` signs enrolments, None creates one; `now` returns Unix seconds."""
        self._authority = authority or Authority()
        self.now = now
        self.revoked: set[bytes] = set()
        """Identity keys that are no longer accepted; grows while the server runs."""
        self.revoked_names: set[str] = set()
        """Names of participants that are revoked, and have not joined again."""
        self.current: dict[str, Enrolment] = {}
        """The last enrolment of each participant, by name."""
        self.draws = DeviceDraws()
        """The draws in which devices were asked, by any job of this server."""

    @property
    def authority(self) -> bytes:
        """The authority's Ed25519 public key."""
        return self._authority.public

    @property
    def authority_pem(self) -> bytes | None:
        """The certificate (PEM) that signs those of participants; None if they have none."""
        return None

    def clients(self) -> Iterator[str]:
        """Names of the devices that have joined; none where every participant is admitted.

        Only as many are read as are taken.
        """
        return iter(())

    async def admit(self, hello: link_pb2.Hello, certificate: bytes | None) -> Subject | None:
        """Check that a participant may connect.

        Args:
            hello: its first message.
            certificate: its certificate (PEM), which TLS has verified; None without TLS.

        Returns the subject of the certificate; None without TLS.

        Raises:
            AdmissionRefused: it may not connect, with the reason.
        """
        return None

    def enrol(self, name: str, identity: bytes, not_after: float | None = None) -> bytes:
        """Sign that `name` has an identity key; returns the statement, empty without a key."""
        if len(identity) != 32:
            return b""
        now = self.now()
        end = int(now + VALID_SECONDS if not_after is None else not_after)
        enrolment = self._authority.enrol(
            name, identity, not_after=end, population=self.population(), now=now
        )
        self.current[name] = enrolment
        return enrolment.to_bytes()

    def population(self) -> int:
        """Number of enrolled devices."""
        return 1

    async def renewed(
        self, subject: Subject | None, request: bytes
    ) -> tuple[link_pb2.Renewed, Subject | None]:
        """Answer a participant's request for a new certificate.

        Returns the message, with a certificate or the reason why there is none, and the
        participant's subject from now on.
        """
        try:
            if subject is None:
                raise AdmissionRefused("this server issues no certificates")
            certificate, subject = await self.renew(subject, request)
        except AdmissionRefused as error:
            return link_pb2.Renewed(reason=str(error)), subject
        log.info("%s has a new certificate until %s", subject.name, time.ctime(subject.not_after))
        enrolment = self.enrol(subject.name, subject.identity, subject.not_after)
        return link_pb2.Renewed(certificate=certificate, enrolment=enrolment), subject

    async def renew(self, subject: Subject, request: bytes) -> tuple[bytes, Subject]:
        """Issue a participant's next certificate (PEM) for a signing request (DER).

        Raises:
            AdmissionRefused: it may not be renewed.
        """
        raise AdmissionRefused("this server issues no certificates")
