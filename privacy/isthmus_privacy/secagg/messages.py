"""Messages of one attempt between the clients and the server, in protocol order.

| message | from | to | bytes |
|---|---|---|---|
| `RoundConfig` | server | all | 300 |
| `AdvertiseKeys` | client | server | 2,800 |
| `Roster` | server | all | 2,800 n |
| `ShareKeys` | client | server | 250 + 2,340 k |
| `Inbox` | server | one client | 90 + 2,344 k |
| `MaskedInput` | client | server | 250, plus the masked vector of N x bits / 8 |
| `Survivors` | server | all | 90 + n / 4 |
| `ConsistencySignature` | client | server | 240 |
| `ConsistencySignatures` | server | all | 50 + 72 q |
| `UnmaskingShares` | client | server | 250 + 44 k |

A position is an index into the roster. n = clients, k = neighbours, q = quorum, N = elements of a
vector.

Where the set-up is for two sums, `ShareKeysForTwo`, `InboxForTwo` and `MaskedInputForTwo` take the
place of three of them, with 136 bytes more for each neighbour in the first two and 32 in the last.
The next sum has the messages from `MaskedInput` on.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Mapping
from typing import Self

from isthmus_privacy.crypto.canonical import (
    MAX_CLIENTS,
    NUMBER,
    POSITION_SET,
    Message,
    PositionSet,
    blob,
    exactly,
    items,
    nested,
    row,
    tagged_hash,
)
from isthmus_privacy.crypto.keys import (
    CIPHERTEXT_BYTES,
    KEY_BYTES,
    ONE_TIME_KEY_BYTES,
    SEALING_BYTES,
    SIGNATURE_BYTES,
)
from isthmus_privacy.secagg.identity import NAME, Enrolment

SHARE_BYTES = 36
"""One share of one 32-byte secret."""

PART_BYTES = 32
"""A client's part of the key of its mask with one neighbour."""

SEALED_BYTES = 2 * (CIPHERTEXT_BYTES + SEALING_BYTES) + PART_BYTES + 2 * SHARE_BYTES
"""A part of a mask, a share of the self-mask seed and one of the mask secret, for one neighbour."""


MAX_NEXT_PARTS_BYTES = SEALING_BYTES + PART_BYTES * MAX_CLIENTS

COMMITMENT_BYTES = 32

SEALED_FOR_TWO_BYTES = SEALED_BYTES + COMMITMENT_BYTES + PART_BYTES + 2 * SHARE_BYTES
"""A part and two shares for each of two sums, with a commitment to the part in the next one."""


class Stage(enum.IntEnum):
    """Stages of one attempt; in each, every client sends the server one message."""

    ADVERTISE_KEYS = 0
    SHARE_KEYS = 1
    MASKED_INPUT = 2
    CONSISTENCY_CHECK = 3
    UNMASKING = 4
    FINISHED = 5


_HASH = exactly(32)
_KEY = exactly(ONE_TIME_KEY_BYTES)
_SIGNATURE = exactly(SIGNATURE_BYTES)


@dataclasses.dataclass(frozen=True)
class AdvertiseKeys(Message):
    """A client's one-time keys, signed with its identity."""

    TAG = "advertise-keys"
    FIELDS = {
        "enrolment": nested(Enrolment),
        "sealing_key": _KEY,
        "mask_key": _KEY,
        "signature": _SIGNATURE,
    }

    enrolment: Enrolment
    sealing_key: bytes
    """Hybrid public key that shares for this client are encrypted with."""
    mask_key: bytes
    """Hybrid public key for pairwise masks; its secret is shared among the neighbours."""
    signature: bytes
    """Signature of `signed_fields`."""

    @property
    def name(self) -> str:
        """The enrolled name."""
        return self.enrolment.name

    @property
    def public_keys(self) -> tuple[bytes, ...]:
        """All public keys of the client, those of the two mechanisms apart: none is used twice."""
        hybrid = (self.sealing_key, self.mask_key)
        parts = (part for key in hybrid for part in (key[:KEY_BYTES], key[KEY_BYTES:]))
        return (self.enrolment.identity_key, *parts)

    def signed_fields(self, config_hash: bytes) -> tuple[bytes, ...]:
        """Fields that the client signs."""
        return (
            config_hash,
            self.enrolment.name.encode(),
            self.enrolment.identity_key,
            self.sealing_key,
            self.mask_key,
        )


MAX_ENTRY_BYTES = 4096
"""No client takes more of a roster, whose size a client checks before it has memory for it."""


@dataclasses.dataclass(frozen=True)
class Roster(Message):
    """The keys of all clients of the attempt, sorted by name."""

    TAG = "roster"
    FIELDS = {"entries": items(nested(AdvertiseKeys))}

    entries: tuple[AdvertiseKeys, ...]

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Self:
        """Decode a roster strictly, see `Message.from_bytes`."""
        roster = super().from_bytes(data)
        # The only encoding of this value. With hundreds of clients another takes milliseconds.
        roster.__dict__["_encoding"] = bytes(data)
        return roster

    def to_bytes(self) -> bytes:
        """Encode this roster, once: it is hashed, sent to each client and kept."""
        return self._encoding

    @functools.cached_property
    def _encoding(self) -> bytes:
        return super().to_bytes()

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Names by position."""
        return tuple(entry.name for entry in self.entries)

    def hash(self, config_hash: bytes) -> bytes:
        """Salt of every derived key: clients with different rosters derive different keys."""
        return tagged_hash("roster-hash", config_hash, self.to_bytes())


@dataclasses.dataclass(frozen=True)
class ShareKeys(Message):
    """Shares of a client's two secrets, encrypted for the neighbours it drew."""

    TAG = "share-keys"
    FIELDS = {
        "name": NAME,
        "roster_hash": _HASH,
        "neighbours": POSITION_SET,
        "seed_commitment": _HASH,
        "sealed": items(exactly(SEALED_BYTES)),
        "signature": _SIGNATURE,
    }

    name: str
    roster_hash: bytes
    neighbours: PositionSet
    """Out-neighbours: the holders of the shares."""
    seed_commitment: bytes
    """Hash of the self-mask seed, by which the server detects a wrong reconstruction."""
    sealed: tuple[bytes, ...]
    """What each neighbour receives (see `Cohort.seal`), in the order of their positions."""
    signature: bytes

    def sealed_for(self, holder: int) -> bytes:
        """What the neighbour at a position receives."""
        return self._by_holder[holder]

    @functools.cached_property
    def _by_holder(self) -> dict[int, bytes]:
        return dict(zip(sorted(self.neighbours.indices), self.sealed, strict=True))

    def signed_fields(self) -> tuple[bytes, ...]:
        """Fields that the client signs."""
        return (
            self.roster_hash,
            POSITION_SET.write(self.neighbours),
            self.seed_commitment,
            b"".join(self.sealed),
        )


@dataclasses.dataclass(frozen=True)
class ShareKeysForTwo(ShareKeys):
    """Shares of the secrets of two sums."""

    TAG = "share-keys-for-two"
    FIELDS = {
        "name": NAME,
        "roster_hash": _HASH,
        "neighbours": POSITION_SET,
        "seed_commitment": _HASH,
        "next_seed_commitment": _HASH,
        "next_secret_commitment": _HASH,
        "sealed": items(exactly(SEALED_FOR_TWO_BYTES)),
        "signature": _SIGNATURE,
    }

    next_seed_commitment: bytes
    """As `seed_commitment`, for the self-mask seed of the next sum."""
    next_secret_commitment: bytes
    """Hash of the secret that gives the masks of the next sum, should the client be lost then."""

    def signed_fields(self) -> tuple[bytes, ...]:
        """Fields that the client signs."""
        next_ = (self.next_seed_commitment, self.next_secret_commitment)
        return (*super().signed_fields(), *next_)


@dataclasses.dataclass(frozen=True)
class Inbox(Message):
    """For one client: who has shared its secrets, and the shares that this client holds."""

    TAG = "inbox"
    FIELDS = {
        "roster_hash": _HASH,
        "share_owners": POSITION_SET,
        "sealed": items(row(NUMBER, exactly(SEALED_BYTES))),
    }

    roster_hash: bytes
    share_owners: PositionSet
    """U2: all clients whose shares the server has received."""
    sealed: tuple[tuple[int, bytes], ...]
    """Owner's position and what it sealed for this client, by position."""


@dataclasses.dataclass(frozen=True)
class InboxForTwo(Inbox):
    """An inbox with shares of the secrets of two sums."""

    TAG = "inbox-for-two"
    FIELDS = {**Inbox.FIELDS, "sealed": items(row(NUMBER, exactly(SEALED_FOR_TWO_BYTES)))}


@dataclasses.dataclass(frozen=True)
class MaskedInput(Message):
    """Description of a client's masked vector, which is sent separately as bytes."""

    TAG = "masked-input"
    FIELDS = {
        "name": NAME,
        "roster_hash": _HASH,
        "partners": POSITION_SET,
        "length": NUMBER,
        "sha256": _HASH,
        "signature": _SIGNATURE,
    }

    name: str
    roster_hash: bytes
    partners: PositionSet
    """Clients with whom pairwise masks were added."""
    length: int
    """Length of the masked vector in bytes."""
    sha256: bytes
    signature: bytes

    def signed_fields(self) -> tuple[bytes, ...]:
        """Fields that the client signs."""
        return (
            self.roster_hash,
            POSITION_SET.write(self.partners),
            NUMBER.write(self.length),
            self.sha256,
        )


@dataclasses.dataclass(frozen=True)
class MaskedInputForTwo(MaskedInput):
    """A masked input with what the server needs if the client is lost in the next sum."""

    TAG = "masked-input-for-two"
    FIELDS = {**MaskedInput.FIELDS, "next_parts": blob(MAX_NEXT_PARTS_BYTES)}

    next_parts: bytes
    """The parts of masks of the next sum that the client has received, encrypted with its secret of
    that sum."""

    def signed_fields(self) -> tuple[bytes, ...]:
        """Fields that the client signs."""
        return (*super().signed_fields(), self.next_parts)


@dataclasses.dataclass(frozen=True)
class Survivors(Message):
    """The clients whose vectors are in the sum that is to be unmasked."""

    TAG = "survivors"
    FIELDS = {"roster_hash": _HASH, "share_owners": POSITION_SET, "survivors": POSITION_SET}

    roster_hash: bytes
    share_owners: PositionSet
    """U2, as in `Inbox`."""
    survivors: PositionSet
    """U3: the clients whose masked vectors are in the sum."""

    def signed_fields(self) -> tuple[bytes, ...]:
        """Fields that every survivor signs."""
        return (
            self.roster_hash,
            POSITION_SET.write(self.share_owners),
            POSITION_SET.write(self.survivors),
        )


@dataclasses.dataclass(frozen=True)
class ConsistencySignature(Message):
    """A client's signature of the survivor set it received."""

    TAG = "consistency-signature"
    FIELDS = {"name": NAME, "signature": _SIGNATURE}

    name: str
    signature: bytes


@dataclasses.dataclass(frozen=True)
class ConsistencySignatures(Message):
    """Consistency signatures of a quorum of survivors or more, for every survivor to verify."""

    TAG = "consistency-signatures"
    FIELDS = {"signatures": items(row(NUMBER, _SIGNATURE))}

    signatures: tuple[tuple[int, bytes], ...]
    """Signer's position and signature, by position."""


@dataclasses.dataclass(frozen=True)
class UnmaskingShares(Message):
    """One share for each owner: of its self-mask seed if it survived, else of its mask key."""

    TAG = "unmasking-shares"
    FIELDS = {
        "name": NAME,
        "shares": items(row(NUMBER, exactly(SHARE_BYTES))),
        "signature": _SIGNATURE,
    }

    name: str
    shares: tuple[tuple[int, bytes], ...]
    """Owner's position and the share, by position."""
    signature: bytes

    def signed_fields(self, roster_hash: bytes) -> tuple[bytes, ...]:
        """Fields that the client signs."""
        return (roster_hash, b"".join(NUMBER.write(owner) + share for owner, share in self.shares))


SHARE_KEYS: Mapping[bool, type[ShareKeys]] = {False: ShareKeys, True: ShareKeysForTwo}
INBOX: Mapping[bool, type[Inbox]] = {False: Inbox, True: InboxForTwo}
MASKED_INPUT: Mapping[bool, type[MaskedInput]] = {False: MaskedInput, True: MaskedInputForTwo}
"""The classes of three messages by `RoundConfig.is_for_two`."""
