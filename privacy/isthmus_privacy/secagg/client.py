"""A client's side of one attempt: five steps, each a message in and a message out.

    session = ClientSession(config, identity=..., enrolment=..., directory=..., history=...,
                            model_hash=...)
    advert         = session.advertise()                 # -> server
    shares         = session.deal(roster)                # Roster    -> ShareKeys
    masked, vector = session.mask(inbox, encoded)        # Inbox     -> MaskedInput + payload
    consent        = session.consent(survivors)          # Survivors -> ConsistencySignature
    release        = session.release(consents)           # ConsistencySignatures  -> UnmaskingShares

SecAgg+ (Bell et al. 2020) on Bonawitz et al. 2017, against a server that may lie:

Guarantees, as long as no more than `corrupt_permille` of the clients collude with the server:
  * the server learns the sum over one set of at least `fewest` clients, or nothing;
  * for each other client, this one gives away a share of its self-mask seed or of its mask key,
    never of both, and only after a quorum has signed the same set of survivors;
  * every step is taken once. Any refusal ends the session, and its secrets are overwritten.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import itertools
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from isthmus_privacy.crypto import keys, refusal, shamir
from isthmus_privacy.crypto.canonical import Members
from isthmus_privacy.crypto.keys import OneTimeKey, SigningKey
from isthmus_privacy.crypto.masking import add_masks
from isthmus_privacy.secagg.cohort import Cohort, check_roster
from isthmus_privacy.secagg.config import ClientRequirements, RoundConfig
from isthmus_privacy.secagg.encoding import Encoded
from isthmus_privacy.secagg.history import History
from isthmus_privacy.secagg.identity import Directory, Enrolment
from isthmus_privacy.secagg.messages import (
    SHARE_BYTES,
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

MAX_DEALERS = 3
"""In-neighbours above so many times k are no accident: each costs this client work."""


class ClientStage(enum.IntEnum):
    """What the session does next."""

    ADVERTISE = 0
    DEAL = 1
    MASK = 2
    CONSENT = 3
    RELEASE = 4
    FINISHED = 5


class ClientSession:
    """One client in one attempt at one round; see the module."""

    def __init__(
        self,
        config: RoundConfig,
        *,
        identity: SigningKey,
        enrolment: Enrolment,
        directory: Directory,
        history: History,
        model_hash: bytes,
        policy: ClientRequirements | None = None,
    ) -> None:
        """Accept a configuration.

        Args:
            config: as the server sent it.
            identity: this client's enrolled signing key.
            enrolment: what the authority says about it.
            directory: what this client believes about others' enrolments.
            history: this client's memory; it is changed.
            model_hash: SHA-256 of the model this client has really received.
            policy: this device's floor; None is the default one.

        Raises:
            PeerMisbehaved: the configuration is refused.
        """
        config.check()
        policy = policy or ClientRequirements()
        policy.check(config)
        if model_hash != config.model_hash:
            refusal.refuse(
                "config-model-differs", "this round is for another model than this client was sent"
            )
        history.begin(config, policy)
        self.config = config
        self.stage = ClientStage.ADVERTISE
        self._identity = identity
        self._enrolment = enrolment
        self._directory = directory
        self._history = history
        self._sealing: OneTimeKey | None = OneTimeKey()
        self._mask: OneTimeKey | None = OneTimeKey()
        self._seed = bytearray(os.urandom(shamir.SECRET_BYTES))
        self._advert: AdvertiseKeys
        self._cohort: Cohort
        self._me = -1
        self._neighbours: frozenset[int] = frozenset()
        self._dealers: Members
        self._survivors: Survivors
        self._held: dict[int, bytearray] = {}
        """Dealer to its two shares, one behind the other."""

    def advertise(self) -> AdvertiseKeys:
        """Fresh keys for this attempt, signed."""
        with self._step(ClientStage.ADVERTISE):
            sealing, mask = self._keys()
            draft = AdvertiseKeys(
                self._enrolment, sealing.public, mask.public, bytes(keys.SIGNATURE_BYTES)
            )
            signature = self._identity.sign(draft.TAG, *draft.signed_fields(self.config.hash))
            self._advert = AdvertiseKeys(self._enrolment, sealing.public, mask.public, signature)
            return self._advert

    def deal(self, roster: Roster) -> ShareKeys:
        """Draw neighbours and seal shares of this client's two secrets for them.

        Raises:
            PeerMisbehaved: the roster is refused.
        """
        with self._step(ClientStage.DEAL):
            cohort = check_roster(self.config, roster, self._directory, self._advert)
            self._cohort, self._me = cohort, cohort.positions[self._advert.name]
            others = [i for i in range(cohort.size) if i != self._me]
            # Drawn here and only now, so that nobody could choose keys to become a neighbour.
            drawn = secrets.SystemRandom().sample(others, cohort.neighbourhood.degree)
            self._neighbours = frozenset(drawn)
            message = ShareKeys(
                self._advert.name,
                cohort.hash,
                cohort.members(self._neighbours),
                cohort.seed_commitment(self._me, self._seed),
                tuple(self._seal_shares(sorted(drawn))),
                bytes(keys.SIGNATURE_BYTES),
            )
            return _signed(self._identity, message)

    def mask(self, inbox: Inbox, encoded: Encoded) -> tuple[MaskedInput, bytearray]:
        """Open the shares dealt to this client, then mask its vector in place.

        Args:
            inbox: what the server passed on.
            encoded: from `encode` with this session's configuration; its buffer is masked in
                place and returned, so no plaintext is left.

        Returns:
            The message and the payload (`config.payload_bytes`) that goes with it.

        Raises:
            PeerMisbehaved: the inbox is refused.
            UpdateError: `encoded` belongs to another configuration, or is masked already.
        """
        with self._step(ClientStage.MASK):
            self._check_inbox(inbox)
            if encoded.config_hash != self.config.hash or encoded.masked:
                refusal.refuse(
                    "encoded-for-another-round", "this vector was encoded for another attempt"
                )
            self._open_shares(inbox)
            self._dealers = inbox.dealers
            partners = (self._neighbours & inbox.dealers.indices) | self._held.keys()
            _, mask = self._keys()
            seeds = {v: self._cohort.pair_seed(mask, self._me, v) for v in partners}
            add_masks(
                encoded.vector,
                plus=[self._seed, *(seeds[v] for v in partners if v > self._me)],
                minus=[seeds[v] for v in partners if v < self._me],
            )
            encoded.masked = True
            # From here on these secrets are only needed by those who hold their shares.
            self._wipe_own()
            message = MaskedInput(
                self._advert.name,
                self._cohort.hash,
                self._cohort.members(partners),
                len(encoded.payload),
                hashlib.sha256(encoded.payload).digest(),
                bytes(keys.SIGNATURE_BYTES),
            )
            return _signed(self._identity, message), encoded.payload

    def sign_survivors(self, survivors: Survivors) -> ConsistencySignature:
        """Sign the survivor set, the only one this session ever signs.

        Raises:
            PeerMisbehaved: the set is refused.
        """
        with self._step(ClientStage.CONSENT):
            self._check_survivors(survivors)
            self._survivors = survivors
            fields = survivors.signed_fields()
            return ConsistencySignature(
                self._advert.name, self._identity.sign(ConsistencySignature.TAG, *fields)
            )

    def release(self, consistency_signatures: ConsistencySignatures) -> UnmaskingShares:
        """Give away one share for each dealer, once a quorum has signed what this client signed.

        Raises:
            PeerMisbehaved: the signatures are refused.
        """
        with self._step(ClientStage.RELEASE):
            self._check_consents(consistency_signatures)
            survivors = self._survivors.survivors
            self._history.note_unmasked(self.config, self._names(survivors))
            shares = tuple(
                (
                    dealer,
                    bytes(pair[:SHARE_BYTES] if dealer in survivors else pair[SHARE_BYTES:]),
                )
                for dealer, pair in sorted(self._held.items())
            )
            draft = UnmaskingShares(self._advert.name, shares, bytes(keys.SIGNATURE_BYTES))
            signature = self._identity.sign(draft.TAG, *draft.signed_fields(self._cohort.hash))
            self.close()
            return UnmaskingShares(draft.name, shares, signature)

    def close(self) -> None:
        """End the session and overwrite its secrets. What OpenSSL holds, it overwrites itself."""
        self.stage = ClientStage.FINISHED
        self._wipe_own()
        for pair in self._held.values():
            pair[:] = bytes(len(pair))
        self._held.clear()

    # -- steps ----------------------------------------------------------------------------------

    @contextmanager
    def _step(self, stage: ClientStage) -> Iterator[None]:
        """Take a step if it is this step's turn; a step that fails is the last one."""
        try:
            if self.stage is ClientStage.FINISHED:
                refusal.refuse("client-finished", "this session has ended and answers no more")
            if self.stage is not stage:
                refusal.refuse(
                    "client-out-of-order",
                    f"a message for the step {stage.name} came at {self.stage.name}",
                )
            yield
        except BaseException:
            self.close()
            raise
        self.stage = max(self.stage, ClientStage(stage + 1))

    def _keys(self) -> tuple[OneTimeKey, OneTimeKey]:
        if self._sealing is None or self._mask is None:
            raise RuntimeError("the keys of this session are wiped")
        return self._sealing, self._mask

    def _wipe_own(self) -> None:
        self._seed[:] = bytes(len(self._seed))
        self._sealing = self._mask = None

    def _seal_shares(self, holders: list[int]) -> Iterator[bytes]:
        sealing, mask = self._keys()
        points = [holder + 1 for holder in holders]
        threshold = self._cohort.neighbourhood.threshold
        of_seed = shamir.split(self._seed, points, threshold)
        of_key = shamir.split(mask.private_bytes(), points, threshold)
        for holder, one, other in zip(holders, of_seed, of_key, strict=True):
            key = self._cohort.sealing_secret(sealing, self._me, self._me, holder)
            yield keys.seal(key, one + other, self._cohort.sealing_context(self._me, holder))

    # -- checks ---------------------------------------------------------------------------------

    def _check_inbox(self, inbox: Inbox) -> None:
        hood, dealers = self._cohort.neighbourhood, inbox.dealers
        if inbox.roster_hash != self._cohort.hash or dealers.size != self._cohort.size:
            refusal.refuse("inbox-other-roster", "this inbox belongs to another roster")
        if self._me not in dealers:
            refusal.refuse("inbox-self-missing", "this client's own shares were left out")
        if len(dealers) < hood.fewest:
            refusal.refuse(
                "inbox-too-few", f"{len(dealers)} clients dealt shares; {hood.fewest} are needed"
            )
        near = len(self._neighbours & dealers.indices)
        if near < hood.threshold:
            refusal.refuse(
                "inbox-neighbours-gone",
                f"{near} neighbours are left; threshold={hood.threshold}",
            )
        senders = [sender for sender, _ in inbox.sealed]
        if any(not a < b for a, b in itertools.pairwise(senders)):
            refusal.refuse("inbox-sender-repeated", "a sender of shares is repeated or unsorted")
        if any(sender not in dealers or sender == self._me for sender in senders):
            refusal.refuse("inbox-sender-unknown", "shares came from somebody who dealt none")
        if len(senders) > MAX_DEALERS * hood.degree:
            refusal.refuse(
                "inbox-too-many-dealers",
                f"{len(senders)} dealt to this client, where about {hood.degree} should have",
            )

    def _open_shares(self, inbox: Inbox) -> None:
        sealing, _ = self._keys()
        for dealer, sealed in inbox.sealed:
            key = self._cohort.sealing_secret(sealing, self._me, dealer, self._me)
            pair = keys.unseal(key, sealed, self._cohort.sealing_context(dealer, self._me))
            if pair is None:
                refusal.refuse(
                    "inbox-share-tampered",
                    f"the shares from {self._cohort.name(dealer)!r} are not what it sealed",
                )
            self._held[dealer] = bytearray(pair)

    def _check_survivors(self, message: Survivors) -> None:
        hood, survivors = self._cohort.neighbourhood, message.survivors
        if message.roster_hash != self._cohort.hash or survivors.size != self._cohort.size:
            refusal.refuse("survivors-other-roster", "this survivor set is of another roster")
        if message.dealers != self._dealers:
            refusal.refuse(
                "survivors-changed-dealers", "the dealers are not those shown to this client before"
            )
        if not survivors.indices <= self._dealers.indices:
            refusal.refuse("survivors-not-dealers", "a survivor has dealt no shares")
        if self._me not in survivors:
            refusal.refuse("survivors-self-missing", "this client's own vector was left out")
        if len(survivors) < hood.fewest:
            refusal.refuse(
                "survivors-too-few", f"{len(survivors)} survivors; {hood.fewest} are needed"
            )
        near = len(self._neighbours & survivors.indices)
        if near < hood.threshold:
            refusal.refuse(
                "survivors-neighbours-gone",
                f"{near} neighbours survived; threshold={hood.threshold}",
            )
        self._history.check_survivors(self.config, self._names(survivors))

    def _check_consents(self, consistency_signatures: ConsistencySignatures) -> None:
        quorum, survivors = self._cohort.neighbourhood.quorum, self._survivors
        signers = [signer for signer, _ in consistency_signatures.signatures]
        if any(not a < b for a, b in itertools.pairwise(signers)):
            refusal.refuse("consents-repeated", "a signature is repeated or out of order")
        if any(signer not in survivors.survivors for signer in signers):
            refusal.refuse("consents-stranger", "somebody signed who is no survivor")
        if len(signers) < quorum:
            refusal.refuse("consents-too-few", f"{len(signers)} signatures; quorum={quorum}")
        fields = survivors.signed_fields()
        for signer, signature in consistency_signatures.signatures:
            identity = self._cohort.identity(signer)
            if not keys.verify(identity, signature, ConsistencySignature.TAG, *fields):
                refusal.refuse(
                    "consents-forged",
                    f"{self._cohort.name(signer)!r} did not sign the survivors this client was "
                    "shown",
                )

    def _names(self, members: Members) -> frozenset[str]:
        return frozenset(self._cohort.name(i) for i in members.indices)


_M = TypeVar("_M", ShareKeys, MaskedInput)


def _signed(identity: SigningKey, draft: _M) -> _M:
    """The same message with this client's signature."""
    signature = identity.sign(draft.TAG, *draft.signed_fields())
    return dataclasses.replace(draft, signature=signature)
