"""A client's side of one attempt: five steps, each from a received message to a sent one.

session = ClientSession(config, identity=..., enrolment=..., directory=..., history=...,
                        model_hash=..., purpose=...)
keys            = session.advertise_keys()                  # -> AdvertiseKeys
shares          = session.share_keys(roster)                # Roster -> ShareKeys
masked, payload = session.mask_input(inbox, encoded)        # Inbox -> MaskedInput + payload
signature       = session.sign_survivors(survivors)         # Survivors -> ConsistencySignature
revealed        = session.reveal_unmasking_shares(quorum)   # ConsistencySignatures
                                                            #   -> UnmaskingShares

A set-up for two sums spares the next one the first two steps. Its session begins with the vector:

following       = ClientSession(next_config, ..., before=session)
masked, payload = following.mask_next(encoded)              # -> MaskedInput + payload
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from isthmus_privacy.crypto import keys, refusal, shamir
from isthmus_privacy.crypto.canonical import NUMBER, PositionSet, tagged_hash
from isthmus_privacy.crypto.keys import OneTimeKey, SigningKey
from isthmus_privacy.secagg.cohort import Cohort, check_roster
from isthmus_privacy.secagg.config import ClientRequirements, RoundConfig, SetUpBefore
from isthmus_privacy.secagg.encoding import Encoded
from isthmus_privacy.secagg.history import History, StartModel
from isthmus_privacy.secagg.identity import Directory, Enrolment
from isthmus_privacy.secagg.messages import (
    PART_BYTES,
    SHARE_BYTES,
    AdvertiseKeys,
    ConsistencySignature,
    ConsistencySignatures,
    Inbox,
    MaskedInput,
    MaskedInputForTwo,
    Roster,
    ShareKeys,
    ShareKeysForTwo,
    Stage,
    Survivors,
    UnmaskingShares,
)

MAX_SENDERS_PER_DEGREE = 3
"""A client with more than this multiple of k in-neighbours is under attack: each costs it work."""

_PAIR_BYTES = 2 * SHARE_BYTES


class NextSecrets:
    """What a client keeps for the next sum of a set-up for two.

    None of it follows from the secrets of the first sum, and none of those from it. So what is
    revealed in one of the sums opens nothing of the other: a client that is lost in the next sum
    has its self-mask seed of the first one revealed already.
    """

    def __init__(self) -> None:
        """Draw the secrets."""
        self.seed = bytearray(os.urandom(shamir.SECRET_BYTES))
        """Seed of the self-mask in that sum."""
        self.secret = os.urandom(shamir.SECRET_BYTES)
        """The client's parts of masks follow from it, and it encrypts those that it receives."""
        self.sent: dict[int, bytes] = {}
        """Parts of masks that the client has sent, by the neighbour."""
        self.received: dict[int, bytes] = {}
        """The parts from clients that have drawn it as neighbour."""
        self.share_pairs: dict[int, bytearray] = {}
        """As in `ClientSession`."""

    def close(self) -> None:
        """Overwrite the secrets."""
        self.seed[:] = bytes(len(self.seed))
        self.secret = b""
        self.sent.clear()
        self.received.clear()
        for pair in self.share_pairs.values():
            pair[:] = bytes(len(pair))
        self.share_pairs.clear()


class ClientSession:
    """One client in one attempt at one round.

    SecAgg+ (Bell et al. 2020) on Bonawitz et al. 2017, against a server that may lie.

    Guarantees, if at most `corrupt_permille` of the clients collude with the server:
      * the server learns the sum over one set of at least `survivors_min` clients, or nothing;
      * for each other client, this client reveals a share of its self-mask seed or of its mask
        secret, never of both, and only after a quorum has signed the same survivor set;
      * every step is taken at most once; a refusal ends the session and overwrites its secrets;
      * a next sum with the same set-up is over clients that are in the first one, has secrets of
        its own, and begins only after a quorum has signed who is in the first one.
    """

    def __init__(
        self,
        config: RoundConfig,
        *,
        identity: SigningKey,
        enrolment: Enrolment,
        directory: Directory,
        history: History,
        model_hash: bytes,
        purpose: bytes,
        start: StartModel | None = None,
        requirements: ClientRequirements | None = None,
        before: ClientSession | None = None,
    ) -> None:
        """Accept a configuration.

        Args:
            config: the configuration received from the server.
            identity: this client's enrolled signing key.
            enrolment: the authority's statement on that key.
            directory: verifies the other clients' enrolments.
            history: this client's memory, which records the attempt.
            model_hash: SHA-256 of the model that this client has received.
            purpose: hash of what this client was asked to do, see `isthmus_privacy.purpose`.
            start: model and vector of this client; None for those that the configuration names.
            requirements: this device's minimum security; None for the defaults.
            before: the session of the sum that was set up for this one too; None for a set-up of
                its own.

        Raises:
            PeerMisbehaved: the configuration is refused.
        """
        config.check()
        self._check_set_up(config, before)
        self._requirements = requirements = requirements or ClientRequirements()
        requirements.check(config)
        if model_hash != config.model_hash:
            refusal.refuse(
                "config-model-differs",
                "this round is for another model than the one this client received",
            )
        if purpose != config.purpose:
            refusal.refuse(
                "config-purpose-differs",
                "this sum is for other work than this device was asked to do: its job, the code of "
                "its task, its tensors, its mode, start models or candidates differ",
            )
        requirements.check_selection(config, enrolment.population, directory.now())
        self._start = start or StartModel(
            config.round, config.model_hash, vector=purpose, work=purpose
        )
        history.check_vector(config, self._start)
        history.begin(config, requirements)
        self.config = config
        self.stage = Stage.ADVERTISE_KEYS
        self._identity = identity
        self._enrolment = enrolment
        self._directory = directory
        self._history = history
        self._sealing_key: OneTimeKey | None = None
        self._mask_key: OneTimeKey | None = None
        self._entry: AdvertiseKeys
        """This client's entry in the roster."""
        self._cohort: Cohort
        self._position = -1
        self._neighbours: frozenset[int] = frozenset()
        self._share_owners: PositionSet
        self._survivors: Survivors
        self._share_pairs: dict[int, bytearray] = {}
        """Owner to the concatenated shares of its seed and of its mask key."""
        self._sent_parts: dict[int, bytes] = {}
        """This client's parts of masks, by the neighbour."""
        self._received_parts: dict[int, bytes] = {}
        """The parts from clients that have drawn this one as neighbour, in a next sum."""
        self._next: NextSecrets | None = None
        """What is kept for a next sum with the same set-up."""
        self._revealed = False
        """Whether this client has helped to unmask the sum."""
        if before is not None:
            self._take_set_up(before)
            return
        self._sealing_key = OneTimeKey()
        self._mask_key = OneTimeKey()
        self._self_mask_seed = bytearray(os.urandom(shamir.SECRET_BYTES))
        if config.is_for_two:
            self._next = NextSecrets()

    @staticmethod
    def _check_set_up(config: RoundConfig, before: ClientSession | None) -> None:
        """Refuse a set-up that the configuration does not name, or that is used or not finished."""
        if before is None:
            fits = not isinstance(config.set_up, SetUpBefore)
        else:
            fits = config.follows(before.config)
        if not fits:
            refusal.refuse(
                "config-set-up-differs",
                "the keys of this sum would be those of another one in which this device was not, "
                "which was set up for itself alone, or which allows another cohort",
            )
        if before is not None and not (before._revealed and before._next is not None):
            refusal.refuse(
                "set-up-not-usable",
                "the sum that was set up for this one has not ended, or another one has used it",
            )

    def _take_set_up(self, before: ClientSession) -> None:
        """Begin where the vector is masked, with what a first sum was set up with."""
        secrets_ = before._next
        assert secrets_ is not None
        before._next = None
        self._entry = before._entry
        self._cohort = before._cohort.followed_by(self.config)
        self._position = before._position
        self._neighbours = before._neighbours
        # Those that a quorum has signed: others have no vector in the first sum, and none in this.
        self._share_owners = before._survivors.survivors
        self._self_mask_seed = secrets_.seed
        self._sent_parts = secrets_.sent
        self._received_parts = secrets_.received
        for owner, pair in secrets_.share_pairs.items():
            if owner in self._share_owners:
                self._share_pairs[owner] = pair
            else:
                pair[:] = bytes(len(pair))
        self.stage = Stage.MASKED_INPUT

    @property
    def rounding(self) -> bytes:
        """Names the rounding of this client's vector, 32 bytes: of a model, and of an encoding."""
        return tagged_hash(
            "rounding",
            self._start.model_hash,
            NUMBER.write(self.trained),
            self.config.encoding_hash,
        )

    @property
    def trained(self) -> int:
        """The round whose random numbers this client's vector has."""
        return self._start.trained_round

    def advertise_keys(self) -> AdvertiseKeys:
        """Sign this attempt's one-time keys."""
        with self._step(Stage.ADVERTISE_KEYS):
            sealing, mask = self._keys()
            draft = AdvertiseKeys(
                self._enrolment, sealing.public, mask.public, bytes(keys.SIGNATURE_BYTES)
            )
            signature = self._identity.sign(draft.TAG, *draft.signed_fields(self.config.hash))
            self._entry = dataclasses.replace(draft, signature=signature)
            return self._entry

    def share_keys(self, roster: Roster) -> ShareKeys:
        """Draw neighbours and encrypt shares of this client's two secrets for them.

        Raises:
            PeerMisbehaved: the roster is refused.
        """
        with self._step(Stage.SHARE_KEYS):
            own = self._entry
            requirements = self._requirements
            cohort = check_roster(self.config, roster, self._directory, own, requirements)
            self._cohort = cohort
            self._position = cohort.positions[self._entry.name]
            others = [i for i in range(cohort.size) if i != self._position]
            # Drawn after all keys are fixed, so that no key can be chosen to become a neighbour.
            drawn = secrets.SystemRandom().sample(others, cohort.graph.degree)
            self._neighbours = frozenset(drawn)
            draft = ShareKeys(
                self._entry.name,
                cohort.hash,
                cohort.members(self._neighbours),
                cohort.seed_commitment(self._position, self._self_mask_seed),
                tuple(self._seal_shares(sorted(drawn))),
                bytes(keys.SIGNATURE_BYTES),
            )
            if (next_ := self._next) is not None:
                draft = ShareKeysForTwo(
                    **vars(draft),
                    next_seed_commitment=cohort.next_seed_commitment(self._position, next_.seed),
                    next_secret_commitment=cohort.next_secret_commitment(
                        self._position, next_.secret
                    ),
                )
            return _signed(self._identity, draft)

    def mask_input(self, inbox: Inbox, encoded: Encoded) -> tuple[MaskedInput, bytearray]:
        """Decrypt the shares that this client holds, then mask its vector in place.

        Args:
            inbox: the encrypted shares that the server forwarded.
            encoded: result of `encode` with this session's configuration; masked in place.

        Returns:
            The message and its payload of `config.payload_bytes`.

        Raises:
            PeerMisbehaved: the inbox is refused.
            UpdateError: `encoded` belongs to another configuration, or is masked already.
        """
        with self._step(Stage.MASKED_INPUT):
            self._check_inbox(inbox)
            self._check_encoded(encoded)
            self._received_parts = self._decrypt_inbox(inbox)
            self._share_owners = inbox.share_owners
            return self._mask(encoded)

    def mask_next(self, encoded: Encoded) -> tuple[MaskedInput, bytearray]:
        """Mask the vector of a next sum in place: the first step of its session.

        Args:
            encoded: result of `encode` with this session's configuration; masked in place.

        Returns:
            The message and its payload of `config.payload_bytes`.

        Raises:
            PeerMisbehaved: the sum is refused.
            UpdateError: `encoded` belongs to another configuration, or is masked already.
        """
        with self._step(Stage.MASKED_INPUT):
            self._check_encoded(encoded)
            return self._mask(encoded)

    def _mask(self, encoded: Encoded) -> tuple[MaskedInput, bytearray]:
        """Mask a vector in place, with all partners among the share owners."""
        owners = self._share_owners
        cohort = self._cohort
        self._history.mask(self.config, self._start, self._hash_of(owners))
        seeds = cohort.mask_seeds(self._position, owners, self._sent_parts, self._received_parts)
        partners = seeds.keys()
        encoded.ring.mask(
            plus=[self._self_mask_seed, *(seeds[v] for v in partners if v > self._position)],
            minus=[seeds[v] for v in partners if v < self._position],
        )
        encoded.masked = True
        payload = encoded.ring.payload()
        draft = MaskedInput(
            self._entry.name,
            cohort.hash,
            cohort.members(set(partners)),
            len(payload),
            hashlib.sha256(payload).digest(),
            bytes(keys.SIGNATURE_BYTES),
        )
        if (next_ := self._next) is not None:
            parts = cohort.seal_next_parts(self._position, next_.secret, next_.received)
            draft = MaskedInputForTwo(**vars(draft), next_parts=parts)
            next_.secret = b""
        # From here on these secrets are only needed through their shares.
        self._wipe_own()
        return _signed(self._identity, draft), payload

    def sign_survivors(self, survivors: Survivors) -> ConsistencySignature:
        """Sign the survivor set; a session signs only one.

        Raises:
            PeerMisbehaved: the set is refused.
        """
        with self._step(Stage.CONSISTENCY_CHECK):
            self._check_survivors(survivors)
            self._survivors = survivors
            return ConsistencySignature(
                self._entry.name,
                self._identity.sign(ConsistencySignature.TAG, *survivors.signed_fields()),
            )

    def reveal_unmasking_shares(self, quorum: ConsistencySignatures) -> UnmaskingShares:
        """Reveal one share for each owner if a quorum has signed the same survivor set.

        Raises:
            PeerMisbehaved: the signatures are refused.
        """
        with self._step(Stage.UNMASKING):
            self._check_quorum(quorum)
            survivors = self._survivors.survivors
            self._history.note_unmasked(self.config, self._start, self._hash_of(survivors))
            shares = tuple(
                (
                    owner,
                    bytes(pair[:SHARE_BYTES] if owner in survivors else pair[SHARE_BYTES:]),
                )
                for owner, pair in sorted(self._share_pairs.items())
            )
            draft = UnmaskingShares(self._entry.name, shares, bytes(keys.SIGNATURE_BYTES))
            signature = self._identity.sign(draft.TAG, *draft.signed_fields(self._cohort.hash))
            self._finish()
            self._revealed = True
            return dataclasses.replace(draft, signature=signature)

    def close(self) -> None:
        """End the session and overwrite its secrets; OpenSSL overwrites its own copies of keys."""
        self._finish()
        if self._next is not None:
            self._next.close()
            self._next = None

    def _finish(self) -> None:
        """End the session, and keep what a next sum needs."""
        self.stage = Stage.FINISHED
        self._wipe_own()
        for pair in self._share_pairs.values():
            pair[:] = bytes(len(pair))
        self._share_pairs.clear()

    # -- steps ----------------------------------------------------------------------------------

    @contextmanager
    def _step(self, stage: Stage) -> Iterator[None]:
        """Run a step if it is the next one; a step that fails ends the session."""
        try:
            if self.stage is Stage.FINISHED:
                refusal.refuse(
                    "client-finished", "this session has ended and accepts no more messages"
                )
            if self.stage is not stage:
                refusal.refuse(
                    "client-out-of-order",
                    f"a message for the step {stage.name} came at {self.stage.name}",
                )
            yield
        except BaseException:
            self.close()
            raise
        self.stage = max(self.stage, Stage(stage + 1))

    def _keys(self) -> tuple[OneTimeKey, OneTimeKey]:
        if self._sealing_key is None or self._mask_key is None:
            raise RuntimeError("the keys of this session are wiped")
        return self._sealing_key, self._mask_key

    def _wipe_own(self) -> None:
        self._self_mask_seed[:] = bytes(len(self._self_mask_seed))
        self._sealing_key = self._mask_key = None
        self._sent_parts.clear()
        self._received_parts.clear()

    def _seal_shares(self, holders: list[int]) -> Iterator[bytes]:
        sealing, mask = self._keys()
        cohort = self._cohort
        own = self._position
        next_ = self._next
        secrets_: list[bytes | bytearray] = [self._self_mask_seed, mask.secret_bytes()]
        if next_ is not None:
            secrets_ += [next_.seed, next_.secret]
        points = [holder + 1 for holder in holders]
        split = shamir.split(secrets_, points, cohort.graph.threshold)
        for holder, shares in zip(holders, split, strict=True):
            commitment = b""
            if next_ is not None:
                part = next_.sent[holder] = cohort.next_part(next_.secret, own, holder)
                commitment = cohort.next_part_commitment(own, holder, part)
                shares += part
            part = self._sent_parts[holder] = cohort.own_part(mask, own, holder)
            yield cohort.seal(
                own,
                holder,
                sealing=sealing,
                mask=mask,
                part=part,
                shares=shares,
                commitment=commitment,
            )

    # -- checks ---------------------------------------------------------------------------------

    def _check_encoded(self, encoded: Encoded) -> None:
        if encoded.config_hash != self.config.hash or encoded.masked:
            refusal.refuse(
                "encoded-for-another-attempt", "this vector was encoded for another attempt"
            )

    def _check_inbox(self, inbox: Inbox) -> None:
        graph = self._cohort.graph
        owners = inbox.share_owners
        if inbox.roster_hash != self._cohort.hash or owners.size != self._cohort.size:
            refusal.refuse("inbox-other-roster", "this inbox belongs to another roster")
        if self._position not in owners:
            refusal.refuse("inbox-self-missing", "this client's own shares were left out")
        if len(owners) < graph.survivors_min:
            refusal.refuse(
                "inbox-too-few-owners",
                f"{len(owners)} clients sent shares; {graph.survivors_min} are needed",
            )
        remaining = len(self._neighbours & owners.indices)
        if remaining < graph.threshold:
            refusal.refuse(
                "inbox-neighbours-missing",
                f"{remaining} neighbours are left; threshold={graph.threshold}",
            )
        senders = [sender for sender, _ in inbox.sealed]
        if any(not a < b for a, b in itertools.pairwise(senders)):
            refusal.refuse("inbox-sender-repeated", "a sender of shares is repeated or unsorted")
        if any(sender not in owners or sender == self._position for sender in senders):
            refusal.refuse("inbox-sender-unknown", "shares came from a client that sent none")
        if len(senders) > MAX_SENDERS_PER_DEGREE * graph.degree:
            refusal.refuse(
                "inbox-too-many-senders",
                f"{len(senders)} clients chose this one as neighbour; about {graph.degree} are "
                "expected",
            )

    def _decrypt_inbox(self, inbox: Inbox) -> dict[int, bytes]:
        """Keep the shares, and return the parts of masks by their sender."""
        (sealing, mask), own, parts = self._keys(), self._position, {}
        for owner, sealed in inbox.sealed:
            shares = self._cohort.unseal_shares(owner, own, sealing=sealing, sealed=sealed)
            part = self._cohort.unseal_part(owner, own, mask=mask, sealed=sealed)
            if shares is None or part is None or not self._keeps_next(owner, shares, sealed):
                refusal.refuse(
                    "inbox-share-tampered",
                    f"the shares from {self._cohort.name(owner)!r} are not what it sealed",
                )
            self._share_pairs[owner] = bytearray(shares[:_PAIR_BYTES])
            parts[owner] = part
        return parts

    def _keeps_next(self, owner: int, shares: bytes, sealed: bytes) -> bool:
        """Keep what an owner sent for the next sum; False if it is not what it has committed to."""
        if (next_ := self._next) is None:
            return True
        part = shares[-PART_BYTES:]
        commitment = self._cohort.next_part_commitment(owner, self._position, part)
        if commitment != self._cohort.commitment_in(sealed):
            return False
        next_.received[owner] = part
        next_.share_pairs[owner] = bytearray(shares[_PAIR_BYTES:-PART_BYTES])
        return True

    def _check_survivors(self, message: Survivors) -> None:
        graph = self._cohort.graph
        survivors = message.survivors
        if message.roster_hash != self._cohort.hash or survivors.size != self._cohort.size:
            refusal.refuse("survivors-other-roster", "this survivor set is of another roster")
        if message.share_owners != self._share_owners:
            refusal.refuse(
                "survivors-owners-changed", "the share owners are not those of this client's inbox"
            )
        if not survivors.indices <= self._share_owners.indices:
            refusal.refuse("survivors-without-shares", "a survivor has sent no shares")
        if self._position not in survivors:
            refusal.refuse("survivors-self-missing", "this client's own vector was left out")
        if len(survivors) < graph.survivors_min:
            refusal.refuse(
                "survivors-too-few", f"{len(survivors)} survivors; {graph.survivors_min} are needed"
            )
        remaining = len(self._neighbours & survivors.indices)
        if remaining < graph.threshold:
            refusal.refuse(
                "survivors-neighbours-missing",
                f"{remaining} neighbours survived; threshold={graph.threshold}",
            )
        self._history.check(self.config, self._start, self._hash_of(survivors))

    def _check_quorum(self, message: ConsistencySignatures) -> None:
        quorum = self._cohort.graph.quorum
        survivors = self._survivors
        signers = [signer for signer, _ in message.signatures]
        if any(not a < b for a, b in itertools.pairwise(signers)):
            refusal.refuse("quorum-signer-repeated", "a signature is repeated or out of order")
        if any(signer not in survivors.survivors for signer in signers):
            refusal.refuse("quorum-signer-not-survivor", "a signer is no survivor")
        if len(signers) < quorum:
            refusal.refuse("quorum-too-small", f"{len(signers)} signatures; quorum={quorum}")
        fields = survivors.signed_fields()
        for signer, signature in message.signatures:
            identity = self._cohort.identity(signer)
            if not keys.verify(identity, signature, ConsistencySignature.TAG, *fields):
                refusal.refuse(
                    "quorum-signature-forged",
                    f"{self._cohort.name(signer)!r} did not sign the survivors this client was "
                    "shown",
                )

    def _hash_of(self, members: PositionSet) -> bytes:
        # The updates of a set have different start models in each attempt, unless all have one.
        context = () if self._start.shared else (self.config.hash,)
        return self._cohort.set_hash(members, *context)


_Draft = TypeVar("_Draft", bound=ShareKeys | MaskedInput)


def _signed(identity: SigningKey, draft: _Draft) -> _Draft:
    """Add this client's signature to a message."""
    signature = identity.sign(draft.TAG, *draft.signed_fields())
    return dataclasses.replace(draft, signature=signature)
