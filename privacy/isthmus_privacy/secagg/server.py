"""The server's side of one attempt: take a message from each client, then close the stage.

    session = ServerSession(config, directory)
    session.take_advert(...)          for each; then  roster    = session.roster()
    session.take_shares(...)          for each; then  inboxes   = session.inboxes()
    session.take_masked(..., payload) for each; then  survivors = session.survivors()
    session.take_consistency_signature(...)         for each; then  consents  = session.consents()
    session.take_unmasking_shares(...)         for each; then  total     = session.unmask()

`missing` says who has not been heard of in the stage, `enough` whether it can be closed. A client
whose message is refused counts as silent. Everything is checked before anything is changed.

Guarantees:
  * memory is one vector, whatever the number of clients: a masked vector is added when it comes;
  * what comes late, twice, from a stranger or without the right signature changes nothing;
  * a sum is given only if every reconstructed secret matches what its owner committed to.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Collection

import torch

from isthmus_privacy.crypto import keys, refusal
from isthmus_privacy.crypto.masking import add_masks, add_payload, ring_vector
from isthmus_privacy.secagg.cohort import Cohort, advert_is_signed
from isthmus_privacy.secagg.config import RoundConfig
from isthmus_privacy.secagg.identity import Directory
from isthmus_privacy.secagg.messages import (
    AdvertiseKeys,
    ConsistencySignature,
    ConsistencySignatures,
    Inbox,
    MaskedInput,
    Roster,
    ShareKeys,
    Survivors,
    UnmaskingShares,
)
from isthmus_privacy.secagg.unmasking import Evidence


class ServerStage(enum.IntEnum):
    """What the session is waiting for."""

    ADVERTS = 0
    SHARES = 1
    MASKED = 2
    CONSENTS = 3
    RELEASES = 4
    FINISHED = 5


@dataclasses.dataclass(frozen=True)
class RingSum:
    """What is learned: the sum over the survivors, still in the ring; see `decode`."""

    vector: torch.Tensor
    """(length) ring elements."""
    clients: tuple[str, ...]
    """Whose vectors are in it."""


class ServerSession:
    """The server in one attempt at one round; see the module."""

    def __init__(
        self,
        config: RoundConfig,
        directory: Directory,
        *,
        invited: Collection[str] | None = None,
    ) -> None:
        """Begin an attempt.

        Args:
            config: is checked here, and goes to all clients.
            directory: what the server believes about enrolments.
            invited: names that may take part; None for all enrolled.
        """
        config.check()
        self.config = config
        self.stage = ServerStage.ADVERTS
        self._directory = directory
        self._invited = None if invited is None else frozenset(invited)
        self._adverts: dict[str, AdvertiseKeys] = {}
        self._cohort: Cohort
        self._shares: dict[int, ShareKeys] = {}
        self._partners: dict[int, frozenset[int]] = {}
        self._dealt_to: dict[int, frozenset[int]] = {}
        """Holder to those who dealt to it."""
        self._masked: set[int] = set()
        self._total = ring_vector(bytearray(config.payload_bytes), config.bits)
        self._survivors: Survivors
        self._consents: dict[int, bytes] = {}
        self._releases: dict[int, dict[int, bytes]] = {}

    # -- progress -------------------------------------------------------------------------------

    @property
    def missing(self) -> frozenset[str]:
        """Who may still be heard of in this stage; of the first one, those invited."""
        if self.stage is ServerStage.FINISHED:
            return frozenset()
        if self.stage is ServerStage.ADVERTS:
            return (self._invited or frozenset()) - self._adverts.keys()
        expected, heard = self._expected_and_heard()
        return frozenset(self._cohort.name(i) for i in expected - heard)

    @property
    def heard(self) -> int:
        """How many have been heard of in this stage."""
        if self.stage is ServerStage.ADVERTS:
            return len(self._adverts)
        return len(self._expected_and_heard()[1])

    @property
    def enough(self) -> bool:
        """Whether this stage can be closed with those heard of so far."""
        if self.stage is ServerStage.ADVERTS:
            return len(self._adverts) >= self.config.clients_min
        if self.stage is ServerStage.FINISHED:
            return False
        heard, hood = self._expected_and_heard()[1], self._cohort.neighbourhood
        if self.stage is ServerStage.CONSENTS:
            return len(heard) >= hood.quorum
        if self.stage is ServerStage.RELEASES:
            return self._cut_off(heard) is None
        return len(heard) >= hood.fewest and self._cut_off(heard) is None

    def _expected_and_heard(self) -> tuple[set[int], set[int]]:
        if self.stage is ServerStage.SHARES:
            return set(range(self._cohort.size)), set(self._shares)
        if self.stage is ServerStage.MASKED:
            return set(self._shares), self._masked
        if self.stage is ServerStage.CONSENTS:
            return self._masked, set(self._consents)
        return self._masked, set(self._releases)

    # -- keys -----------------------------------------------------------------------------------

    def take_advert(self, message: AdvertiseKeys) -> None:
        """A client's keys.

        Raises:
            PeerMisbehaved: refused; the session goes on without it.
        """
        name = message.name
        self._turn(ServerStage.ADVERTS, name)
        if self._invited is not None and name not in self._invited:
            refusal.refuse("advert-uninvited", f"{name!r} is not invited to this round", peer=name)
        if name in self._adverts:
            refusal.refuse("advert-duplicate", f"{name!r} has advertised before", peer=name)
        if len(self._adverts) >= self.config.clients_max:
            refusal.refuse(
                "advert-too-many",
                f"{name!r} came after clients_max={self.config.clients_max} others",
                peer=name,
            )
        self._directory.check(message.enrolment)
        if not advert_is_signed(self.config, message):
            refusal.refuse("advert-forged", f"{name!r} did not sign these keys", peer=name)
        new = {message.sealing_key, message.mask_key, message.enrolment.identity_key}
        if len(new) < 3 or any(
            new & {other.sealing_key, other.mask_key, other.enrolment.identity_key}
            for other in self._adverts.values()
        ):
            refusal.refuse(
                "advert-repeated-key", f"a key of {name!r} is in the roster already", peer=name
            )
        self._adverts[name] = message

    def roster(self) -> Roster:
        """Close the first stage; for every client in it.

        Raises:
            AggregationAborted: fewer than `clients_min` have advertised.
        """
        self._turn(ServerStage.ADVERTS, None)
        if len(self._adverts) < self.config.clients_min:
            refusal.refuse(
                "too-few-adverts",
                f"{len(self._adverts)} clients came; clients_min={self.config.clients_min}",
            )
        ordered = sorted(self._adverts.values(), key=lambda advert: advert.name.encode())
        self._cohort = Cohort(self.config, Roster(tuple(ordered)))
        self.stage = ServerStage.SHARES
        return self._cohort.roster

    # -- shares ---------------------------------------------------------------------------------

    def take_shares(self, message: ShareKeys) -> None:
        """A client's sealed shares.

        Raises:
            PeerMisbehaved: refused; the session goes on without it.
        """
        name = message.name
        self._turn(ServerStage.SHARES, name)
        position = self._cohort.positions.get(name, -1)
        if position < 0:
            refusal.refuse("shares-stranger", f"{name!r} is not in the roster", peer=name)
        if position in self._shares:
            refusal.refuse("shares-duplicate", f"{name!r} has dealt before", peer=name)
        hood, neighbours = self._cohort.neighbourhood, message.neighbours
        if message.roster_hash != self._cohort.hash or neighbours.size != self._cohort.size:
            refusal.refuse("shares-other-roster", f"{name!r} has another roster", peer=name)
        if position in neighbours:
            refusal.refuse("shares-to-self", f"{name!r} chose itself as neighbour", peer=name)
        if len(neighbours) != hood.degree:
            refusal.refuse(
                "shares-wrong-degree",
                f"{name!r} chose {len(neighbours)} neighbours; degree={hood.degree}",
                peer=name,
            )
        if len(message.sealed) != len(neighbours):
            refusal.refuse(
                "shares-wrong-count",
                f"{name!r} sealed {len(message.sealed)} for {len(neighbours)} neighbours",
                peer=name,
            )
        if not self._signed(position, message.signature, message.TAG, *message.signed_fields()):
            refusal.refuse("shares-forged", f"{name!r} did not sign these shares", peer=name)
        self._shares[position] = message

    def inboxes(self) -> dict[str, Inbox]:
        """Close the second stage; each client's own inbox, by name.

        Raises:
            AggregationAborted: too few have dealt.
        """
        self._turn(ServerStage.SHARES, None)
        dealers, hood = set(self._shares), self._cohort.neighbourhood
        if len(dealers) < hood.fewest:
            refusal.refuse(
                "too-few-dealers",
                f"{len(dealers)} of {hood.clients} clients dealt shares; {hood.fewest} are needed",
            )
        if (name := self._cut_off(dealers)) is not None:
            refusal.refuse(
                "dealers-cut-off",
                f"fewer than threshold={hood.threshold} neighbours of {name!r} are left",
            )
        sealed: dict[int, list[tuple[int, bytes]]] = {dealer: [] for dealer in dealers}
        for dealer in sorted(dealers):
            message = self._shares[dealer]
            for holder, share in zip(
                sorted(message.neighbours.indices), message.sealed, strict=True
            ):
                if holder in dealers:
                    sealed[holder].append((dealer, share))
        for holder, dealt in sealed.items():
            self._dealt_to[holder] = frozenset(dealer for dealer, _ in dealt)
            out = self._shares[holder].neighbours.indices & dealers
            self._partners[holder] = self._dealt_to[holder] | out
        self.stage = ServerStage.MASKED
        members = self._cohort.members(dealers)
        return {
            self._cohort.name(i): Inbox(self._cohort.hash, members, tuple(dealt))
            for i, dealt in sealed.items()
        }

    # -- masked vectors -------------------------------------------------------------------------

    def take_masked(self, message: MaskedInput, payload: bytes | bytearray | memoryview) -> None:
        """A client's masked vector: checked whole, then added, then no longer needed.

        Raises:
            PeerMisbehaved: refused; the sum is as it was.
        """
        name = message.name
        self._turn(ServerStage.MASKED, name)
        position = self._cohort.positions.get(name, -1)
        if position not in self._shares:
            refusal.refuse("masked-stranger", f"{name!r} has dealt no shares", peer=name)
        if position in self._masked:
            refusal.refuse("masked-duplicate", f"the vector of {name!r} is in the sum", peer=name)
        if message.roster_hash != self._cohort.hash:
            refusal.refuse("masked-other-roster", f"{name!r} has another roster", peer=name)
        if not self._signed(position, message.signature, message.TAG, *message.signed_fields()):
            refusal.refuse("masked-forged", f"{name!r} did not sign this vector", peer=name)
        if message.partners.indices != self._partners.get(position):
            refusal.refuse(
                "masked-wrong-partners",
                f"{name!r} masked with other partners than it should have",
                peer=name,
            )
        if not message.length == len(payload) == self.config.payload_bytes:
            refusal.refuse(
                "masked-wrong-length",
                f"{name!r} sent {len(payload)} bytes; {self.config.payload_bytes} are right",
                peer=name,
            )
        if hashlib.sha256(payload).digest() != message.sha256:
            refusal.refuse("masked-corrupt", f"the vector of {name!r} was changed", peer=name)
        add_payload(self._total, memoryview(payload))
        self._masked.add(position)

    def survivors(self) -> Survivors:
        """Close the third stage; for every client whose vector is in the sum.

        Raises:
            AggregationAborted: too few vectors came.
        """
        self._turn(ServerStage.MASKED, None)
        hood = self._cohort.neighbourhood
        if len(self._masked) < hood.fewest:
            refusal.refuse(
                "too-few-masked",
                f"{len(self._masked)} of {hood.clients} vectors came; {hood.fewest} are needed",
            )
        if (name := self._cut_off(self._masked)) is not None:
            refusal.refuse(
                "survivors-cut-off",
                f"fewer than threshold={hood.threshold} neighbours of {name!r} survived",
            )
        self._survivors = Survivors(
            self._cohort.hash,
            self._cohort.members(set(self._shares)),
            self._cohort.members(self._masked),
        )
        self.stage = ServerStage.CONSENTS
        return self._survivors

    # -- consent --------------------------------------------------------------------------------

    def take_consistency_signature(self, message: ConsistencySignature) -> None:
        """A survivor's signature of the survivor set.

        Raises:
            PeerMisbehaved: refused; the session goes on without it.
        """
        name = message.name
        self._turn(ServerStage.CONSENTS, name)
        position = self._cohort.positions.get(name, -1)
        if position not in self._masked:
            refusal.refuse("consent-stranger", f"{name!r} is no survivor", peer=name)
        if position in self._consents:
            refusal.refuse("consent-duplicate", f"{name!r} has signed before", peer=name)
        fields = self._survivors.signed_fields()
        if not self._signed(position, message.signature, message.TAG, *fields):
            refusal.refuse("consent-forged", f"{name!r} signed something else", peer=name)
        self._consents[position] = message.signature

    def consistency_signatures(self) -> ConsistencySignatures:
        """Close the fourth stage; for every survivor that has signed.

        Raises:
            AggregationAborted: fewer than the quorum have signed.
        """
        self._turn(ServerStage.CONSENTS, None)
        quorum = self._cohort.neighbourhood.quorum
        if len(self._consents) < quorum:
            refusal.refuse(
                "too-few-consents", f"{len(self._consents)} survivors signed; quorum={quorum}"
            )
        self.stage = ServerStage.RELEASES
        return ConsistencySignatures(tuple(sorted(self._consents.items())))

    # -- the sum --------------------------------------------------------------------------------

    def take_unmasking_shares(self, message: UnmaskingShares) -> None:
        """A survivor's shares, one for each client that dealt to it.

        Raises:
            PeerMisbehaved: refused; the session goes on without it.
        """
        name = message.name
        self._turn(ServerStage.RELEASES, name)
        position = self._cohort.positions.get(name, -1)
        if position not in self._masked:
            refusal.refuse("release-stranger", f"{name!r} is no survivor", peer=name)
        if position in self._releases:
            refusal.refuse("release-duplicate", f"{name!r} has released before", peer=name)
        fields = message.signed_fields(self._cohort.hash)
        if not self._signed(position, message.signature, message.TAG, *fields):
            refusal.refuse("release-forged", f"{name!r} did not sign these shares", peer=name)
        dealers = [dealer for dealer, _ in message.shares]
        if dealers != sorted(self._dealt_to[position]):
            refusal.refuse(
                "release-wrong-dealers",
                f"{name!r} gave shares of others than those who dealt to it",
                peer=name,
            )
        self._releases[position] = dict(message.shares)

    def unmask(self, *, threads: int | None = None) -> RingSum:
        """Reconstruct the secrets, take the masks away and end the session.

        Args:
            threads: for expanding masks; None for the cores there are.

        Raises:
            AggregationAborted: too few shares came, or a secret does not match its commitment.
        """
        self._turn(ServerStage.RELEASES, None)
        evidence = Evidence(
            self._cohort, self._shares, self._partners, self._masked, self._releases
        )
        plus, minus = evidence.masks()
        add_masks(self._total, plus, minus, threads=threads)
        names = tuple(self._cohort.name(i) for i in sorted(self._masked))
        total = RingSum(self._total, names)
        self.close()
        return total

    def close(self) -> None:
        """End the session; nothing is taken any more."""
        self.stage = ServerStage.FINISHED
        self._releases.clear()
        self._total = ring_vector(bytearray(), self.config.bits)

    # -- checks ---------------------------------------------------------------------------------

    def _turn(self, stage: ServerStage, peer: str | None) -> None:
        if self.stage is not stage:
            refusal.refuse(
                "server-out-of-order",
                f"a step of {stage.name} came at {self.stage.name}",
                peer=peer,
            )

    def _signed(self, position: int, signature: bytes, tag: str, *fields: bytes) -> bool:
        return keys.verify(self._cohort.identity(position), signature, tag, *fields)

    def _cut_off(self, left: Collection[int]) -> str | None:
        """A dealer with fewer than t neighbours left, if there is one."""
        threshold, present = self._cohort.neighbourhood.threshold, frozenset(left)
        for dealer, message in self._shares.items():
            if len(message.neighbours.indices & present) < threshold:
                return self._cohort.name(dealer)
        return None
