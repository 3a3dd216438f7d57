"""What clients and the server say to each other in one attempt, in the order in which they say it.

| message | from | to | bytes |
|---|---|---|---|
| `RoundConfig` | server | all | 300 |
| `AdvertiseKeys` | client | server | 400 |
| `Roster` | server | all | 400 n |
| `ShareKeys` | client | server | 250 + 104 k |
| `Inbox` | server | one | 90 + 108 k |
| `MaskedInput` | client | server | 250, and the masked vector beside it: N x bits / 8 |
| `Survivors` | server | all | 90 + n / 4 |
| `ConsistencySignature` | client | server | 240 |
| `ConsistencySignatures` | server | all | 50 + 72 n |
| `UnmaskingShares` | client | server | 250 + 44 k |

Positions are those in the roster. n = clients, k = neighbours, N = elements of a masked vector.
"""

from __future__ import annotations

import dataclasses
import functools

from isthmus_privacy.crypto.canonical import (
    MEMBERS,
    NUMBER,
    Members,
    Message,
    exactly,
    items,
    nested,
    row,
    tagged_hash,
)
from isthmus_privacy.crypto.keys import KEY_BYTES, SEALING_BYTES, SIGNATURE_BYTES
from isthmus_privacy.secagg.identity import NAME, Enrolment

SHARE_BYTES = 36
"""One share of one 32-byte secret."""

SEALED_BYTES = 2 * SHARE_BYTES + SEALING_BYTES
"""A share of the self-mask seed and one of the mask key, sealed for one neighbour."""

_HASH = exactly(32)
_KEY = exactly(KEY_BYTES)
_SIGNATURE = exactly(SIGNATURE_BYTES)


@dataclasses.dataclass(frozen=True)
class AdvertiseKeys(Message):
    """A client's fresh keys, signed with its identity."""

    TAG = "advertise-keys"
    FIELDS = {
        "enrolment": nested(Enrolment),
        "sealing_key": _KEY,
        "mask_key": _KEY,
        "signature": _SIGNATURE,
    }

    enrolment: Enrolment
    sealing_key: bytes
    """X25519, for the shares sent to this client."""
    mask_key: bytes
    """X25519, for pairwise masks; its private half is what is shared among the neighbours."""
    signature: bytes
    """Of the configuration's hash and both keys."""

    @property
    def name(self) -> str:
        """The enrolled name."""
        return self.enrolment.name

    def signed_fields(self, config_hash: bytes) -> tuple[bytes, ...]:
        """What the client signs."""
        owner = self.enrolment
        return (
            config_hash,
            owner.name.encode(),
            owner.identity_key,
            self.sealing_key,
            self.mask_key,
        )


@dataclasses.dataclass(frozen=True)
class Roster(Message):
    """Everybody who takes part, whole and sorted by name."""

    TAG = "roster"
    FIELDS = {"adverts": items(nested(AdvertiseKeys))}

    adverts: tuple[AdvertiseKeys, ...]

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Names by position."""
        return tuple(advert.name for advert in self.adverts)

    def hash(self, config_hash: bytes) -> bytes:
        """Salt of every key derived in this attempt: different rosters cannot interoperate."""
        return tagged_hash("roster-hash", config_hash, self.to_bytes())


@dataclasses.dataclass(frozen=True)
class ShareKeys(Message):
    """A client's shares, sealed for the neighbours it drew."""

    TAG = "share-keys"
    FIELDS = {
        "name": NAME,
        "roster_hash": _HASH,
        "neighbours": MEMBERS,
        "seed_commitment": _HASH,
        "sealed": items(exactly(SEALED_BYTES)),
        "signature": _SIGNATURE,
    }

    name: str
    roster_hash: bytes
    neighbours: Members
    """Out-neighbours: who gets a share."""
    seed_commitment: bytes
    """Hash of the self-mask seed, for the server to know a wrong reconstruction."""
    sealed: tuple[bytes, ...]
    """In the order of the neighbours' positions."""
    signature: bytes

    def signed_fields(self) -> tuple[bytes, ...]:
        """What the client signs."""
        return (
            self.roster_hash,
            MEMBERS.write(self.neighbours),
            self.seed_commitment,
            b"".join(self.sealed),
        )


@dataclasses.dataclass(frozen=True)
class Inbox(Message):
    """For one client: who has dealt shares, and those that were dealt to it."""

    TAG = "inbox"
    FIELDS = {
        "roster_hash": _HASH,
        "dealers": MEMBERS,
        "sealed": items(row(NUMBER, exactly(SEALED_BYTES))),
    }

    roster_hash: bytes
    dealers: Members
    """U2: everybody whose shares the server has."""
    sealed: tuple[tuple[int, bytes], ...]
    """Sender's position and what it sealed for this client, by position."""


@dataclasses.dataclass(frozen=True)
class MaskedInput(Message):
    """What goes with a client's masked vector; the vector itself travels beside it as bytes."""

    TAG = "masked-input"
    FIELDS = {
        "name": NAME,
        "roster_hash": _HASH,
        "partners": MEMBERS,
        "length": NUMBER,
        "sha256": _HASH,
        "signature": _SIGNATURE,
    }

    name: str
    roster_hash: bytes
    partners: Members
    """With whom pairwise masks were added."""
    length: int
    """Bytes of the masked vector."""
    sha256: bytes
    signature: bytes

    def signed_fields(self) -> tuple[bytes, ...]:
        """What the client signs."""
        return (
            self.roster_hash,
            MEMBERS.write(self.partners),
            NUMBER.write(self.length),
            self.sha256,
        )


@dataclasses.dataclass(frozen=True)
class Survivors(Message):
    """The set whose sum is to be opened."""

    TAG = "survivors"
    FIELDS = {"roster_hash": _HASH, "dealers": MEMBERS, "survivors": MEMBERS}

    roster_hash: bytes
    dealers: Members
    """U2, as before."""
    survivors: Members
    """U3: whose masked vectors are in the sum."""

    def signed_fields(self) -> tuple[bytes, ...]:
        """What every survivor signs."""
        return (self.roster_hash, MEMBERS.write(self.dealers), MEMBERS.write(self.survivors))


@dataclasses.dataclass(frozen=True)
class ConsistencySignature(Message):
    """A client's signature of the one survivor set it has been shown."""

    TAG = "consent"
    FIELDS = {"name": NAME, "signature": _SIGNATURE}

    name: str
    signature: bytes


@dataclasses.dataclass(frozen=True)
class ConsistencySignatures(Message):
    """Everybody's consent, for everybody to check."""

    TAG = "consents"
    FIELDS = {"signatures": items(row(NUMBER, _SIGNATURE))}

    signatures: tuple[tuple[int, bytes], ...]
    """Position and signature, by position."""


@dataclasses.dataclass(frozen=True)
class UnmaskingShares(Message):
    """Exactly one share for each dealer: of the seed if it survived, of the mask key if not."""

    TAG = "release"
    FIELDS = {
        "name": NAME,
        "shares": items(row(NUMBER, exactly(SHARE_BYTES))),
        "signature": _SIGNATURE,
    }

    name: str
    shares: tuple[tuple[int, bytes], ...]
    """Dealer's position and the share, by position."""
    signature: bytes

    def signed_fields(self, roster_hash: bytes) -> tuple[bytes, ...]:
        """What the client signs."""
        return (roster_hash, b"".join(NUMBER.write(i) + share for i, share in self.shares))
