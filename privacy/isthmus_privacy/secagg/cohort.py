"""The roster that both sides agree on, and the keys and contexts that are derived from it."""

from __future__ import annotations

import functools
import itertools

from isthmus_privacy.crypto import keys, refusal
from isthmus_privacy.crypto.canonical import NUMBER, PositionSet, tagged, tagged_hash
from isthmus_privacy.crypto.keys import OneTimeKey
from isthmus_privacy.secagg.config import RoundConfig
from isthmus_privacy.secagg.graph import GraphParameters
from isthmus_privacy.secagg.identity import Directory
from isthmus_privacy.secagg.messages import AdvertiseKeys, Roster


class Cohort:
    """The clients of a fixed roster."""

    def __init__(self, config: RoundConfig, roster: Roster) -> None:
        self.config = config
        self.roster = roster
        self.hash = roster.hash(config.hash)
        """Salt of every key derived in this attempt."""
        self.size = len(roster.entries)
        """n."""

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

    # -- key derivation -------------------------------------------------------------------------

    def sealing_secret(self, own_key: OneTimeKey, own: int, owner: int, holder: int) -> bytes:
        """Derive the AES-256-GCM key for `owner`'s shares held by `holder`.

        Args:
            own_key: the caller's one-time sealing key.
            own: the caller's position, either `owner` or `holder`.
            owner: position of the client whose secrets are shared.
            holder: position of the client that holds the shares.
        """
        other = holder if own == owner else owner
        return own_key.agree(
            self.entry(other).sealing_key,
            self.hash,
            "share-key",
            NUMBER.write(owner),
            NUMBER.write(holder),
        )

    def sealing_context(self, owner: int, holder: int) -> bytes:
        """Associated data of encrypted shares."""
        threshold = self.graph.threshold
        return tagged("share", self.hash, *map(NUMBER.write, (owner, holder, threshold)))

    def pair_seed(self, own_key: OneTimeKey, own: int, other: int) -> bytes:
        """Derive the key of the mask between two clients; the lower position adds the mask."""
        low, high = sorted((own, other))
        return own_key.agree(
            self.entry(other).mask_key, self.hash, "pair", NUMBER.write(low), NUMBER.write(high)
        )

    def seed_commitment(self, owner: int, seed: bytes | bytearray) -> bytes:
        """Hash by which the server verifies a reconstructed self-mask seed."""
        return tagged_hash("seed-commitment", self.hash, NUMBER.write(owner), bytes(seed))


def check_roster(
    config: RoundConfig, roster: Roster, directory: Directory, own: AdvertiseKeys
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
    public_keys = [
        key
        for entry in roster.entries
        for key in (entry.sealing_key, entry.mask_key, entry.enrolment.identity_key)
    ]
    if len(set(public_keys)) != len(public_keys):
        refusal.refuse("roster-repeated-key", "two entries of the roster have a key in common")
    if own not in roster.entries:
        refusal.refuse(
            "roster-own-entry-changed", f"the roster lacks the entry that {own.name!r} sent"
        )
    for entry in roster.entries:
        directory.check(entry.enrolment)
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
    return cohort


def keys_are_signed(config: RoundConfig, message: AdvertiseKeys) -> bool:
    """Whether the enrolled identity signed these keys for this attempt."""
    return keys.verify(
        message.enrolment.identity_key,
        message.signature,
        message.TAG,
        *message.signed_fields(config.hash),
    )
