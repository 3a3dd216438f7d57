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
isthmus.errors.PeerMisbehaved: the enrolment of 'clinic-7' ended at 2033-05-18 03:33:20 UTC by this
machine's clock, which is at 2033-05-18 03:33:21 UTC
"""

from __future__ import annotations

import dataclasses
import datetime
import hmac
import os
import time
from collections.abc import Callable, Set

from isthmus.system.clocks import utc
from isthmus_privacy.crypto import keys, refusal
from isthmus_privacy.crypto.canonical import NUMBER, Message, exactly, tagged, tagged_hash, text
from isthmus_privacy.crypto.keys import KEY_BYTES, SIGNATURE_BYTES, SigningKey
from isthmus_privacy.secagg.lottery import LOTTERY_BYTES

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
        "lottery": exactly(LOTTERY_BYTES),
        "population": NUMBER,
        "signature": exactly(SIGNATURE_BYTES),
    }

    name: str
    identity_key: bytes
    """Ed25519 public key."""
    not_after: int
    """Unix seconds; a renewal has the same key."""
    lottery: bytes
    """Number that decides in which rounds this identity may be selected; see `lottery`."""
    population: int
    """Devices that were enrolled when this was signed."""
    signature: bytes

    def signed_fields(self) -> tuple[bytes, ...]:
        """Fields that the authority signs."""
        return (
            self.name.encode(),
            self.identity_key,
            NUMBER.write(self.not_after),
            self.lottery,
            NUMBER.write(self.population),
        )


class Authority:
    """The enrolment authority; separate from the aggregation server."""

    def __init__(self, private: bytes | None = None) -> None:
        """`private` is the 32-byte Ed25519 seed; None generates a key."""
        private = os.urandom(KEY_BYTES) if private is None else private
        self._key = SigningKey(private)
        self._lottery_secret = tagged_hash("lottery-secret", private)
        self.public = self._key.public

    def enrol(
        self,
        name: str,
        identity_key: bytes,
        *,
        not_after: int,
        population: int = 1,
        now: float | None = None,
    ) -> Enrolment:
        """Sign that `name` owns `identity_key` until `not_after` (unix seconds).

        `population` is the number of enrolled devices. The lottery number is the same for the whole
        week (ISO 8601, UTC) of `now`, so that a device cannot draw again by joining or renewing;
        its secret prevents a device from choosing a key that wins.
        """
        moment = datetime.datetime.fromtimestamp(time.time() if now is None else now, datetime.UTC)
        week = moment.strftime("%G-W%V").encode()
        fields = tagged("lottery", name.encode(), identity_key, week)
        lottery = hmac.digest(self._lottery_secret, fields, "sha256")
        draft = Enrolment(
            name, identity_key, not_after, lottery, population, bytes(SIGNATURE_BYTES)
        )
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
        if (now := self.now()) > enrolment.not_after:
            refusal.refuse(
                "enrolment-expired",
                f"the enrolment of {name!r} ended at {utc(enrolment.not_after)} by this machine's "
                f"clock, which is at {utc(now)}",
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
