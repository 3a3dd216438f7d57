"""The time that the bytes of a round alone take on this machine: to copy, hash and write them.

A round of devices that compute nothing is bytes only. Its floor is what no program can leave out,
at the rates of one processor and of the disk, spread over all processors without any wait:

* each device copies the model into its own memory, and writes an update of the same size there;
* the server reads each update and adds it, changes the model, and stores it: hashed and on disk;
* in messages, in both directions for each device: the bytes into a socket and out of it, and the
  SHA-256 at both ends.

>>> rates = Rates(copied=10e9, hashed=1e9, written=0.5e9)
>>> Floor(rates, processors=2).seconds(100e6, devices=4, messages=False)
0.27
>>> Floor(rates, processors=2).seconds(100e6, devices=4, messages=True)
1.15
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_TRIES = 3


@dataclass(frozen=True)
class Rates:
    """Bytes per second: of one processor, and of the disk."""

    copied: float
    """From one place in memory to another."""
    hashed: float
    """With SHA-256."""
    written: float
    """To a file, until it is on the disk."""

    @classmethod
    def measured(cls, folder: Path, size: int) -> Rates:
        """Measure them with blocks of `size` bytes; the file is made in `folder`."""
        source = bytearray(os.urandom(1 << 20) * max(1, size >> 20))
        target = bytearray(len(source))
        file = folder / "floor"

        def copy() -> None:
            target[:] = source

        def write() -> None:
            with file.open("wb", buffering=0) as opened:
                opened.write(source)
                os.fsync(opened.fileno())

        try:
            return cls(
                *(
                    len(source) / _best(work)
                    for work in (copy, lambda: hashlib.sha256(source), write)
                )
            )
        finally:
            file.unlink(missing_ok=True)


@dataclass(frozen=True)
class Floor:
    """The floor of rounds on this machine."""

    rates: Rates
    processors: int

    def seconds(self, model: float, *, devices: int, messages: bool) -> float:
        """The least time of a round, for a model of so many bytes."""
        rates = self.rates
        # In and out of a device's memory, and the sum.
        work = 3 * devices * model / rates.copied
        if messages:
            ends = 2 * 2 * devices * model
            work += ends / rates.copied + ends / rates.hashed
        work += 2 * model / rates.copied  # the sum becomes the model
        # Hashed while it is written.
        stored = max(model / rates.hashed, model / rates.written)
        return work / self.processors + stored


def _best(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_TRIES):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
