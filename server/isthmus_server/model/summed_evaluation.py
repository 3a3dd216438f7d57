"""The result of an evaluation on devices: sums over devices, and what follows from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

TRIES = 1 << 16
"""More than the tries at the evaluation of one attempt at a round, which number them: that of try n
of attempt m is m x this + n."""


def attempt_in_words(number: int) -> str:
    """An attempt at a round or a question; that of an evaluation has its try, too.

    >>> attempt_in_words(2), attempt_in_words(2 * TRIES), attempt_in_words(2 * TRIES + 1)
    ('attempt 2', 'attempt 2', 'attempt 2 try 2')
    """
    attempt, failed = divmod(number, TRIES)
    if not attempt:
        return f"attempt {number}"
    return f"attempt {attempt}" + (f" try {failed + 1}" if failed else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupEvaluation:
    """The evaluation of one group of devices by itself."""

    devices: int
    """Number of devices in the sum."""
    metrics: Mapping[str, float]
    """Metrics of their validation data, with the prefix ``devices_``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SummedEvaluation:
    """The evaluation of a round's model on the devices' validation data.

    It has no figure of a single device, unless `evaluation.per_device` asks for them.
    """

    asked: int
    """Number of devices that were asked in the last attempt."""
    devices: int
    """Number of devices in the sum; 0 without a result."""
    sums: Mapping[str, Sequence[int]]
    """The sums of the devices' whole numbers by metric, see `isthmus.task.measurements.metrics`."""
    metrics: Mapping[str, float]
    """The metrics that follow from the sums; they are also among the round's metrics."""
    groups: Mapping[str, GroupEvaluation] = dataclasses.field(default_factory=dict)
    """Sums of the groups that were summed by themselves."""
    by_device: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    """The metrics of each device's own validation data by its name, with `per_device`."""
    clipped: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """A sentence for each metric of which values were outside of its bounds."""
    error: str | None = None
    """Why there is no result, or why its first attempts failed."""
    price: float
    """Price of all attempts."""
    device_bytes: int
    """Bytes to and from devices."""
    bytes_down: int = 0
    """Bytes to devices."""
    seconds: float

    @property
    def bytes_up(self) -> int:
        """Bytes from devices."""
        return self.device_bytes - self.bytes_down
