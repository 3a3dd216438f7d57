"""What a stretch of training cost: rates, where the time went, memory and use of the device.

Nothing here waits for the device: its times are taken by events in its own queue and read when
they have passed, and operations are counted once, on one forward pass.
"""

from __future__ import annotations

import collections
import contextlib
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
FORWARD_AND_BACKWARD = 3
"""In forward passes: a backward pass multiplies twice where a forward pass multiplies once."""
STEP = ("reading", "passes", "optimizer")
"""The parts of a step; collectives are in the part that they belong to."""
AROUND = ("exchange", "checkpoint", "evaluation")
"""What a round does beside its steps."""


class Profile:
    """Figures of one stretch of steps on one rank."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._started = time.monotonic()
        self.seconds = 0.0
        """From the beginning to the end of the steps."""
        self._seconds = dict.fromkeys((*STEP, *AROUND), 0.0)
        self._queued: collections.deque[tuple[str, Any, Any]] = collections.deque()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def begin(self) -> None:
        """The steps begin now."""
        self._started = time.monotonic()

    def end(self) -> None:
        """The steps end when the device is done with them."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds = time.monotonic() - self._started

    @contextlib.contextmanager
    def host(self, part: str) -> Iterator[None]:
        """Add what a block takes by the clock to a part: for blocks that wait for the device.

        >>> profile = Profile(torch.device("cpu"))
        >>> with profile.host("exchange"):
        ...     pass
        >>> 0 < profile.around()["exchange_seconds"] < 1
        True
        """
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[part] += time.monotonic() - began

    @contextlib.contextmanager
    def device_time(self, part: str) -> Iterator[None]:
        """Add what the device takes for a block to a part."""
        if self.device.type != "cuda":
            with self.host(part):
                yield
            return
        begin, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._queued.append((part, begin, end))
        while self._queued and self._queued[0][2].query():
            self._take()

    def reads(self, stream: Iterator[T]) -> Iterator[T]:
        """The same stream, its waits added up.

        >>> profile = Profile(torch.device("cpu"))
        >>> list(profile.reads(iter("ab")))
        ['a', 'b']
        """
        while True:
            with self.host("reading"):
                batch = next(stream, None)
            if batch is None:
                return
            yield batch

    def figures(self, steps: int, examples: int, units: int, flops: float) -> dict[str, float]:
        """Of the whole group, but for memory and times, which are this rank's.

        `flops` are those of one step on one rank, 0 if they are not known.
        """
        if not steps:
            return {}
        while self._queued:
            self._take()
        seconds = max(self.seconds, 1e-9)
        found = {
            "step_seconds": seconds / steps,
            "examples_per_second": examples / seconds,
            "units_per_second": units / seconds,
            **{f"{part}_share": self._seconds[part] / seconds for part in STEP},
            "peak_memory_gib": _peak_memory(self.device) / 2**30,
        }
        if flops:
            found["model_flops_per_second"] = flops * steps / seconds
            peak = _peak_rate(self.device)
            if peak is not None:
                found["mfu"] = found["model_flops_per_second"] / peak
        return found

    def around(self) -> dict[str, float]:
        """Seconds of what was done beside the steps."""
        return {f"{part}_seconds": self._seconds[part] for part in AROUND if self._seconds[part]}

    def _take(self) -> None:
        part, begin, end = self._queued.popleft()
        self._seconds[part] += begin.elapsed_time(end) / 1000


def count_flops(model: nn.Module, forward: Callable[[], Any]) -> int:
    """Operations of a forward and a backward pass of one batch, without making the second.

    0 where they cannot be counted.
    """
    was_training = model.training
    model.eval()  # so that nothing random is drawn: the training goes on as if nobody had looked
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            counter = FlopCounterMode(display=False)
            with counter:
                forward()
    except (RuntimeError, NotImplementedError):
        return 0
    finally:
        model.train(was_training)
    return FORWARD_AND_BACKWARD * int(counter.get_total_flops())


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _peak_rate(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((rate for known, rate in DENSE_BF16.items() if known in name), None)
