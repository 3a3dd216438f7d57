"""Who is let in, and who vouches for the identities that secure aggregation rests on.

`Enrolments` is for the embedded mode, on loopback: whoever dials in takes part, and the server
process enrols it. `isthmus_server.control_plane.members` is for a server that others can reach.
"""

from __future__ import annotations

import time

from isthmus.errors import AdmissionRefused
from isthmus.identity.tls import Subject
from isthmus.wire import link_pb2
from isthmus_privacy.secagg import Authority

VALID_SECONDS = 30 * 24 * 3600
"""An enrolment is renewed with every connection."""


class Enrolments:
    """Everybody is welcome, under an authority that lives as long as this process."""

    def __init__(self, authority: Authority | None = None) -> None:
        """`authority` signs enrolments; None makes one."""
        self._authority = authority or Authority()
        self.revoked: set[bytes] = set()
        """Identity keys that are not accepted any more; grows while the server runs."""

    @property
    def authority(self) -> bytes:
        """Its Ed25519 public key."""
        return self._authority.public

    def admit(self, hello: link_pb2.Hello, certificate: bytes | None) -> Subject | None:
        """Let a participant in, whose verified certificate (PEM) is given if TLS asked for one.

        Raises:
            AdmissionRefused: it may not come in, with the reason.
        """
        return None

    def enrol(self, name: str, identity: bytes, not_after: float | None = None) -> bytes:
        """The encoded statement that `name` has that identity key; empty for an empty key."""
        if len(identity) != 32:
            return b""
        end = int(time.time() + VALID_SECONDS if not_after is None else not_after)
        return self._authority.enrol(name, identity, not_after=end).to_bytes()

    async def renew(self, subject: Subject, request: bytes) -> tuple[bytes, Subject]:
        """The participant's next certificate (PEM) for a signing request (DER).

        Raises:
            AdmissionRefused: it gets none.
        """
        raise AdmissionRefused("nobody has certificates here")
