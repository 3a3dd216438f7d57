"""The device's part in secure aggregation across requests: at most one attempt at a time.

PyTorch is imported with the first attempt, so that an idle device stays small.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from isthmus.errors import UpdateError
from isthmus.transport.blobs import Buffer
from isthmus.wire import link_pb2

if TYPE_CHECKING:
    import torch

    from isthmus_clients.training.secure import Credentials, SecureParticipation


class SecureSessions:
    """Begins an attempt, keeps it between requests and answers its steps."""

    def __init__(
        self,
        signing_key: Ed25519PrivateKey | None,
        history_file: Path | None,
        clients_min: int | None,
    ) -> None:
        """Identify the device.

        Args:
            signing_key: the device's identity; None generates a key for this process.
            history_file: persists which rounds this device was in; None keeps that in memory.
            clients_min: minimum number of clients in a sum that the owner requires; None for the
                default.
        """
        self._signing_key = signing_key or Ed25519PrivateKey.generate()
        self._history_file = history_file
        self._clients_min = clients_min
        self._welcome: link_pb2.Welcome | None = None
        self._credentials: Credentials | None = None
        self._current: SecureParticipation | None = None

    @property
    def identity(self) -> bytes:
        """The device's public key."""
        return self._signing_key.public_key().public_bytes_raw()

    def welcomed(self, welcome: link_pb2.Welcome) -> None:
        """Take the enrolment of this device's identity from the server's welcome."""
        self._welcome = welcome

    def propose(
        self, about: tuple[str, int, int], config: bytes, blob: link_pb2.Blob, purpose: bytes
    ) -> SecureParticipation:
        """Check the configuration that the server proposes, before any work is done for it.

        Args:
            about: run, round and attempt of the request.
            config: the encoded configuration.
            blob: names the model that came with it.
            purpose: hash of the requested work, see `isthmus_privacy.purpose`.

        Raises:
            PeerMisbehaved: the configuration is refused.
            UpdateError: this device is not enrolled, or cannot record the attempt.
        """
        from isthmus_clients.training.secure import SecureParticipation

        self._current = None
        return SecureParticipation(about, config, blob.sha256, purpose, self._enrolled())

    def advertise(
        self,
        attempt: SecureParticipation,
        update: torch.Tensor,
        *,
        examples: int,
        loss: float,
        seed: bytes,
    ) -> bytes:
        """Encode an update and begin the attempt; returns the encoded `AdvertiseKeys`."""
        keys = attempt.advertise_keys(update, examples=examples, loss=loss, seed=seed)
        self._current = attempt
        return keys.to_bytes()

    def step(self, message: link_pb2.SecureStep) -> tuple[link_pb2.SecureStepped, Buffer | None]:
        """Answer the next message of the current attempt.

        Raises:
            PeerMisbehaved: the message is refused, which ends the attempt for this device.
            UpdateError: it is of another attempt.
        """
        about = (message.run_id, message.round, message.attempt)
        if self._current is None or self._current.about != about:
            raise UpdateError("this device is not in that attempt of secure aggregation")
        return self._current.step(message)

    def _enrolled(self) -> Credentials:
        from isthmus_clients.training.secure import Credentials
        from isthmus_privacy.secagg import ClientRequirements

        if self._credentials is None:
            requirements = ClientRequirements()
            if self._clients_min is not None:
                requirements = ClientRequirements(clients_min=self._clients_min)
            self._credentials = Credentials(
                self._signing_key.private_bytes_raw(), self._history_file, requirements
            )
        if self._welcome is not None:
            self._credentials.welcomed(self._welcome.authority, self._welcome.enrolment)
        return self._credentials
