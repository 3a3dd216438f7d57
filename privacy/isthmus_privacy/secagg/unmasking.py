"""What the server does with released shares: secrets back together, checked, made into masks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set

from isthmus_privacy.crypto import refusal, shamir
from isthmus_privacy.crypto.keys import OneTimeKey
from isthmus_privacy.secagg.cohort import Cohort
from isthmus_privacy.secagg.messages import ShareKeys


@dataclasses.dataclass(frozen=True)
class Evidence:
    """All that the server holds when it opens a sum."""

    cohort: Cohort
    dealt: Mapping[int, ShareKeys]
    """Dealer to what it dealt: U2."""
    partners: Mapping[int, Set[int]]
    """Dealer to those it has pairwise masks with."""
    survivors: Set[int]
    """U3."""
    releases: Mapping[int, Mapping[int, bytes]]
    """Holder to the shares it gave, by dealer."""

    def masks(self) -> tuple[list[bytes], list[bytes]]:
        """Keys of the masks to add, and of those to take away, to be left with the plain sum.

        Raises:
            AggregationAborted: too few shares came, or a secret does not match its commitment.
        """
        plus: list[bytes] = []
        minus: list[bytes] = []
        for dealer, secret in self._secrets().items():
            if dealer in self.survivors:
                self._check_seed(dealer, secret)
                minus.append(secret)
                continue
            key = self._checked_key(dealer, secret)
            for survivor in self.partners[dealer] & self.survivors:
                # The lower position added this mask; what the survivor did is undone.
                undo = minus if survivor < dealer else plus
                undo.append(self.cohort.pair_seed(key, dealer, survivor))
        return plus, minus

    def _secrets(self) -> dict[int, bytes]:
        """Dealer to its seed, if it survived, or to its mask key."""
        threshold = self.cohort.neighbourhood.threshold
        points, shares = [], []
        for dealer in sorted(self.dealt):
            neighbours = sorted(self.dealt[dealer].neighbours.indices)
            holders = [holder for holder in neighbours if holder in self.releases][:threshold]
            if len(holders) < threshold:
                refusal.refuse(
                    "too-few-shares",
                    f"{len(holders)} shares of {self.cohort.name(dealer)!r} came; "
                    f"threshold={threshold}",
                )
            points.append([holder + 1 for holder in holders])
            shares.append([self.releases[holder][dealer] for holder in holders])
        return dict(zip(sorted(self.dealt), shamir.combine(points, shares), strict=True))

    def _check_seed(self, dealer: int, seed: bytes) -> None:
        if self.cohort.seed_commitment(dealer, seed) != self.dealt[dealer].seed_commitment:
            refusal.refuse(
                "seed-mismatch",
                f"the shares of the seed of {self.cohort.name(dealer)!r} do not fit together: it, "
                "or a neighbour of it, has lied",
            )

    def _checked_key(self, dealer: int, private: bytes) -> OneTimeKey:
        key = OneTimeKey(private)
        if key.public != self.cohort.advert(dealer).mask_key:
            refusal.refuse(
                "key-mismatch",
                f"the shares of the mask key of {self.cohort.name(dealer)!r} do not fit together: "
                "it, or a neighbour of it, has lied",
            )
        return key
