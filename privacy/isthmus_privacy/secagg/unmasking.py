"""Reconstruct secrets from unmasking shares, verify them and derive the masks to remove."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Set

from isthmus_privacy.crypto import refusal, shamir
from isthmus_privacy.crypto.canonical import PositionSet
from isthmus_privacy.crypto.keys import OneTimeKey
from isthmus_privacy.secagg.cohort import Cohort
from isthmus_privacy.secagg.messages import ShareKeys, ShareKeysForTwo


@dataclasses.dataclass(frozen=True)
class UnmaskingInput:
    """The server's data for unmasking a sum; positions are those of the cohort."""

    cohort: Cohort
    shared: Mapping[int, ShareKeys]
    """Share owner to its shares and commitment: U2."""
    partners: Mapping[int, Set[int]]
    """Share owner to the clients it has pairwise masks with."""
    survivors: Set[int]
    """U3."""
    revealed: Mapping[int, Mapping[int, bytes]]
    """Share holder to the shares it revealed, by owner."""

    def masks(self) -> tuple[list[bytes], list[bytes]]:
        """Keys of the masks to add to the masked sum, and of those to subtract from it.

        Raises:
            AggregationAborted: too few shares were revealed, or a secret does not match its
                commitment.
        """
        plus: list[bytes] = []
        minus: list[bytes] = []
        for owner, secret in self._secrets().items():
            if owner in self.survivors:
                self._check_seed(owner, secret)
                minus.append(secret)
                continue
            for survivor, seed in self._mask_seeds(owner, secret).items():
                # The lower position added this mask; the survivor's own sign is reversed here.
                keys = minus if survivor < owner else plus
                keys.append(seed)
        return plus, minus

    def _mask_seeds(self, lost: int, secret: bytes) -> dict[int, bytes]:
        """Keys of the masks of a lost client, whose secret is known now, by the survivor."""
        key = self._checked_key(lost, secret)
        survivors = self.partners[lost] & self.survivors
        return {survivor: self._mask_seed(key, lost, survivor) for survivor in survivors}

    def _mask_seed(self, key: OneTimeKey, lost: int, survivor: int) -> bytes:
        """Key of the mask between a lost client, whose mask key is known now, and a survivor."""
        parts = {}
        if survivor in self.shared[lost].neighbours:
            parts[lost] = self.cohort.own_part(key, lost, survivor)
        if lost in self.shared[survivor].neighbours:
            sealed = self.shared[survivor].sealed_for(lost)
            part = self.cohort.unseal_part(survivor, lost, mask=key, sealed=sealed)
            if part is None:
                refusal.refuse(
                    "mask-part-mismatch",
                    f"{self.cohort.name(survivor)!r} sealed no valid part of its mask with "
                    f"{self.cohort.name(lost)!r}",
                )
            parts[survivor] = part
        return self.cohort.mask_seed(lost, survivor, self._share_owners, parts)

    @functools.cached_property
    def _share_owners(self) -> PositionSet:
        return self.cohort.members(set(self.shared))

    def _secrets(self) -> dict[int, bytes]:
        """Share owner to its seed if it survived, else to its mask secret."""
        threshold = self.cohort.graph.threshold
        points = []
        shares = []
        for owner in sorted(self.shared):
            drawn = sorted(self.shared[owner].neighbours.indices)
            holders = [holder for holder in drawn if holder in self.revealed][:threshold]
            if len(holders) < threshold:
                refusal.refuse(
                    "too-few-shares",
                    f"{len(holders)} shares of {self.cohort.name(owner)!r} were revealed; "
                    f"threshold={threshold}",
                )
            points.append([holder + 1 for holder in holders])
            shares.append([self.revealed[holder][owner] for holder in holders])
        return dict(zip(sorted(self.shared), shamir.combine(points, shares), strict=True))

    def _check_seed(self, owner: int, seed: bytes) -> None:
        if self.cohort.seed_commitment(owner, seed) != self.shared[owner].seed_commitment:
            refusal.refuse(
                "seed-mismatch",
                f"the shares of the seed of {self.cohort.name(owner)!r} do not fit together: it "
                "or one of its neighbours sent a false share",
            )

    def _checked_key(self, owner: int, secret: bytes) -> OneTimeKey:
        key = OneTimeKey(secret)
        if key.public != self.cohort.entry(owner).mask_key:
            refusal.refuse(
                "key-mismatch",
                f"the shares of the mask secret of {self.cohort.name(owner)!r} do not fit "
                "together: it or one of its neighbours sent a false share",
            )
        return key


@dataclasses.dataclass(frozen=True)
class NextUnmaskingInput(UnmaskingInput):
    """Data for unmasking the next sum of a set-up for two: share owners are in the first one."""

    next_parts: Mapping[int, bytes]
    """Share owner to the parts of masks that it has received, encrypted with its secret."""
    senders: Mapping[int, Set[int]]
    """Share owner to the share owners whose parts these are, and others that were lost since."""

    def _check_seed(self, owner: int, seed: bytes) -> None:
        expected = self._first.next_seed_commitment(owner, seed)
        if expected != self._shared_for_two(owner).next_seed_commitment:
            refusal.refuse(
                "next-seed-mismatch",
                f"the shares of the seed of {self.cohort.name(owner)!r} for the second sum do not "
                "fit together: it or one of its neighbours sent a false share",
            )

    def _mask_seeds(self, lost: int, secret: bytes) -> dict[int, bytes]:
        first = self._first
        name = self.cohort.name(lost)
        expected = first.next_secret_commitment(lost, secret)
        if expected != self._shared_for_two(lost).next_secret_commitment:
            refusal.refuse(
                "next-secret-mismatch",
                f"the shares of the secret of {name!r} for the second sum do not fit together: it "
                "or one of its neighbours sent a false share",
            )
        received = first.unseal_next_parts(lost, secret, self.senders[lost], self.next_parts[lost])
        if received is None:
            refusal.refuse("next-parts-mismatch", f"{name!r} has left no valid parts of its masks")
        seeds = {}
        for survivor in self.partners[lost] & self.survivors:
            parts = {}
            if survivor in self.shared[lost].neighbours:
                parts[lost] = first.next_part(secret, lost, survivor)
            if survivor in received:
                parts[survivor] = received[survivor]
            for sender, part in parts.items():
                holder = survivor if sender == lost else lost
                sealed = self.shared[sender].sealed_for(holder)
                commitment = first.next_part_commitment(sender, holder, part)
                if commitment != first.commitment_in(sealed):
                    refusal.refuse(
                        "next-part-mismatch",
                        f"{name!r} has left a false part of its mask with "
                        f"{self.cohort.name(survivor)!r}",
                    )
            seeds[survivor] = self.cohort.mask_seed(lost, survivor, self._share_owners, parts)
        return seeds

    @property
    def _first(self) -> Cohort:
        assert self.cohort.before is not None
        return self.cohort.before

    def _shared_for_two(self, owner: int) -> ShareKeysForTwo:
        shared = self.shared[owner]
        assert isinstance(shared, ShareKeysForTwo)
        return shared
