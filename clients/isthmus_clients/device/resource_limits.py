"""The owner's limits on CPU and memory, enforced by the device's own process.

They apply on every platform. Under systemd, the unit printed by `--print-systemd` makes the kernel
enforce the same limits.
"""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Callable

from isthmus.errors import UserError
from isthmus_clients.device.owner_limits import OwnerLimits

_NICENESS = 10
_MAX_PAUSE_SECONDS = 60.0


def apply_limits(limits: OwnerLimits) -> None:
    """Lower the priority of this process if CPU is limited, and limit its memory.

    The memory limit is RLIMIT_DATA: heap and private mappings, which are nearly all memory of a
    device. Allocations beyond it fail, and so does the work that needs them.

    Raises:
        UserError: the limit is above one already in force, or below the memory in use.
    """
    if limits.cpu_percent is not None:
        os.nice(max(_NICENESS - os.nice(0), 0))
    if limits.memory_mb is None:
        return
    size = limits.memory_mb << 20
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))
    except (ValueError, OSError) as error:
        raise UserError(f"memory_mb={limits.memory_mb} cannot be applied: {error}") from None


def max_threads(requested: int, limits: OwnerLimits) -> int:
    """Number of training threads: no more than the CPU limit can use.

    >>> max_threads(4, OwnerLimits(cpu_percent=150)), max_threads(4, OwnerLimits())
    (2, 4)
    """
    if limits.cpu_percent is None:
        return requested
    return min(requested, math.ceil(limits.cpu_percent / 100))


class CpuThrottle:
    """Pauses work so that this process uses at most a share of one core on average.

    >>> CpuThrottle(None).pause()  # without a limit it never pauses
    """

    def __init__(
        self,
        percent: int | None,
        *,
        used: Callable[[], float] = time.process_time,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """`percent` of one core; `used()` is CPU time in seconds, of all threads."""
        self._percent = percent
        self._used = used
        self._now = now
        self._sleep = sleep
        self._since = 0.0, 0.0
        self.begin()

    def begin(self) -> None:
        """Start to measure: idle time before this call is not credited."""
        if self._percent is not None:
            self._since = self._now(), self._used()

    def pause(self) -> None:
        """Sleep until the CPU time used since `begin` is within the limit."""
        if self._percent is None:
            return
        began, used = self._since
        seconds = (self._used() - used) * 100 / self._percent - (self._now() - began)
        if seconds > 0:
            self._sleep(min(seconds, _MAX_PAUSE_SECONDS))
