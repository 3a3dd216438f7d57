"""Time limits of the steps of secure aggregation after training.

They end a step for devices that are connected but do not answer; a device whose connection is
lost leaves after its lease, which is shorter. The automatic limits are therefore generous. They
allow for devices that all run on one loaded machine:

    step    60 s + 1 ms x n x (n + 4 k)      n devices in the roster, k neighbours of each
    upload  the same + one vector at 0.25 MB/s + all n vectors at 20 MB/s

In a short step, each of the n devices verifies n signatures and does two key agreements for each
of about 2 k neighbours.

>>> from isthmus.job.tables import TimeSection
>>> from isthmus_privacy.secagg.config import RoundConfig
>>> config = RoundConfig(
...     run_id="demo", round=1, attempt=1, model_hash=bytes(32), purpose=bytes(32),
...     size=1_000_000, clients_max=400,
... )
>>> limits = StepLimits.of(TimeSection(), config, clients=400)
>>> round(limits.step_seconds), round(limits.upload_seconds)
(590, 686)
>>> StepLimits.of(TimeSection(secure_step_seconds=20), config, clients=400).step_seconds
20.0
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from isthmus_privacy.secagg.config import RoundConfig

if TYPE_CHECKING:
    from isthmus.job.tables import TimeSection

_SHORTEST_SECONDS = 60.0
_PAIR_SECONDS = 0.001
"""Time that one device may need for one other device."""
_NEIGHBOUR_PAIRS = 4
"""Work for a neighbour, relative to the verification of a roster entry."""
_DEVICE_BYTES_PER_SECOND = 250_000
"""Slow uplink of one device (2 Mbit/s)."""
_SERVER_BYTES_PER_SECOND = 20_000_000
"""Rate at which the server at least receives and adds vectors."""


@dataclasses.dataclass(frozen=True)
class StepLimits:
    """Limits of one attempt, in seconds."""

    step_seconds: float
    """Each of sharing keys, signing and unmasking."""
    upload_seconds: float
    """Sending all masked vectors."""
    extends_round: bool
    """Whether `upload_seconds` only applies if less is left of the round; false if the job sets
    it."""

    @classmethod
    def of(cls, time: TimeSection, config: RoundConfig, clients: int) -> StepLimits:
        """The job's limits, automatic where it has none, for a roster of `clients` devices."""
        pairs = clients * (clients + _NEIGHBOUR_PAIRS * config.graph(clients).degree)
        step = _SHORTEST_SECONDS + _PAIR_SECONDS * pairs
        upload = (
            step
            + config.payload_bytes / _DEVICE_BYTES_PER_SECOND
            + clients * config.payload_bytes / _SERVER_BYTES_PER_SECOND
        )
        return cls(
            time.secure_step_seconds or step,
            time.secure_upload_seconds or upload,
            extends_round=time.secure_upload_seconds is None,
        )

    def upload_deadline(self, now: float, round_end: float) -> float:
        """Latest time for masked vectors, in loop time.

        Args:
            now: the beginning of the step.
            round_end: the end of the round's time, which training may have used up.
        """
        own = now + self.upload_seconds
        return max(own, round_end) if self.extends_round else own
