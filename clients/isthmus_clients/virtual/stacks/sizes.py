"""How many devices are stacked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

FIRST_STACK = 4
"""Devices of the first stack, whose step tells how much memory a device takes. Larger stacks have a
multiple of it, so that most stacks of a batch are of one size."""
_STACK = 64
"""Most devices of a stack."""
_STEP_BYTES = {"cpu": 6 << 20, "cuda": 1 << 30}
"""Most bytes of the tensors of a step, unless one device takes more. On a processor they should
stay in its cache, whose part for one core is some MiB."""
_RECORDING = 256
"""About the cost of recording the computation for another number of devices, in steps of one
device."""


class StackSizes:
    """Chooses how many devices are stacked."""

    def __init__(self, device: str) -> None:
        """`device` is the type of the device that trains."""
        self._step_bytes = _STEP_BYTES[device]
        self._empty: Counter[int] = Counter()
        """Steps of empty places so far, by the number of devices of a stack."""

    def most(self, bytes_per_device: int) -> int:
        """Most devices of a stack, whose step needs so many bytes for each; 0 if not known yet."""
        if not bytes_per_device:
            return FIRST_STACK
        most = max(1, min(_STACK, self._step_bytes // bytes_per_device))
        return most // FIRST_STACK * FIRST_STACK or most

    def places(self, devices: int, steps: int, recorded: Collection[int]) -> int:
        """Places of a stack of some devices.

        A larger number for which the computation is recorded is used until the empty places have
        cost as much as recording it anew.

        Args:
            devices: in the stack.
            steps: of its training.
            recorded: numbers of places for which the computation is recorded.
        """
        larger = [size for size in recorded if size > devices]
        if devices in recorded or not larger:
            return devices
        self._empty[devices] += (min(larger) - devices) * steps
        return min(larger) if self._empty[devices] <= _RECORDING else devices
