"""The roster that both sides agree on, and what two clients of it send each other.

A client sends each of its neighbours shares of its two secrets, and its part of their mask. The key
of the mask between two clients follows from a part of each that has drawn the other as
neighbour. Either client's mask secret, reconstructed after it was lost, gives the server all parts:
its own are derived from that secret, and those of others are encrypted for its mask key. So the
server needs nothing of a client that is still there, and no key agreement that a quantum computer
breaks remains (X25519 alone would need no parts, but ML-KEM has no key agreement without messages).

| bytes | content of what is sent to one neighbour |
|---|---|
| 1088 | ML-KEM ciphertext for the neighbour's mask key |
| 60 | the part of the mask, encrypted |
| 1088 | ML-KEM ciphertext for the neighbour's sealing key |
| 100 | the shares, encrypted; authenticated together with all of the above |

**A set-up for two sums** has no further keys. With its shares a client sends the neighbour its part
of their mask in the next sum, and the shares of two secrets of that sum: 104 bytes more in the last
row, and after the second row a commitment of 32 bytes to that part. A client that is in the first
sum leaves the parts that it has received at the server, encrypted with its secret of the next sum.
Of that secret its own parts follow, too. So if it is lost in the next sum, its neighbours reveal
that secret, and the server has its masks in that sum. Those of the first sum follow from its mask
secret alone, which is then not revealed by anybody.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Mapping, Set

from isthmus_privacy.crypto import keys, refusal
from isthmus_privacy.crypto.canonical import NUMBER, POSITION_SET, PositionSet, tagged, tagged_hash
from isthmus_privacy.crypto.keys import CIPHERTEXT_BYTES, SEALING_BYTES, OneTimeKey
from isthmus_privacy.secagg.config import ClientRequirements, RoundConfig
from isthmus_privacy.secagg.graph import GraphParameters
from isthmus_privacy.secagg.identity import Directory
from isthmus_privacy.secagg.lottery import is_selected
from isthmus_privacy.secagg.messages import (
    COMMITMENT_BYTES,
    PART_BYTES,
    SEALED_BYTES,
    SEALED_FOR_TWO_BYTES,
    AdvertiseKeys,
    Roster,
)

_PART_ENDS = CIPHERTEXT_BYTES + PART_BYTES + SEALING_BYTES


class Cohort:
    """The clients of a fixed roster."""

    def __init__(self, config: RoundConfig, roster: Roster, before: Cohort | None = None) -> None:
        """Fix the roster.

        Args:
            config: of the sum.
            roster: of its clients.
            before: the cohort of the sum that was set up for this one too; None for a set-up of its
                own.
        """
        self.config = config
        self.roster = roster
        self.before = before
        self.hash: bytes = (
            roster.hash(config.hash) if before is None else next_hash(config.hash, before.hash)
        )
        """Salt of every key derived in this sum."""
        self.size = len(roster.entries)
        """n."""

    def followed_by(self, config: RoundConfig) -> Cohort:
        """The cohort of the next sum, whose set-up is that of this one."""
        return Cohort(config, self.roster, self)

    @functools.cached_property
    def graph(self) -> GraphParameters:
        """Parameters of the communication graph."""
        return self.config.graph(self.size)

    @functools.cached_property
    def positions(self) -> dict[str, int]:
        """Name to position."""
        return {name: i for i, name in enumerate(self.roster.names)}

    def entry(self, position: int) -> AdvertiseKeys:
        """The advertised keys of the client at a position."""
        return self.roster.entries[position]

    def identity(self, position: int) -> bytes:
        """The Ed25519 public key of the client at a position."""
        return self.entry(position).enrolment.identity_key

    def name(self, position: int) -> str:
        """The name of the client at a position."""
        return self.roster.names[position]

    def members(self, positions: frozenset[int] | set[int]) -> PositionSet:
        """A set of clients of this roster."""
        return PositionSet(self.size, frozenset(positions))

    def set_hash(self, members: PositionSet, *context: bytes) -> bytes:
        """Hash of a set of clients by their identities, equal in all attempts and runs.

        Sets with different `context` have different hashes.
        """
        identities = sorted(self.identity(position) for position in members.indices)
        return tagged_hash("set-of-clients", b"".join(identities), *context)

    def seed_commitment(self, owner: int, seed: bytes | bytearray) -> bytes:
        """Hash by which the server verifies a reconstructed self-mask seed."""
        return tagged_hash("seed-commitment", self.hash, NUMBER.write(owner), bytes(seed))

    # -- secrets of the next sum -------------------------------------------------------------------

    def next_seed_commitment(self, owner: int, seed: bytes | bytearray) -> bytes:
        """As `seed_commitment`, of the self-mask seed of the next sum."""
        return tagged_hash("next-seed-commitment", self.hash, NUMBER.write(owner), bytes(seed))

    def next_secret_commitment(self, owner: int, secret: bytes) -> bytes:
        """Hash by which the server verifies a reconstructed secret of the next sum."""
        return tagged_hash("next-secret-commitment", self.hash, NUMBER.write(owner), secret)

    def next_part(self, secret: bytes, owner: int, holder: int) -> bytes:
        """The part of `owner` in the key of its mask with `holder` in the next sum."""
        pair = (NUMBER.write(owner), NUMBER.write(holder))
        return keys.derive(secret, self.hash, "next-mask-part", *pair)

    def next_part_commitment(self, owner: int, holder: int, part: bytes) -> bytes:
        """Hash by which all see that a part is the one that `owner` has sent to `holder`."""
        pair = (NUMBER.write(owner), NUMBER.write(holder))
        return tagged_hash("next-part-commitment", self.hash, *pair, part)

    def seal_next_parts(self, owner: int, secret: bytes, parts: Mapping[int, bytes]) -> bytes:
        """Encrypt the parts that `owner` has received, with its secret of the next sum."""
        key = keys.derive(secret, self.hash, "next-parts-key", NUMBER.write(owner))
        joined = b"".join(parts[sender] for sender in sorted(parts))
        return keys.seal(key, joined, tagged("next-parts", NUMBER.write(owner)))

    def unseal_next_parts(
        self, owner: int, secret: bytes, senders: Set[int], sealed: bytes
    ) -> dict[int, bytes] | None:
        """The parts that `owner` has received, by their sender; None if they are no such parts."""
        key = keys.derive(secret, self.hash, "next-parts-key", NUMBER.write(owner))
        joined = keys.unseal(key, sealed, tagged("next-parts", NUMBER.write(owner)))
        if joined is None or len(joined) != PART_BYTES * len(senders):
            return None
        starts = range(0, len(joined), PART_BYTES)
        parts = (joined[start : start + PART_BYTES] for start in starts)
        return dict(zip(sorted(senders), parts, strict=True))

    # -- from neighbour to neighbour ---------------------------------------------------------------

    def own_part(self, mask: OneTimeKey, owner: int, holder: int) -> bytes:
        """The part of `owner`, whose mask key is given, in the key of its mask with `holder`."""
        return mask.derive(self.hash, "mask-part", NUMBER.write(owner), NUMBER.write(holder))

    def seal(
        self,
        owner: int,
        holder: int,
        *,
        sealing: OneTimeKey,
        mask: OneTimeKey,
        part: bytes,
        shares: bytes,
        commitment: bytes = b"",
    ) -> bytes:
        """Encrypt what a client sends to one neighbour.

        Args:
            owner: position of the client.
            holder: position of the neighbour.
            sealing: the client's sealing key.
            mask: its mask key.
            part: its part of their mask.
            shares: for the neighbour, with the part of the mask in the next sum if there is one.
            commitment: to that part.

        Returns:
            `SEALED_BYTES` bytes, or `SEALED_FOR_TWO_BYTES`.

        Raises:
            PeerMisbehaved: a key of the holder is unusable.
        """
        to = self.entry(holder)
        pair = (NUMBER.write(owner), NUMBER.write(holder))
        key, ciphertext = mask.encapsulate(to.mask_key, self.hash, "mask-part-key", *pair)
        sealed_part = ciphertext + keys.seal(key, part, tagged("mask-part", *pair)) + commitment
        key, ciphertext = sealing.encapsulate(to.sealing_key, self.hash, "share-key", *pair)
        sealed = sealed_part + ciphertext
        sealed += keys.seal(key, shares, self._context(owner, holder, sealed_part))
        assert len(sealed) == (SEALED_FOR_TWO_BYTES if commitment else SEALED_BYTES)
        return sealed

    def commitment_in(self, sealed: bytes) -> bytes:
        """The commitment to a part of the next sum in what a client sent to a neighbour."""
        return sealed[_PART_ENDS : self._shares_at]

    @functools.cached_property
    def _shares_at(self) -> int:
        return _PART_ENDS + COMMITMENT_BYTES * self.config.is_for_two

    def unseal_shares(
        self, owner: int, holder: int, *, sealing: OneTimeKey, sealed: bytes
    ) -> bytes | None:
        """Decrypt what `owner` sent to `holder`, whose sealing key is given.

        Returns:
            The shares; None if anything is not as `owner` sealed it.
        """
        sealed_part = sealed[: self._shares_at]
        shares = sealed[self._shares_at :]
        ciphertext = shares[:CIPHERTEXT_BYTES]
        pair = (NUMBER.write(owner), NUMBER.write(holder))
        key = sealing.decapsulate(
            self.entry(owner).sealing_key, ciphertext, self.hash, "share-key", *pair
        )
        context = self._context(owner, holder, sealed_part)
        return keys.unseal(key, shares[CIPHERTEXT_BYTES:], context)

    def unseal_part(
        self, owner: int, holder: int, *, mask: OneTimeKey, sealed: bytes
    ) -> bytes | None:
        """Decrypt the mask part that `owner` sent to `holder`, whose mask key is given.

        Returns:
            The part; None if it is not as `owner` sealed it.
        """
        ciphertext = sealed[:CIPHERTEXT_BYTES]
        part = sealed[CIPHERTEXT_BYTES:_PART_ENDS]
        pair = (NUMBER.write(owner), NUMBER.write(holder))
        key = mask.decapsulate(
            self.entry(owner).mask_key, ciphertext, self.hash, "mask-part-key", *pair
        )
        return keys.unseal(key, part, tagged("mask-part", *pair))

    def mask_seeds(
        self,
        own: int,
        share_owners: PositionSet,
        sent: Mapping[int, bytes],
        received: Mapping[int, bytes],
    ) -> dict[int, bytes]:
        """Keys of the masks of one client with all its partners, who have shared their secrets.

        Args:
            own: its position.
            share_owners: the clients that have shared their secrets.
            sent: its parts, by the neighbour.
            received: the parts from clients that have drawn it as neighbour.
        """
        seeds = {}
        for partner in (sent.keys() | received.keys()) & share_owners.indices:
            parts = {partner: received[partner]} if partner in received else {}
            if partner in sent:
                parts[own] = sent[partner]
            seeds[partner] = self.mask_seed(own, partner, share_owners, parts)
        return seeds

    def mask_seed(
        self, one: int, other: int, share_owners: PositionSet, parts: Mapping[int, bytes]
    ) -> bytes:
        """Key of the mask between two clients; the lower position adds the mask.

        Args:
            one: position of a client.
            other: position of its partner.
            share_owners: the clients that have shared their secrets. Masks of clients that were
                shown different sets do not cancel, so that no client can be in a sum of others.
            parts: the part of each of the two that has drawn the other as neighbour.
        """
        low, high = sorted((one, other))
        combined = tagged("mask-parts", parts.get(low, b""), parts.get(high, b""))
        return keys.derive(
            combined,
            self.hash,
            "pair",
            NUMBER.write(low),
            NUMBER.write(high),
            POSITION_SET.write(share_owners),
        )

    def _context(self, owner: int, holder: int, sealed_part: bytes) -> bytes:
        """Associated data of encrypted shares."""
        return tagged(
            "share",
            self.hash,
            NUMBER.write(owner),
            NUMBER.write(holder),
            NUMBER.write(self.graph.threshold),
            hashlib.sha256(sealed_part).digest(),
        )


def next_hash(config_hash: bytes, before: bytes) -> bytes:
    """Salt of the keys of a sum whose set-up is that of the one before, of which `before` is it."""
    return tagged_hash("next-roster-hash", config_hash, before)


def roster_hash(config: RoundConfig, roster: Roster) -> bytes:
    """Salt of the keys of a sum, of which what its clients sign is."""
    hash_ = roster.hash(config.advertised_hash)
    is_next = config.advertised_hash != config.hash
    return next_hash(config.hash, hash_) if is_next else hash_


def check_roster(
    config: RoundConfig,
    roster: Roster,
    directory: Directory,
    own: AdvertiseKeys,
    requirements: ClientRequirements,
) -> Cohort:
    """Check the roster that a client has received.

    Raises:
        PeerMisbehaved: an honest server would not send this roster, or sharing secrets within it
            is not safe.
    """
    names = roster.names
    if len(names) < config.clients_min:
        refusal.refuse(
            "roster-too-small",
            f"a roster of {len(names)} is below clients_min={config.clients_min}",
        )
    if len(names) > config.clients_max:
        refusal.refuse(
            "roster-too-large",
            f"a roster of {len(names)} is above clients_max={config.clients_max}",
        )
    encoded_names = [name.encode() for name in names]
    if any(not a < b for a, b in itertools.pairwise(encoded_names)):
        refusal.refuse("roster-unsorted", "the roster is not sorted by name, or repeats one")
    public_keys = [key for entry in roster.entries for key in entry.public_keys]
    if len(set(public_keys)) != len(public_keys):
        refusal.refuse("roster-repeated-key", "two entries of the roster have a key in common")
    if own not in roster.entries:
        refusal.refuse(
            "roster-own-entry-changed", f"the roster lacks the entry that {own.name!r} sent"
        )
    # Without a lottery nobody has checked the draw, which the groups follow from.
    in_group = None if requirements.selection_slack is None else requirements.group
    for entry in roster.entries:
        directory.check(entry.enrolment)
        if not is_selected(entry.enrolment.lottery, config.draw, config.selected_ppm):
            refusal.refuse(
                "roster-member-not-selected",
                f"the ticket of {entry.name!r} is above the share of {config.selected_ppm} "
                f"millionths in draw {config.draw}",
            )
        if in_group is not None and not in_group.has(entry.enrolment.lottery, config.draw):
            refusal.refuse(
                "roster-member-of-another-group",
                f"{entry.name!r} is not in the group {in_group.name!r} of draw {config.draw}",
            )
        if not keys_are_signed(config, entry):
            refusal.refuse(
                "roster-bad-signature",
                f"{entry.name!r} did not sign these keys for this configuration",
            )
    cohort = Cohort(config, roster)
    graph = cohort.graph
    if graph.threshold > graph.degree:
        refusal.refuse(
            "roster-no-threshold",
            f"threshold={graph.threshold} is above the degree={graph.degree}: with "
            f"corrupt_permille={config.corrupt_permille}, no graph of {graph.clients} protects",
        )
    if graph.honest_min < requirements.honest_min:
        refusal.refuse("roster-honest-below-floor", requirements.too_few_honest(graph))
    return cohort


def keys_are_signed(config: RoundConfig, message: AdvertiseKeys) -> bool:
    """Whether the enrolled identity signed these keys for this attempt."""
    return keys.verify(
        message.enrolment.identity_key,
        message.signature,
        message.TAG,
        *message.signed_fields(config.advertised_hash),
    )
