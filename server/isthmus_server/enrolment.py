"""Who vouches for the identities that secure aggregation rests on.

For now the server enrols whoever dials in, so it is trusted not to invent devices; see the threat
model in docs/threat-model.md.
"""

from __future__ import annotations

import time

from isthmus_privacy.secagg import Authority

VALID_SECONDS = 30 * 24 * 3600
"""An enrolment is renewed with every connection."""


class Enrolments:
    """The authority of one server process."""

    def __init__(self) -> None:
        self._authority = Authority()

    @property
    def authority(self) -> bytes:
        """Its Ed25519 public key."""
        return self._authority.public

    def enrol(self, name: str, identity: bytes) -> bytes:
        """The encoded statement that `name` has that identity key; empty for an empty key."""
        if len(identity) != 32:
            return b""
        not_after = int(time.time()) + VALID_SECONDS
        return self._authority.enrol(name, identity, not_after=not_after).to_bytes()
