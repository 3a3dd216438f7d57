"""The roster both sides agree on, and what follows from it: positions, keys, purposes, partners."""

from __future__ import annotations

import functools
import itertools

from isthmus_privacy.crypto import keys, refusal
from isthmus_privacy.crypto.canonical import NUMBER, Members, tagged, tagged_hash
from isthmus_privacy.crypto.keys import OneTimeKey
from isthmus_privacy.secagg.config import RoundConfig
from isthmus_privacy.secagg.graph import Neighbourhood
from isthmus_privacy.secagg.identity import Directory
from isthmus_privacy.secagg.messages import AdvertiseKeys, Roster


class Cohort:
    """A frozen roster."""

    def __init__(self, config: RoundConfig, roster: Roster) -> None:
        self.config = config
        self.roster = roster
        self.hash = roster.hash(config.hash)
        """Salt of every key derived in this attempt."""
        self.size = len(roster.adverts)
        """n."""

    @functools.cached_property
    def neighbourhood(self) -> Neighbourhood:
        """The graph's parameters."""
        return self.config.neighbourhood(self.size)

    @functools.cached_property
    def positions(self) -> dict[str, int]:
        """Name to position."""
        return {name: i for i, name in enumerate(self.roster.names)}

    def advert(self, position: int) -> AdvertiseKeys:
        """What the client at a position advertised."""
        return self.roster.adverts[position]

    def identity(self, position: int) -> bytes:
        """The Ed25519 key of the client at a position."""
        return self.advert(position).enrolment.identity_key

    def name(self, position: int) -> str:
        """The name of the client at a position."""
        return self.roster.names[position]

    def members(self, positions: frozenset[int] | set[int]) -> Members:
        """A set of this roster's clients."""
        return Members(self.size, frozenset(positions))

    # -- what keys are derived for --------------------------------------------------------------

    def sealing_secret(self, own: OneTimeKey, mine: int, dealer: int, holder: int) -> bytes:
        """The AES-256-GCM key for `dealer`'s shares to `holder`, of whom I am one."""
        other = holder if mine == dealer else dealer
        return own.agree(
            self.advert(other).sealing_key,
            self.hash,
            "share-key",
            NUMBER.write(dealer),
            NUMBER.write(holder),
        )

    def sealing_context(self, dealer: int, holder: int) -> bytes:
        """What sealed shares are bound to, beside their key."""
        threshold = self.neighbourhood.threshold
        return tagged("share", self.hash, *map(NUMBER.write, (dealer, holder, threshold)))

    def pair_seed(self, own: OneTimeKey, mine: int, other: int) -> bytes:
        """The key of the pairwise mask between two clients; the lower position adds it."""
        low, high = sorted((mine, other))
        return own.agree(
            self.advert(other).mask_key, self.hash, "pair", NUMBER.write(low), NUMBER.write(high)
        )

    def seed_commitment(self, dealer: int, seed: bytes | bytearray) -> bytes:
        """By which the server knows that it has reconstructed the right self-mask seed."""
        return tagged_hash("seed-commitment", self.hash, NUMBER.write(dealer), bytes(seed))


def check_roster(
    config: RoundConfig, roster: Roster, directory: Directory, own: AdvertiseKeys
) -> Cohort:
    """A client's checks of the roster it is shown.

    Raises:
        PeerMisbehaved: this roster is not one that every honest client would be shown, or it is
            not safe to deal shares in.
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
    ordered = [name.encode() for name in names]
    if any(not a < b for a, b in itertools.pairwise(ordered)):
        refusal.refuse("roster-unsorted", "the roster is not sorted by name, or repeats one")
    seen = [
        key
        for advert in roster.adverts
        for key in (advert.sealing_key, advert.mask_key, advert.enrolment.identity_key)
    ]
    if len(set(seen)) != len(seen):
        refusal.refuse("roster-repeated-key", "two entries of the roster have a key in common")
    if own not in roster.adverts:
        refusal.refuse("roster-self-changed", f"the roster lacks the entry that {own.name!r} sent")
    for advert in roster.adverts:
        directory.check(advert.enrolment)
        if not advert_is_signed(config, advert):
            refusal.refuse(
                "roster-bad-signature",
                f"{advert.name!r} did not sign these keys for this configuration",
            )
    cohort = Cohort(config, roster)
    hood = cohort.neighbourhood
    if hood.threshold > hood.degree:
        refusal.refuse(
            "roster-no-threshold",
            f"threshold={hood.threshold} is above the degree={hood.degree}: with "
            f"corrupt_permille={config.corrupt_permille}, no graph of {hood.clients} protects",
        )
    return cohort


def advert_is_signed(config: RoundConfig, advert: AdvertiseKeys) -> bool:
    """Whether the enrolled identity signed these keys for this very attempt."""
    return keys.verify(
        advert.enrolment.identity_key,
        advert.signature,
        advert.TAG,
        *advert.signed_fields(config.hash),
    )
