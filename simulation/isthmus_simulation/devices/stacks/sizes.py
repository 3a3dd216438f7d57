"""How many devices are stacked."""

from __future__ import annotations

FIRST_STACK = 4
"""Devices of the first stack, whose step tells how much memory a device takes. Larger stacks have a
multiple of it, so that most stacks of a batch are of one size."""
_STACK = 64
"""Most devices of a stack."""
_STEP_BYTES = {"cpu": 8 << 20, "cuda": 1 << 30}
"""Most bytes of the tensors of a step, unless one device takes more. On a processor they should
stay in its cache, whose part for one core is some MiB."""


def most_devices(device: str, bytes_per_device: int) -> int:
    """Most devices of a stack.

    Args:
        device: type of the device that trains.
        bytes_per_device: that the tensors of a step need; 0 if it is not known yet.
    """
    if not bytes_per_device:
        return FIRST_STACK
    most = max(1, min(_STACK, _STEP_BYTES[device] // bytes_per_device))
    return most // FIRST_STACK * FIRST_STACK or most


def places(devices: int, most: int) -> int:
    """Places of a stack of some devices, of which a few may stay empty.

    The computation is recorded for few numbers of places then, and which it is depends on nothing
    before, so that a run that was interrupted goes on with the same bits.
    """
    return min(-(-devices // FIRST_STACK) * FIRST_STACK, most)
