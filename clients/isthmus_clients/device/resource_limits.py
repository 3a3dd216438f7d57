"""An owner's caps on CPU and memory, held by the device's own process.

They hold wherever it runs. Where systemd runs it, the unit that `--print-systemd` prints has the
kernel hold the same ones from outside.
"""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Callable

from isthmus.errors import UserError
from isthmus_clients.device.owner_limits import Policy

_NICENESS = 10
_LONGEST_REST = 60.0


def hold(policy: Policy) -> None:
    """Put this process behind others if there is a cap on CPU, and under the cap on memory.

    Memory is what the kernel calls data: heap and private mappings, which is nearly all that a
    device has. Beyond the cap an allocation fails, and the work with it.

    Raises:
        UserError: the cap is above one that is in force already, or below what is in use.
    """
    if policy.cpu_percent is not None:
        os.nice(max(_NICENESS - os.nice(0), 0))
    if policy.memory_mb is None:
        return
    size = policy.memory_mb << 20
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))
    except (ValueError, OSError) as error:
        raise UserError(f"memory_mb={policy.memory_mb} cannot be held to: {error}") from None


def threads(wanted: int, policy: Policy) -> int:
    """Threads to train with: no more than the cap on CPU has use for.

    >>> threads(4, Policy(cpu_percent=150)), threads(4, Policy())
    (2, 4)
    """
    if policy.cpu_percent is None:
        return wanted
    return min(wanted, math.ceil(policy.cpu_percent / 100))


class Pace:
    """Rests, so that this process has no more than a share of one core on average.

    >>> Pace(None).rest()  # without a cap: never
    """

    def __init__(
        self,
        percent: int | None,
        *,
        used: Callable[[], float] = time.process_time,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`percent` of one core; `used()` is CPU time in seconds, of all threads."""
        self._percent = percent
        self._used, self._now, self._sleep = used, now, sleep
        self.begin()

    def begin(self) -> None:
        """Work begins: what was not used before counts for nothing."""
        self._since = self._now(), self._used()

    def rest(self) -> None:
        """Sleep for as long as what was used since `begin` asks for."""
        if self._percent is None:
            return
        began, used = self._since
        due = (self._used() - used) * 100 / self._percent - (self._now() - began)
        if due > 0:
            self._sleep(min(due, _LONGEST_REST))
