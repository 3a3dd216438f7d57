"""A simulated device's part in a secure sum: its vector is encoded as for masking, and not masked.

The masks cancel in the sum, which is thus the same; see
`isthmus_server.regimes.secure_sums.unmasked`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import mmap
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence

import torch

from isthmus.errors import UpdateError
from isthmus.transport.blobs import Buffer
from isthmus.wire import link_pb2
from isthmus_clients.device.active_run import ActiveRun
from isthmus_clients.device.residuals import Residual, Residuals
from isthmus_clients.device.secure_sessions import (
    KeptUpdate,
    Origin,
    SecureSessions,
    without_effect,
)
from isthmus_clients.device.task_host import TaskHost
from isthmus_clients.device.update_tally import UpdateTally
from isthmus_clients.training.secure import Credentials, SecureParticipation, encode_repeatably
from isthmus_privacy.purpose import ranges_run_id
from isthmus_privacy.random_groups import RandomGroup
from isthmus_privacy.secagg.config import BIN_LEVELS, RoundConfig
from isthmus_privacy.secagg.history import StartModel
from isthmus_privacy.slots import Slot

_LARGE = 1 << 20
"""Bytes of an update that waits for the range of its sum in a file."""

SIMULATED = Credentials(bytes(32))
"""Credentials of all simulated devices, which sign nothing and keep no history of sums."""


def unchecked(payload: Buffer) -> link_pb2.Blob:
    """A name of bytes that stay in this process, where nobody checks a SHA-256."""
    return link_pb2.Blob(sha256=os.urandom(32), size=len(payload))


@functools.lru_cache(maxsize=8)
def read_once(config: bytes) -> RoundConfig:
    """The configuration of a sum, which all devices of its cohort share.

    Reading it, and its hash, took as long for each of them as a small model's training.
    """
    return RoundConfig.from_bytes(config)


class UnmaskedParticipation(SecureParticipation):
    """One attempt of a simulated device, which has no session of the protocol."""

    def __init__(
        self, about: tuple[str, int, int], config: bytes, slots: Sequence[Slot], *, whole: int
    ) -> None:
        """Check the form of the configuration; see `SecureParticipation`.

        Raises:
            UpdateError: it is of another round than the request.
        """
        self.about = about
        self.config = read_once(config)
        if (self.config.run_id, self.config.round, self.config.attempt) != about:
            raise UpdateError("the configuration is of another round than the request")
        self.config.check_form(slots, whole=whole)
        self.trained = self.config.round  # it has no history, by which it could be another one
        self.sent = None


class UnmaskedSessions(SecureSessions):
    """The secure sums of one simulated device.

    `payload` is the encoded vector of the last one.
    """

    def __init__(self, name: str, residuals: Residuals) -> None:
        """`name` of the device, and what all devices have not sent yet."""
        self._name = name
        self._residuals = residuals
        self._tally = UpdateTally(None)  # `join` counts nothing in it
        self._kept = self._ranged = None
        self._ahead: tuple[tuple[str, int, int], Residual] | None = None
        """What `begin` has applied to the model of an attempt."""
        self.payload: Buffer | None = None

    @property
    def identity(self) -> bytes:
        """None: a simulated device signs nothing."""
        return b""

    def run_opened(self, run_id: str) -> None:
        """Do nothing: there is no history."""

    def begin(self, run: ActiveRun, work: link_pb2.TrainLocal, payload: Buffer) -> None:
        """Prepare the model for a batch, which is trained before `train` is called."""
        self._ahead = None
        compressed = run.job.federated.compression is not None and not work.gradient_scale
        if compressed and (work.secure or work.ranges):
            residual = self.step_ahead(run, work, payload)
            self._ahead = (work.run_id, work.round, work.attempt), residual

    def step_ahead(self, run: ActiveRun, work: link_pb2.TrainLocal, payload: Buffer) -> Residual:
        """See `SecureSessions.step_ahead`; does nothing more after `begin`."""
        ahead = self._ahead
        self._ahead = None
        if ahead is not None and ahead[0] == (work.run_id, work.round, work.attempt):
            return ahead[1]
        return super().step_ahead(run, work, payload)

    def read_config(self, config: bytes) -> RoundConfig:
        """See `SecureSessions.read_config`; once for all devices."""
        return read_once(config)

    def name_model(self, run: ActiveRun, work: link_pb2.TrainLocal, payload: Buffer) -> bytes:
        """The SHA-256 of what was received: nothing that it could be compared with is kept."""
        return work.model.sha256

    def trained_round(self, model: bytes, work: link_pb2.TrainLocal, state: str) -> int:
        """The round of the request: there is no history, by which it could be another one."""
        return work.round

    def rho(self, run_id: str) -> float:
        """0: there is no history of sums."""
        return 0.0

    def hold(self, host: TaskHost, kept: KeptUpdate) -> KeptUpdate:
        """Keep a large update in a file without a name: a cohort of them need not fit memory."""
        if kept.result is None or len(kept.result[1]) < _LARGE:
            return kept
        trained, update = kept.result
        with tempfile.TemporaryFile() as file:
            file.write(update)
            file.flush()
            mapped = mmap.mmap(file.fileno(), len(update))
        host.release(kept.request.id)
        return dataclasses.replace(kept, result=(trained, memoryview(mapped)))

    def propose_update_sum(
        self, run: ActiveRun, work: link_pb2.TrainLocal, config: bytes, origin: Origin
    ) -> SecureParticipation:
        """See `SecureSessions.propose_update_sum`.

        Without what the sum and the vector are for: it is hashed for signatures and the history.
        """
        about = (work.run_id, work.round, work.attempt)
        return UnmaskedParticipation(about, config, run.update_slots(work), whole=0)

    def propose_range_sum(
        self, run: ActiveRun, work: link_pb2.TrainLocal, origin: Origin
    ) -> SecureParticipation:
        """See `SecureSessions.propose_range_sum`, and `propose_update_sum`."""
        run.check_ranges_wanted()
        about = (ranges_run_id(work.run_id), work.round, work.attempt)
        return UnmaskedParticipation(about, work.ranges, run.range_slots, whole=BIN_LEVELS)

    def propose(
        self,
        about: tuple[str, int, int],
        config: bytes,
        name: bytes,
        purpose: bytes,
        slots: Sequence[Slot],
        *,
        size: int,
        start: StartModel,
        selected: bool = True,
        whole: int = 0,
        group: RandomGroup | None = None,
    ) -> SecureParticipation:
        """See `SecureSessions.propose`."""
        return UnmaskedParticipation(about, config, slots, whole=whole)

    def join(
        self,
        attempt: SecureParticipation,
        vector: torch.Tensor | None,
        examples: int,
        figures: Mapping[str, float],
        seed: bytes,
        note: Callable[[bool], None] = lambda usable: None,
    ) -> link_pb2.Reply:
        """Encode a vector; one that cannot be encoded has no effect.

        Nothing is noted: simulated devices have no owners, and the server's lines count them.
        """
        config = attempt.config
        encoded = None
        if vector is not None:
            with contextlib.suppress(UpdateError):
                encoded = encode_repeatably(config, vector, examples, figures, seed)
                attempt.sent = encoded.sent
        if encoded is None:
            zeros, weight, figures = without_effect(config, vector)
            encoded = encode_repeatably(config, zeros, weight, figures, seed)
        self.payload = encoded.ring.payload()
        return link_pb2.Reply(trained=link_pb2.Trained(result=unchecked(self.payload)))

    def _enrolled(self) -> Credentials:
        return SIMULATED
