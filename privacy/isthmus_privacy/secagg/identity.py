"""Enrolment: an authority signs each participant's identity key.

Secure aggregation needs names that the aggregation server cannot invent: a server that invents
clients or replaces their keys could attack every pair in the middle. So an *enrolment authority*
signs `name -> identity key` once, when a participant joins, and all parties verify the signature.
If the authority and the server are one party, that party is trusted not to invent clients.

>>> authority, key = Authority(), SigningKey()
>>> enrolment = authority.enrol("clinic-7", key.public, not_after=2_000_000_000)
>>> Directory(authority.public, now=lambda: 1_900_000_000).check(enrolment)
>>> Directory(authority.public, now=lambda: 2_000_000_001).check(enrolment)
Traceback (most recent call last):
    ...
isthmus.errors.PeerMisbehaved: the enrolment of 'clinic-7' ended at 2000000000
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Set

from isthmus_privacy.crypto import keys, refusal
from isthmus_privacy.crypto.canonical import NUMBER, Message, exactly, text
from isthmus_privacy.crypto.keys import KEY_BYTES, SIGNATURE_BYTES, SigningKey

NAME = text(128)
"""A participant's enrolled name."""


@dataclasses.dataclass(frozen=True)
class Enrolment(Message):
    """The authority's statement that a name belongs to an identity key."""

    TAG = "enrolment"
    FIELDS = {
        "name": NAME,
        "identity_key": exactly(KEY_BYTES),
        "not_after": NUMBER,
        "signature": exactly(SIGNATURE_BYTES),
    }

    name: str
    identity_key: bytes
    """Ed25519 public key."""
    not_after: int
    """Unix seconds; a renewal has the same key."""
    signature: bytes

    def signed_fields(self) -> tuple[bytes, ...]:
        """Fields that the authority signs."""
        return (self.name.encode(), self.identity_key, self.not_after.to_bytes(8, "little"))


class Authority:
    """The enrolment authority; separate from the aggregation server."""

    def __init__(self, private: bytes | None = None) -> None:
        """`private` is the 32-byte Ed25519 seed; None generates a key."""
        self._key = SigningKey(private)
        self.public = self._key.public

    def enrol(self, name: str, identity_key: bytes, *, not_after: int) -> Enrolment:
        """Sign that `name` owns `identity_key` until `not_after` (unix seconds)."""
        draft = Enrolment(name, identity_key, not_after, bytes(SIGNATURE_BYTES))
        signature = self._key.sign("enrolment", *draft.signed_fields())
        return dataclasses.replace(draft, signature=signature)


class Directory:
    """Verifies enrolments; keep it between rounds, since it caches verified signatures."""

    def __init__(
        self,
        authority: bytes,
        *,
        revoked: Set[bytes] = frozenset(),
        now: Callable[[], float] = time.time,
    ) -> None:
        """Accept enrolments of one authority.

        Args:
            authority: Ed25519 public key of the authority.
            revoked: identity keys that are no longer accepted; may change at any time.
            now: returns the time in Unix seconds.
        """
        self.authority = authority
        self.revoked = revoked
        self.now = now
        self._verified: set[Enrolment] = set()

    def check(self, enrolment: Enrolment) -> None:
        """Accept an enrolment.

        Raises:
            PeerMisbehaved: it is revoked, expired, or not signed by this authority.
        """
        name = enrolment.name
        if enrolment.identity_key in self.revoked:
            refusal.refuse("enrolment-revoked", f"the key of {name!r} is revoked", peer=name)
        if self.now() > enrolment.not_after:
            refusal.refuse(
                "enrolment-expired",
                f"the enrolment of {name!r} ended at {enrolment.not_after}",
                peer=name,
            )
        if enrolment in self._verified:
            return
        if not keys.verify(
            self.authority, enrolment.signature, "enrolment", *enrolment.signed_fields()
        ):
            refusal.refuse(
                "enrolment-forged", f"{name!r} is not enrolled by this operator", peer=name
            )
        self._verified.add(enrolment)
