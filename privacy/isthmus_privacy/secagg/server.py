"""The server's side of one attempt: receive a message from each client, then finish the stage.

    session = ServerSession(config, directory)
    session.receive_keys(...)                  # AdvertiseKeys of each client
    roster = session.finish_advertise_keys()
    session.receive_shares(...)                # ShareKeys
    names = session.finish_share_keys()        # each is sent session.inbox(name)
    session.receive_masked_input(..., payload) # MaskedInput
    survivors = session.finish_masked_input()
    session.receive_consistency_signature(...) # ConsistencySignature
    session.finish_consistency_check()
    signatures = session.quorum_signatures()   # is sent to each survivor that has signed
    session.receive_unmasking_shares(...)      # UnmaskingShares
    total = session.unmask()

After a set-up for two sums, the next one begins with the vectors:

    following = session.followed_by(next_config)
    following.receive_masked_input(..., payload)
    ...

`missing` names the clients whose message of the stage is outstanding, and `can_finish` says whether
the stage can be finished without them. A client whose message is refused counts as missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import torch

from isthmus_privacy.compression.round_vector import RoundVector
from isthmus_privacy.crypto import refusal
from isthmus_privacy.crypto.canonical import PositionSet
from isthmus_privacy.random_groups import RandomGroup
from isthmus_privacy.secagg.client_messages import (
    check_advertised_keys,
    check_consistency_signature,
    check_masked_input,
    check_shares,
    check_unmasking_shares,
)
from isthmus_privacy.secagg.cohort import Cohort
from isthmus_privacy.secagg.config import RoundConfig
from isthmus_privacy.secagg.identity import Directory
from isthmus_privacy.secagg.messages import (
    INBOX,
    AdvertiseKeys,
    ConsistencySignature,
    ConsistencySignatures,
    Inbox,
    MaskedInput,
    MaskedInputForTwo,
    Roster,
    ShareKeys,
    Stage,
    Survivors,
    UnmaskingShares,
)
from isthmus_privacy.secagg.unmasking import NextUnmaskingInput, UnmaskingInput


@dataclasses.dataclass(frozen=True)
class RingSum:
    """The unmasked sum over the survivors, still in the ring; see `decode`."""

    ring: RoundVector
    clients: tuple[str, ...]
    """Names of the clients whose vectors are in the sum."""

    @property
    def vector(self) -> torch.Tensor:
        """(length) the elements."""
        return self.ring.elements


class ServerSession:
    """The server in one attempt at one round.

    Guarantees:
      * memory is one vector for any number of clients: a masked vector is added when it arrives;
      * no survivor set is fixed before the vectors of all its clients are in the sum here;
      * a message that is late, repeated, from an unknown client or not properly signed changes
        nothing: every check precedes every change;
      * a sum is returned only if every reconstructed secret matches its owner's commitment.
    """

    def __init__(
        self,
        config: RoundConfig,
        directory: Directory,
        *,
        invited: Collection[str] | None = None,
        group: RandomGroup | None = None,
    ) -> None:
        """Begin an attempt.

        Args:
            config: the configuration, which is checked here and sent to all clients.
            directory: verifies the clients' enrolments.
            invited: names that may take part; None for all enrolled.
            group: the random group that is summed; None for any devices.

        Raises:
            PeerMisbehaved: the configuration is not safe.
        """
        config.check()
        self.config = config
        self.stage = Stage.ADVERTISE_KEYS
        self._directory = directory
        self._invited = None if invited is None else frozenset(invited)
        self._group = group
        self._keys: dict[str, AdvertiseKeys] = {}
        self._used_keys: set[bytes] = set()
        self._cohort: Cohort
        self._shares: dict[int, ShareKeys] = {}
        self._share_owners: PositionSet
        self._partners: dict[int, frozenset[int]] = {}
        self._owners_by_holder: dict[int, frozenset[int]] = {}
        self._senders: dict[int, frozenset[int]] = {}
        """`_owners_by_holder` of the sum before: whose parts clients have left for this one."""
        self._next_parts: dict[int, bytes] = {}
        """What clients have left for the next sum of a set-up for two, by position."""
        self._masked: set[int] = set()
        self._elsewhere: set[int] = set()
        """Clients whose vectors are in a sum of another process, which is not here yet."""
        self._total = config.new_vector()
        self._survivors: Survivors
        self._signatures: dict[int, bytes] = {}
        self._revealed: dict[int, dict[int, bytes]] = {}
        self._has_sum = False

    def followed_by(self, config: RoundConfig) -> ServerSession:
        """The session of the next sum of a set-up for two, over clients that are in this one.

        Raises:
            PeerMisbehaved: the configuration is not safe.
            ValueError: this sum was not unmasked, or its set-up is not for that configuration.
        """
        if not (self._has_sum and config.follows(self.config)):
            raise ValueError("this sum is not one that the next one can follow")
        session = ServerSession(config, self._directory, group=self._group)
        owners = self._masked
        session._cohort = self._cohort.followed_by(config)
        session._shares = {owner: self._shares[owner] for owner in owners}
        session._share_owners = session._cohort.members(owners)
        session._next_parts = self._next_parts
        for owner in owners:
            session._partners[owner] = self._partners[owner] & owners
            session._owners_by_holder[owner] = self._owners_by_holder[owner] & owners
        session._senders = self._owners_by_holder
        session.stage = Stage.MASKED_INPUT
        return session

    @property
    def roster(self) -> Roster:
        """The keys of all clients, once they are fixed."""
        return self._cohort.roster

    # -- progress -------------------------------------------------------------------------------

    @property
    def missing(self) -> frozenset[str]:
        """Clients whose message of this stage is outstanding; in the first stage, those invited."""
        if self.stage is Stage.FINISHED:
            return frozenset()
        if self.stage is Stage.ADVERTISE_KEYS:
            return (self._invited or frozenset()) - self._keys.keys()
        expected, received = self._expected_and_received()
        return frozenset(self._cohort.name(i) for i in expected - received)

    @property
    def received(self) -> int:
        """Number of messages accepted in this stage."""
        if self.stage is Stage.ADVERTISE_KEYS:
            return len(self._keys)
        return len(self._expected_and_received()[1])

    @property
    def can_finish(self) -> bool:
        """Whether this stage can be finished with the messages received so far."""
        if self.stage is Stage.ADVERTISE_KEYS:
            return len(self._keys) >= self.config.clients_min
        if self.stage is Stage.FINISHED:
            return False
        received = self._expected_and_received()[1]
        graph = self._cohort.graph
        if self.stage is Stage.CONSISTENCY_CHECK:
            return len(received) >= graph.quorum
        if self.stage is Stage.UNMASKING:
            return self._below_threshold(received) is None
        return len(received) >= graph.survivors_min and self._below_threshold(received) is None

    def _expected_and_received(self) -> tuple[set[int], set[int]]:
        if self.stage is Stage.SHARE_KEYS:
            return set(range(self._cohort.size)), set(self._shares)
        if self.stage is Stage.MASKED_INPUT:
            return set(self._shares), self._masked
        if self.stage is Stage.CONSISTENCY_CHECK:
            return self._masked, set(self._signatures)
        return self._masked, set(self._revealed)

    # -- advertise keys -------------------------------------------------------------------------

    def receive_keys(self, message: AdvertiseKeys) -> None:
        """Accept a client's keys.

        Raises:
            PeerMisbehaved: they are refused; the session continues without the client.
        """
        self._check_stage(Stage.ADVERTISE_KEYS, message.name)
        check_advertised_keys(
            message,
            self.config,
            self._directory,
            invited=self._invited,
            received=self._keys,
            used_keys=self._used_keys,
            group=self._group,
        )
        self._keys[message.name] = message
        self._used_keys.update(message.public_keys)

    def finish_advertise_keys(self) -> Roster:
        """Fix the roster, which is sent to every client in it.

        Raises:
            AggregationAborted: fewer than `clients_min` clients have advertised keys.
        """
        self._check_stage(Stage.ADVERTISE_KEYS, None)
        if len(self._keys) < self.config.clients_min:
            refusal.refuse(
                "too-few-keys",
                too_few(len(self._keys), self.config.clients_min),
            )
        entries = sorted(self._keys.values(), key=lambda message: message.name.encode())
        self._cohort = Cohort(self.config, Roster(tuple(entries)))
        self.stage = Stage.SHARE_KEYS
        return self._cohort.roster

    # -- share keys -----------------------------------------------------------------------------

    def receive_shares(self, message: ShareKeys) -> None:
        """Accept a client's encrypted shares.

        Raises:
            PeerMisbehaved: they are refused; the session continues without the client.
        """
        self._check_stage(Stage.SHARE_KEYS, message.name)
        check_shares(message, self._cohort, received=self._shares)
        self._shares[self._position(message.name)] = message

    def finish_share_keys(self) -> list[str]:
        """Fix the share owners and return their names; each is sent its `inbox`.

        Raises:
            AggregationAborted: too few clients have shared their secrets.
        """
        self._check_stage(Stage.SHARE_KEYS, None)
        owners = set(self._shares)
        graph = self._cohort.graph
        if len(owners) < graph.survivors_min:
            refusal.refuse(
                "too-few-owners",
                f"{len(owners)} of {graph.clients} clients sent shares; {graph.survivors_min} are "
                "needed",
            )
        if (name := self._below_threshold(owners)) is not None:
            refusal.refuse(
                "owners-below-threshold",
                f"fewer than threshold={graph.threshold} neighbours of {name!r} are left",
            )
        owners_by_holder: dict[int, set[int]] = {owner: set() for owner in owners}
        for owner, message in self._shares.items():
            for holder in message.neighbours.indices & owners:
                owners_by_holder[holder].add(owner)
        for holder, its_owners in owners_by_holder.items():
            self._owners_by_holder[holder] = frozenset(its_owners)
            own_holders = self._shares[holder].neighbours.indices & owners
            self._partners[holder] = self._owners_by_holder[holder] | own_holders
        self._share_owners = self._cohort.members(owners)
        self.stage = Stage.MASKED_INPUT
        return [self._cohort.name(owner) for owner in sorted(owners)]

    def inbox(self, name: str) -> Inbox:
        """What the share owners sealed for a client.

        Make it when it is sent: all together have 2,344 bytes for each pair of neighbours.
        """
        self._check_stage(Stage.MASKED_INPUT, None)
        holder = self._position(name)
        sealed = tuple(
            (owner, self._shares[owner].sealed_for(holder))
            for owner in sorted(self._owners_by_holder[holder])
        )
        kind = INBOX[self.config.is_for_two]
        return kind(self._cohort.hash, self._share_owners, sealed)

    # -- masked input ---------------------------------------------------------------------------

    def receive_masked_input(
        self, message: MaskedInput, payload: bytes | bytearray | memoryview
    ) -> None:
        """Check a client's masked vector and add it to the sum; it is not needed afterwards.

        Raises:
            PeerMisbehaved: it is refused; the sum is unchanged.
        """
        self._check_masked_input(message, payload)
        self._total.add(payload)
        self._note_masked(message)

    def note_masked_input(self, message: MaskedInput) -> None:
        """Check a client's message whose vector is added by another process.

        That process must have checked that the vector has the SHA-256 which the client has signed.
        The vectors that it has added come as a sum, see `receive_masked_sum`; before that, the
        survivor set cannot be fixed.

        Raises:
            PeerMisbehaved: it is refused; nothing is changed.
        """
        self._check_masked_input(message, None)
        self._note_masked(message)
        self._elsewhere.add(self._position(message.name))

    def _note_masked(self, message: MaskedInput) -> None:
        position = self._position(message.name)
        self._masked.add(position)
        if isinstance(message, MaskedInputForTwo):
            self._next_parts[position] = message.next_parts

    def receive_masked_sum(self, names: Collection[str], payload: memoryview) -> None:
        """Add the sum of the vectors of some clients that were noted before.

        Raises:
            ValueError: they were not, or the sum has another form than a vector.
        """
        positions = {self._position(name) for name in names}
        if not positions <= self._elsewhere or len(payload) != self.config.payload_bytes:
            raise ValueError("this is not the sum of vectors that were noted")
        self._total.add(payload)
        self._elsewhere -= positions

    def lose_masked_sum(self, names: Collection[str]) -> None:
        """The sum of the vectors of some clients that were noted does not come: they drop out."""
        positions = {self._position(name) for name in names} & self._elsewhere
        self._elsewhere -= positions
        self._masked -= positions

    def _check_masked_input(
        self, message: MaskedInput, payload: bytes | bytearray | memoryview | None
    ) -> None:
        self._check_stage(Stage.MASKED_INPUT, message.name)
        check_masked_input(
            message,
            payload,
            self._cohort,
            share_owners=self._shares,
            partners=self._partners,
            received=self._masked,
            senders=self._owners_by_holder,
        )

    def finish_masked_input(self) -> Survivors:
        """Fix the survivor set, which is sent to every survivor.

        Raises:
            AggregationAborted: too few vectors were received.
            ValueError: one that was noted is not in the sum yet.
        """
        self._check_stage(Stage.MASKED_INPUT, None)
        if self._elsewhere:
            raise ValueError(f"{len(self._elsewhere)} noted vectors are not in the sum yet")
        graph = self._cohort.graph
        if len(self._masked) < graph.survivors_min:
            refusal.refuse(
                "too-few-masked",
                f"{len(self._masked)} of {graph.clients} vectors came; {graph.survivors_min} are "
                "needed",
            )
        if (name := self._below_threshold(self._masked)) is not None:
            refusal.refuse(
                "survivors-below-threshold",
                f"fewer than threshold={graph.threshold} neighbours of {name!r} survived",
            )
        self._survivors = Survivors(
            self._cohort.hash,
            self._share_owners,
            self._cohort.members(self._masked),
        )
        self.stage = Stage.CONSISTENCY_CHECK
        return self._survivors

    # -- consistency check ----------------------------------------------------------------------

    def receive_consistency_signature(self, message: ConsistencySignature) -> None:
        """Accept a survivor's signature of the survivor set.

        Raises:
            PeerMisbehaved: it is refused; the session continues without the client.
        """
        self._check_stage(Stage.CONSISTENCY_CHECK, message.name)
        check_consistency_signature(
            message, self._cohort, self._survivors, received=self._signatures
        )
        self._signatures[self._position(message.name)] = message.signature

    def finish_consistency_check(self) -> ConsistencySignatures:
        """Collect the signatures of all survivors; `quorum_signatures` are sent to each signer.

        Raises:
            AggregationAborted: fewer than the quorum have signed.
        """
        self._check_stage(Stage.CONSISTENCY_CHECK, None)
        quorum = self._cohort.graph.quorum
        if len(self._signatures) < quorum:
            refusal.refuse(
                "too-few-signatures",
                f"{len(self._signatures)} survivors signed; quorum={quorum}",
            )
        self.stage = Stage.UNMASKING
        return ConsistencySignatures(tuple(sorted(self._signatures.items())))

    def quorum_signatures(self) -> ConsistencySignatures:
        """Signatures of a quorum, which is what each survivor that has signed requires.

        Not those of all: a client verifies each signature that it is sent, which takes about as
        long as to agree on keys with a neighbour, and more of them would prove nothing more.
        """
        self._check_stage(Stage.UNMASKING, None)
        quorum = self._cohort.graph.quorum
        return ConsistencySignatures(tuple(sorted(self._signatures.items())[:quorum]))

    # -- unmasking ------------------------------------------------------------------------------

    def receive_unmasking_shares(self, message: UnmaskingShares) -> None:
        """Accept a survivor's shares, one for each owner whose shares it holds.

        Raises:
            PeerMisbehaved: they are refused; the session continues without the client.
        """
        self._check_stage(Stage.UNMASKING, message.name)
        check_unmasking_shares(
            message,
            self._cohort,
            self._survivors,
            owners_by_holder=self._owners_by_holder,
            received=self._revealed,
        )
        self._revealed[self._position(message.name)] = dict(message.shares)

    def unmask(self, *, threads: int | None = None) -> RingSum:
        """Reconstruct the secrets, remove the masks and end the session.

        Args:
            threads: number of threads that expand masks; None for the number of cores.

        Raises:
            AggregationAborted: too few shares were revealed, or a secret does not match its
                commitment.
        """
        self._check_stage(Stage.UNMASKING, None)
        plus, minus = self._unmasking().masks()
        self._total.mask(plus, minus, threads=threads)
        names = tuple(self._cohort.name(i) for i in sorted(self._masked))
        total = RingSum(self._total, names)
        self.close()
        self._has_sum = True
        return total

    def _unmasking(self) -> UnmaskingInput:
        known = (self._cohort, self._shares, self._partners, self._masked, self._revealed)
        if self._cohort.before is None:
            return UnmaskingInput(*known)
        return NextUnmaskingInput(*known, self._next_parts, self._senders)

    def close(self) -> None:
        """End the session; it accepts no more messages."""
        self.stage = Stage.FINISHED
        self._revealed.clear()
        self._total = RoundVector(length=0, bits=self.config.bits, figures=0)

    # -- checks ---------------------------------------------------------------------------------

    def _check_stage(self, stage: Stage, peer: str | None) -> None:
        if self.stage is not stage:
            refusal.refuse(
                "server-out-of-order",
                f"a step of {stage.name} came at {self.stage.name}",
                peer=peer,
            )

    def _position(self, name: str) -> int:
        return self._cohort.positions[name]

    def _below_threshold(self, remaining: Collection[int]) -> str | None:
        """Name of a share owner with fewer than t remaining neighbours, if there is one."""
        threshold = self._cohort.graph.threshold
        present = frozenset(remaining)
        for owner, message in self._shares.items():
            if len(message.neighbours.indices & present) < threshold:
                return self._cohort.name(owner)
        return None


def too_few(answered: int, needed: int) -> str:
    """The sentence for a sum that too few devices take part in.

    >>> too_few(1, 3)
    '1 device answered and 3 are needed (federated.quorum)'
    """
    devices = "device" if answered == 1 else "devices"
    return f"{answered} {devices} answered and {needed} are needed (federated.quorum)"
