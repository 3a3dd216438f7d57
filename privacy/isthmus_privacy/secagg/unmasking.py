"""Reconstruct secrets from unmasking shares, verify them and derive the masks to remove."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Set

from isthmus_privacy.crypto import refusal, shamir
from isthmus_privacy.crypto.canonical import PositionSet
from isthmus_privacy.crypto.keys import OneTimeKey
from isthmus_privacy.secagg.cohort import Cohort
from isthmus_privacy.secagg.messages import ShareKeys


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
            key = self._checked_key(owner, secret)
            for survivor in self.partners[owner] & self.survivors:
                # The lower position added this mask; the survivor's own sign is reversed here.
                keys = minus if survivor < owner else plus
                keys.append(self._mask_seed(key, owner, survivor))
        return plus, minus

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
