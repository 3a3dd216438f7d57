"""A device's part in one attempt at secure aggregation."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from isthmus.errors import UpdateError
from isthmus.transport.blobs import Buffer, describe
from isthmus.wire import link_pb2
from isthmus_clients.training.history_log import HistoryLog
from isthmus_privacy.crypto.keys import SigningKey
from isthmus_privacy.dp.accounting import epsilon_of_rho
from isthmus_privacy.random_groups import RandomGroup
from isthmus_privacy.secagg.client import ClientSession
from isthmus_privacy.secagg.config import ClientRequirements, RoundConfig
from isthmus_privacy.secagg.encoding import Encoded, encode, hide_spacing
from isthmus_privacy.secagg.history import History, StartModel
from isthmus_privacy.secagg.identity import Directory, Enrolment
from isthmus_privacy.secagg.messages import (
    INBOX,
    MAX_ENTRY_BYTES,
    ConsistencySignatures,
    Roster,
    Survivors,
)
from isthmus_privacy.secagg.spacing import Spacing
from isthmus_privacy.slots import Slot

log = logging.getLogger(__name__)


class Credentials:
    """Identity, enrolment and history of a device.

    Guarantees:
      * with a history file, no restart of this process lets a server repeat a round: the history
        is on disk before a message that depends on it is sent.
    """

    def __init__(
        self,
        private: bytes,
        history_file: Path | None = None,
        requirements: ClientRequirements | None = None,
    ) -> None:
        """Load the identity and the history.

        Args:
            private: the device's 32-byte Ed25519 seed.
            history_file: see `HistoryLog`; as long-lived as the seed. None keeps the history in
                memory.
            requirements: minimum security that this device requires; None for the defaults.

        Raises:
            UserError: the history file exists and cannot be read.
        """
        self.identity = SigningKey(private)
        self.requirements = requirements
        self.history = History()
        if history_file is not None:
            stored = HistoryLog(history_file)
            self.history = History(stored.entries, stored.append)
        self.enrolment: Enrolment | None = None
        self.directory: Directory | None = None

    def welcomed(self, authority: bytes, enrolment: bytes) -> None:
        """Take this device's enrolment from the server's welcome."""
        if enrolment:
            self.enrolment = Enrolment.from_bytes(enrolment)
        if self.directory is None or self.directory.authority != authority:
            self.directory = Directory(authority)


def encode_repeatably(
    config: RoundConfig,
    update: torch.Tensor,
    examples: int,
    figures: Mapping[str, float],
    seed: bytes,
    spacing: Spacing | None = None,
) -> Encoded:
    """Encode an update (N) with a rounding that `seed` determines; see `encode`.

    Raises:
        UpdateError: it cannot be encoded.
    """
    return encode(
        config,
        update,
        weight=min(examples, config.weight_max),
        figures=figures,
        dither_key=_dither_key(seed),
        spacing=spacing,
    )


def hide_repeatably(update: torch.Tensor, spacing: Spacing, seed: bytes) -> None:
    """Hide the spacing of an update (N) in place, as `seed` determines; see `hide_spacing`."""
    hide_spacing(update, spacing, _dither_key(seed))


def _dither_key(seed: bytes) -> bytes:
    return hashlib.sha256(b"isthmus/dither/" + seed).digest()


class SecureParticipation:
    """One attempt: check the configuration, encode the update, then answer each step.

    Guarantees:
      * an unsafe configuration is refused before anything is trained;
      * the plain update is overwritten when it is masked.
    """

    rounding: bytes
    """Names the rounding of the device's vector, 32 bytes, see `ClientSession.rounding`."""
    trained: int
    """The round whose random numbers the vector has."""
    spacing: Spacing | None = None
    """Spacing of the numbers that the update is a difference of, which is hidden; None leaves
    it."""

    def __init__(
        self,
        about: tuple[str, int, int],
        config: bytes,
        model_hash: bytes,
        purpose: bytes,
        slots: Sequence[Slot],
        credentials: Credentials,
        *,
        selected: bool = True,
        start: StartModel | None = None,
        whole: int = 0,
        group: RandomGroup | None = None,
        before: SecureParticipation | None = None,
    ) -> None:
        """Check the configuration that the server proposes.

        Args:
            about: run (or the run's comparisons, see `isthmus.task.paired_scores`, or evaluations),
                round and attempt of the request.
            config: the encoded configuration.
            model_hash: SHA-256 of the blob that came with the request.
            purpose: hash of the requested work, see `isthmus_privacy.purpose`.
            slots: the figures that this device gives for such a request.
            credentials: the device's.
            selected: whether the devices must have been selected by the lottery, if the device
                requires one.
            start: model and vector of the device; None for those that the configuration names.
            whole: levels of the whole numbers that this device sends in place of an update, see
                `RoundConfig.check_form`; 0 for an update.
            group: the random group that is summed; None for any devices.
            before: this device's part in the sum that was set up for this one too; None for a
                set-up of its own.

        Raises:
            PeerMisbehaved: the configuration is refused.
            UpdateError: this device is not enrolled, or cannot record the attempt.
        """
        if credentials.enrolment is None or credentials.directory is None:
            raise UpdateError("this device is not enrolled, so it cannot aggregate securely")
        self.about = about
        self.config = RoundConfig.from_bytes(config)
        # Before anything else is read of it: what is signed later must be about what was asked for.
        if (self.config.run_id, self.config.round, self.config.attempt) != about:
            raise UpdateError("the configuration is of another round than the request")
        self.config.check_form(slots, whole=whole)
        requirements = credentials.requirements or ClientRequirements()
        if not selected:
            requirements = dataclasses.replace(requirements, selection_slack=None)
        if group is not None:
            requirements = dataclasses.replace(requirements, group=group)
        # All refusals are here, so that nothing was trained for a configuration that is refused.
        self.session: ClientSession = ClientSession(
            self.config,
            identity=credentials.identity,
            enrolment=credentials.enrolment,
            directory=credentials.directory,
            history=credentials.history,
            model_hash=model_hash,
            purpose=purpose,
            requirements=requirements,
            start=start,
            before=None if before is None else before.session,
        )
        self._is_set_up = before is not None
        if self.config.noise is not None:
            epsilon = epsilon_of_rho(credentials.history.rho(), requirements.delta)
            log.info(
                "secure sum %d of this device; by their noise, all of them have an epsilon of %.4g "
                "at delta %g for its data",
                credentials.history.participations(),
                epsilon,
                requirements.delta,
            )
        self.rounding = self.session.rounding
        self.trained = self.session.trained
        self._encoded: Encoded | None = None
        self.sent: torch.Tensor | None = None
        """The part of the update that the encoded vector stands for, (N) float32; None before, and
        without a codec."""

    def encode(
        self,
        update: torch.Tensor,
        *,
        examples: int,
        figures: Mapping[str, float],
        seed: bytes,
    ) -> None:
        """Encode an update (N).

        `figures` has a value for each slot of the configuration. `seed` determines the rounding, so
        that a repeated round encodes the same vector.

        Raises:
            UpdateError: it cannot be encoded.
        """
        self._encoded = encode_repeatably(
            self.config, update, examples, figures, seed, self.spacing
        )
        self.sent = self._encoded.sent

    def begin(self) -> tuple[bytes, Buffer | None]:
        """The first message about the encoded update, and what goes with it.

        These are the keys that it will be masked with, alone; or in a next sum the masked update.

        Raises:
            PeerMisbehaved: the sum is refused.
        """
        if not self._is_set_up:
            return self.session.advertise_keys().to_bytes(), None
        masked, payload = self.session.mask_next(self._taken())
        return masked.to_bytes(), payload

    def close(self) -> None:
        """End it, and overwrite its secrets, also those that are kept for a next sum."""
        self.session.close()

    def _taken(self) -> Encoded:
        """The plain vector, which the masked one overwrites: nothing is left to mask again."""
        if self._encoded is None:
            raise UpdateError("there is no update to mask")
        encoded = self._encoded
        self._encoded = None
        return encoded

    @property
    def most_roster_bytes(self) -> int:
        """Size of the largest roster that this attempt can have."""
        return self.config.clients_max * MAX_ENTRY_BYTES

    def step(
        self, work: link_pb2.SecureStep, roster: Buffer | None
    ) -> tuple[link_pb2.SecureStepped, Buffer | None]:
        """Answer the next message; `roster` is the one that it names, if it does.

        Raises:
            PeerMisbehaved: it is refused, which ends the attempt for this device.
            UpdateError: it does not have what it is about.
        """
        kind = work.WhichOneof("message")
        session = self.session
        if kind == "roster":
            if roster is None:  # one of no bytes
                raise UpdateError("the roster of the sum came without its devices")
            message = session.share_keys(Roster.from_bytes(memoryview(roster))).to_bytes()
            return link_pb2.SecureStepped(message=message), None
        if kind == "inbox":
            inbox = INBOX[self.config.is_for_two].from_bytes(work.inbox)
            masked, payload = session.mask_input(inbox, self._taken())
            stepped = link_pb2.SecureStepped(message=masked.to_bytes(), masked=describe(payload))
            return stepped, payload
        if kind == "survivors":
            message = session.sign_survivors(Survivors.from_bytes(work.survivors)).to_bytes()
            return link_pb2.SecureStepped(message=message), None
        if kind == "consistency_signatures":
            message = session.reveal_unmasking_shares(
                ConsistencySignatures.from_bytes(work.consistency_signatures)
            ).to_bytes()
            return link_pb2.SecureStepped(message=message), None
        raise UpdateError("this device does not support that step of secure aggregation")
