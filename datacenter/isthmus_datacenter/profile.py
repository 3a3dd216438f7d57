"""What a stretch of training cost: rates, waiting, memory and use of the device.

Nothing here waits for the device: times are the host's, read where the host waits anyway, and
operations are counted once, on one forward pass.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

T = TypeVar("T")

DENSE_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "A10": 125e12}
"""Operations a second of known devices, by their data sheets, without sparsity."""
_FORWARD_AND_BACKWARD = 3
"""In forward passes: a backward pass multiplies twice where a forward pass multiplies once."""


class Profile:
    """Figures of one stretch of steps on one rank."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.reading = 0.0
        """Seconds spent waiting for batches."""
        self._started = time.monotonic()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def reads(self, stream: Iterator[T]) -> Iterator[T]:
        """The same stream, its waits added up.

        >>> profile = Profile(torch.device("cpu"))
        >>> list(profile.reads(iter("ab"))), profile.reading < 1
        (['a', 'b'], True)
        """
        while True:
            began = time.monotonic()
            try:
                batch = next(stream)
            except StopIteration:
                return
            finally:
                self.reading += time.monotonic() - began
            yield batch

    def figures(self, steps: int, examples: int, units: int, flops: int | None) -> dict[str, float]:
        """Of the whole group, but for memory and reading, which are this rank's.

        `flops` are those of one step on this rank. Call it when the device is done.
        """
        if not steps:
            return {}
        seconds = max(time.monotonic() - self._started, 1e-9)
        found = {
            "step_seconds": seconds / steps,
            "examples_per_second": examples / seconds,
            "units_per_second": units / seconds,
            "reading_share": self.reading / seconds,
            "peak_memory_gib": _peak_memory(self.device) / 2**30,
        }
        peak = _peak_rate(self.device)
        if flops is not None and peak is not None:
            found["mfu"] = flops * steps / seconds / peak
        return found


def count_flops(model: nn.Module, forward: Callable[[], Any]) -> int | None:
    """Operations of a forward and a backward pass of one batch, without making the second.

    None where they cannot be counted.
    """
    was_training = model.training
    model.eval()  # so that nothing random is drawn: the training goes on as if nobody had looked
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            counter = FlopCounterMode(display=False)
            with counter:
                forward()
    except (RuntimeError, NotImplementedError):
        return None
    finally:
        model.train(was_training)
    return _FORWARD_AND_BACKWARD * int(counter.get_total_flops()) or None


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _peak_rate(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((rate for known, rate in DENSE_BF16.items() if known in name), None)
