"""Measure training: progress reports during a round, and its profile (rates, times, memory).

Nothing here waits for the device. Its times are taken by CUDA events and read when they have
passed; a loss is copied asynchronously and read at a later step; operations are counted once, on
one forward pass.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from isthmus.job.gpu_rates import PEAK_TFLOPS, peak_tflops
from isthmus_datacenter.messages import ProgressReport
from isthmus_datacenter.training.step_figures import StepRecorder

T = TypeVar("T")

DENSE_BF16 = {name: rates["bf16"] * 1e12 for name, rates in PEAK_TFLOPS.items()}
"""Peak bf16 operations a second of known devices, by their data sheets, without sparsity."""
FORWARD_AND_BACKWARD = 3
"""Cost in forward passes: a backward pass has two matrix products for each of a forward pass."""
STEP_PARTS = ("reading", "forward_backward", "optimizer")
"""Parts of a step; collectives belong to the part that waits for them."""
ROUND_PARTS = ("exchange", "checkpoint", "evaluation")
"""Parts of a round apart from its steps."""
_REPORTED = 20
"""Figures of steps in a report: of those since the last one, which may have been lost."""
_REPORT_SECONDS = 0.5
"""Interval between two progress reports."""

SendReport = Callable[[ProgressReport], None]


class RoundProfile:
    """Times, rates and memory of one round of steps on one rank."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._started = time.monotonic()
        self.seconds = 0.0
        """Duration of the steps."""
        self._seconds = dict.fromkeys((*STEP_PARTS, *ROUND_PARTS), 0.0)
        self._pending_events: collections.deque[tuple[str, Any, Any]] = collections.deque()
        """Part, begin and end of device times that were not read yet."""
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def begin(self) -> None:
        """Mark the beginning of the steps."""
        self._started = time.monotonic()

    def end(self) -> None:
        """Wait for the device, and mark the end of the steps."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds = time.monotonic() - self._started

    @contextlib.contextmanager
    def host_time(self, part: str) -> Iterator[None]:
        """Add the wall-clock time of a block to a part; for blocks that wait for the device.

        >>> profile = RoundProfile(torch.device("cpu"))
        >>> with profile.host_time("exchange"):
        ...     pass
        >>> 0 < profile.round_figures()["exchange_seconds"] < 1
        True
        """
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[part] += time.monotonic() - began

    @contextlib.contextmanager
    def device_time(self, part: str) -> Iterator[None]:
        """Add the device's time for a block to a part."""
        if self.device.type != "cuda":
            with self.host_time(part):
                yield
            return
        begin, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._pending_events.append((part, begin, end))
        # Only what has passed: reading an event that has not would wait for the device.
        while self._pending_events and self._pending_events[0][2].query():
            self._read_oldest_event()

    def timed_reads(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield the same batches, and add the time of waiting for them to `reading`.

        >>> profile = RoundProfile(torch.device("cpu"))
        >>> list(profile.timed_reads(iter("ab")))
        ['a', 'b']
        """
        while True:
            with self.host_time("reading"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def step_figures(
        self, steps: int, examples: int, units: float, flops: float
    ) -> dict[str, float]:
        """Return the figures of the steps; rates are the whole group's, the rest this rank's.

        Args:
            steps: number of steps.
            examples: of all replicas in all steps.
            units: of all replicas in all steps.
            flops: operations of one step on one rank; 0 if unknown.
        """
        if not steps:
            return {}
        while self._pending_events:
            self._read_oldest_event()
        seconds = max(self.seconds, 1e-9)
        figures = {
            "step_seconds": seconds / steps,
            "examples_per_second": examples / seconds,
            "units_per_second": units / seconds,
            **{f"{part}_share": self._seconds[part] / seconds for part in STEP_PARTS},
            "peak_memory_gib": _peak_memory(self.device) / 2**30,
        }
        if flops:
            figures["model_flops_per_second"] = flops * steps / seconds
            peak = _peak_rate(self.device)
            if peak is not None:
                figures["mfu"] = figures["model_flops_per_second"] / peak
        return figures

    def round_figures(self) -> dict[str, float]:
        """Return the seconds of each part of the round apart from its steps."""
        return {
            f"{part}_seconds": self._seconds[part] for part in ROUND_PARTS if self._seconds[part]
        }

    def _read_oldest_event(self) -> None:
        part, begin, end = self._pending_events.popleft()
        self._seconds[part] += begin.elapsed_time(end) / 1000


@dataclasses.dataclass(frozen=True)
class _ProgressPoint:
    """State of training when a copy of the loss was requested."""

    time: float
    steps: int
    local_units: float
    """Units scored on this rank."""
    global_units: float
    """Units scored by all replicas."""


class ProgressReporter:
    """Reports the progress of one round from one rank, at most twice a second.

    Losses are summed on the device. At times a copy of their sum is requested, which is read at a
    later step, once it has arrived.
    """

    def __init__(
        self,
        send: SendReport,
        total_steps: int,
        examples: int,
        device: torch.device,
        *,
        steps_before: int = 0,
        loss_sum_before: float = 0.0,
        recorder: StepRecorder | None = None,
    ) -> None:
        """Begin to report.

        Args:
            send: receives the reports.
            total_steps: of the round.
            examples: of all replicas in one step.
            device: where the losses are.
            steps_before: steps of the round before a restart.
            loss_sum_before: sum of their losses on this rank.
            recorder: whose last figures the reports have.
        """
        self._recorder = recorder
        self._send = send
        self._total_steps = total_steps
        self._examples = examples
        self._now = self._reported = _ProgressPoint(time.monotonic(), steps_before, 0, 0)
        self._reported_sum = loss_sum_before
        self._copying: tuple[_ProgressPoint, torch.Tensor] | None = None
        self._pinned = self._copied = None
        if device.type == "cuda":
            self._pinned = torch.empty((), dtype=torch.float64, pin_memory=True)
            self._copied = torch.Event("cuda")

    def step(self, loss_sum: torch.Tensor, local_units: float, global_units: float) -> None:
        """Record a step, and report if it is time.

        Args:
            loss_sum: losses of all units scored on this rank so far, a scalar in float64.
            local_units: units of this step that were scored on this rank.
            global_units: units of this step.
        """
        now = time.monotonic()
        point = self._now
        self._now = _ProgressPoint(
            now,
            point.steps + 1,
            point.local_units + local_units,
            point.global_units + global_units,
        )
        # One copy at a time: the pinned memory is its destination.
        if self._copying is None and now - self._reported.time >= _REPORT_SECONDS:
            self._start_copy(loss_sum)
        if self._copying is not None and (self._copied is None or self._copied.query()):
            self._report(*self._copying)
            self._copying = None

    def _start_copy(self, loss_sum: torch.Tensor) -> None:
        if self._pinned is None or self._copied is None:
            self._copying = self._now, loss_sum.clone()
            return
        self._pinned.copy_(loss_sum, non_blocking=True)
        self._copied.record()
        self._copying = self._now, self._pinned

    def _report(self, point: _ProgressPoint, loss_sum: torch.Tensor) -> None:
        total = float(loss_sum)
        last = self._reported
        seconds = max(point.time - last.time, 1e-9)
        units = (point.local_units - last.local_units) or 1
        self._send(
            ProgressReport(
                steps=point.steps,
                total_steps=self._total_steps,
                loss=(total - self._reported_sum) / units,
                examples_per_second=(point.steps - last.steps) * self._examples / seconds,
                units_per_second=(point.global_units - last.global_units) / seconds,
                step_figures=tuple(
                    dataclasses.asdict(each)
                    for each in (self._recorder.recorded if self._recorder else [])[-_REPORTED:]
                ),
            )
        )
        self._reported = point
        self._reported_sum = total


def count_flops(model: nn.Module, forward: Callable[[], Any]) -> int:
    """Count the operations of forward and backward pass of one batch, running only the first.

    Returns 0 where they cannot be counted.
    """
    was_training = model.training
    model.eval()  # dropout must not advance the random number generators
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
    found = peak_tflops(torch.cuda.get_device_name(device), "bf16")
    return None if found is None else found * 1e12
