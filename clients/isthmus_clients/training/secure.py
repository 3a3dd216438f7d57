"""A device's part in secure aggregation: one attempt, from the agreement to the released shares."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from isthmus.errors import UpdateError, UserError
from isthmus.system.private_files import write_private_file
from isthmus.transport.blobs import Buffer, describe
from isthmus.wire import link_pb2
from isthmus_privacy.secagg import (
    AdvertiseKeys,
    ClientRequirements,
    ClientSession,
    ConsistencySignatures,
    Directory,
    Encoded,
    Enrolment,
    History,
    Inbox,
    Roster,
    RoundConfig,
    SigningKey,
    Survivors,
    encode,
)


class Credentials:
    """Who this device is to the others of a cohort, and what it remembers of earlier rounds.

    Guarantees:
      * with a file to remember in, no restart of this process lets a server repeat a round: what
        happened is on the disk before the message that rests on it leaves.
    """

    def __init__(
        self, private: bytes, memory: Path | None = None, floor: ClientRequirements | None = None
    ) -> None:
        """Be somebody.

        Args:
            private: the device's 32-byte Ed25519 seed.
            memory: file for the history, as long-lived as the seed; None if that ends with this
                process.
            floor: the least this device insists on; None is the default one.

        Raises:
            UserError: there is a history, and it cannot be read.
        """
        self.identity = SigningKey(private)
        self.memory = memory
        self.floor = floor
        self.history = History() if memory is None else _read_history(memory)
        self.enrolment: Enrolment | None = None
        self.directory: Directory | None = None

    def welcomed(self, authority: bytes, enrolment: bytes) -> None:
        """A server's welcome brought this device's enrolment."""
        if enrolment:
            self.enrolment = Enrolment.from_bytes(enrolment)
        if self.directory is None or self.directory.authority != authority:
            self.directory = Directory(authority)

    def remember(self) -> None:
        """Write the history down, durably.

        Raises:
            UpdateError: that cannot be done, so the round must not go on.
        """
        if self.memory is None:
            return
        try:
            write_private_file(self.memory, json.dumps(self.history.state()).encode())
        except OSError as error:
            raise UpdateError(
                f"this device cannot write down which rounds it was in ({error.strerror}), and "
                "does not aggregate without that"
            ) from None


def _read_history(path: Path) -> History:
    try:
        state = json.loads(path.read_bytes())
        if not isinstance(state, dict):
            raise ValueError("it is not a table")
        return History(state)
    except FileNotFoundError:
        return History()
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} says which rounds this device was in, and cannot be read ({error}); restore "
            "it, or have the operator revoke this device and join again"
        ) from None


class SecureParticipation:
    """One attempt: agree first, train, then answer step by step.

    Guarantees:
      * a server that proposes something unsafe is refused before anything is trained;
      * the update in plain is gone from memory once it is masked.
    """

    def __init__(
        self, about: tuple[str, int, int], agreed: bytes, model: bytes, credentials: Credentials
    ) -> None:
        """Look at what the server proposes.

        Args:
            about: its run (or that run's comparisons, see `isthmus.task.paired_scores`), round and
                attempt.
            agreed: the agreement, encoded.
            model: SHA-256 of the content that came with it.
            credentials: this device's.

        Raises:
            PeerMisbehaved: the proposal is refused, with the reason.
            UpdateError: this device was never enrolled.
        """
        if credentials.enrolment is None or credentials.directory is None:
            raise UpdateError("this device is not enrolled, so it cannot aggregate securely")
        self.key = about
        self.config = RoundConfig.from_bytes(agreed)
        if (self.config.run_id, self.config.round, self.config.attempt) != about:
            raise UpdateError("the agreement is about another round than the request")
        self.session = ClientSession(
            self.config,
            identity=credentials.identity,
            enrolment=credentials.enrolment,
            directory=credentials.directory,
            history=credentials.history,
            model_hash=model,
            requirements=credentials.floor,
        )
        self._remember = credentials.remember
        self._remember()
        self._encoded: Encoded | None = None

    def advertise(
        self, update: torch.Tensor, *, examples: int, loss: float, seed: bytes
    ) -> AdvertiseKeys:
        """Encode an update (N), or what scores come to, and give the keys to mask it with.

        `seed` makes its rounding the same whenever the same round is repeated.
        """
        self._encoded = encode(
            self.config,
            update,
            weight=min(examples, self.config.weight_max),
            figures={slot.name: loss for slot in self.config.slots},
            dither_key=hashlib.sha256(b"isthmus/dither/" + seed).digest(),
        )
        return self.session.advertise_keys()

    def step(self, work: link_pb2.SecureStep) -> tuple[link_pb2.SecureStepped, Buffer | None]:
        """Answer the next message.

        Raises:
            PeerMisbehaved: it is refused, and the attempt is over for this device.
        """
        kind = work.WhichOneof("message")
        session = self.session
        if kind == "roster":
            answer = session.share_keys(Roster.from_bytes(work.roster)).to_bytes()
            return link_pb2.SecureStepped(message=answer), None
        if kind == "inbox":
            if self._encoded is None:
                raise UpdateError("there is no update to mask")
            masked, payload = session.mask_input(Inbox.from_bytes(work.inbox), self._encoded)
            self._encoded = None
            stepped = link_pb2.SecureStepped(message=masked.to_bytes(), masked=describe(payload))
            return stepped, payload
        if kind == "survivors":
            answer = session.sign_survivors(Survivors.from_bytes(work.survivors)).to_bytes()
            return link_pb2.SecureStepped(message=answer), None
        if kind == "consistency_signatures":
            answer = session.reveal_unmasking_shares(
                ConsistencySignatures.from_bytes(work.consistency_signatures)
            ).to_bytes()
            self._remember()
            return link_pb2.SecureStepped(message=answer), None
        raise UpdateError("this step of secure aggregation is not known here")
