"""How fast simulated devices train and transfer, and how often they are lost."""

from __future__ import annotations

import dataclasses
import math
import random

from isthmus.job.simulation import SimulationSection

_BITS_PER_MEGABIT = 1e6


@dataclasses.dataclass(frozen=True)
class DeviceProfile:
    """Speed, bandwidth and reliability of one simulated device."""

    step_seconds: float = 0.0
    """Simulated duration of one local step."""
    down_bits_per_second: float = math.inf
    up_bits_per_second: float = math.inf
    dropout: float = 0.0
    """Probability that the device is lost during a request."""
    seed: int = dataclasses.field(default=0, compare=False)
    """Seed of the job: devices are lost during other requests with another one."""

    @classmethod
    def drawn(cls, section: SimulationSection, seed: int, index: int) -> DeviceProfile:
        """The profile of device `index`, the same in every simulation with this seed.

        Speeds and bandwidths are log-normal around the section's medians.
        """
        draw = random.Random(f"isthmus/profile/{seed}/{index}")  # noqa: S311 - not a secret
        slowness = math.exp(draw.gauss(0.0, 1.0) * section.speed_spread)
        width = math.exp(draw.gauss(0.0, 1.0) * section.bandwidth_spread)
        return cls(
            step_seconds=section.step_seconds * slowness,
            down_bits_per_second=_bits(section.down_mbit, width),
            up_bits_per_second=_bits(section.up_mbit, width),
            dropout=section.dropout,
            seed=seed,
        )

    @property
    def is_instant(self) -> bool:
        """Whether every request takes no time."""
        return self == DeviceProfile(dropout=self.dropout)

    def seconds(self, *, received: int, steps: int, sent: int) -> float:
        """Simulated duration of a request.

        Args:
            received: bytes that the device receives.
            steps: local steps, or batches that it scores.
            sent: bytes that it sends.

        >>> DeviceProfile(2.0, 8e6, 8e5).seconds(received=10**6, steps=3, sent=10**5)
        8.0
        """
        transfers = 8 * received / self.down_bits_per_second + 8 * sent / self.up_bits_per_second
        return transfers + steps * self.step_seconds

    def lost_after(self, name: str, request: str, seconds: float) -> float | None:
        """When the device is lost during a request, in seconds from its start; None if it is not.

        `request` says which: the same one is lost in every simulation with the same seed.
        """
        of = f"isthmus/dropout/{self.seed}/{name}/{request}"
        draw = random.Random(of)  # noqa: S311 - not a secret
        return draw.random() * seconds if draw.random() < self.dropout else None


def _bits(megabits: float | None, width: float) -> float:
    return math.inf if megabits is None else megabits * _BITS_PER_MEGABIT * width
