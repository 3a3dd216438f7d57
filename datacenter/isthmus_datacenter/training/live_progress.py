"""How training goes, said while it goes on: twice a second, and never by waiting for the device.

Losses are added up on the device. Now and then a copy of their sum is asked for; it is read at a
later step, once it has arrived.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import torch

from isthmus_datacenter.service.messages import ProgressReport

_SECONDS = 0.5
"""Between two reports."""

SendProgress = Callable[[ProgressReport], None]


@dataclasses.dataclass(frozen=True)
class _Mark:
    """Where training was when a copy was asked for."""

    at: float
    steps: int
    mine: int
    """Units scored here."""
    everyones: int
    """Units scored by all replicas."""


class Live:
    """Reports on one stretch of steps, from the one rank that is asked to."""

    def __init__(
        self,
        send_progress: SendProgress,
        steps: int,
        examples: int,
        device: torch.device,
        *,
        done: int = 0,
        summed: float = 0.0,
    ) -> None:
        """Of `steps` in all, each on `examples` of all replicas together.

        Of them `done` were made before, and gave the losses that were `summed`.
        """
        self._send_progress = send_progress
        self._total_steps = steps
        self._examples = examples
        self._mark = self._last = _Mark(time.monotonic(), done, 0, 0)
        self._last_sum = summed
        self._arriving: tuple[_Mark, torch.Tensor] | None = None
        self._room = self._arrival = None
        if device.type == "cuda":
            self._room = torch.empty((), dtype=torch.float64, pin_memory=True)
            self._arrival = torch.Event("cuda")

    def step(self, summed: torch.Tensor, mine: int, everyones: int) -> None:
        """After a step.

        Args:
            summed: the losses of all units scored here so far, a scalar in float64.
            mine: units of this step, scored here.
            everyones: units of this step.
        """
        now, mark = time.monotonic(), self._mark
        self._mark = _Mark(now, mark.steps + 1, mark.mine + mine, mark.everyones + everyones)
        if self._arriving is None and now - self._last.at >= _SECONDS:
            self._ask(summed)
        if self._arriving is not None and (self._arrival is None or self._arrival.query()):
            self._report(*self._arriving)
            self._arriving = None

    def _ask(self, summed: torch.Tensor) -> None:
        if self._room is None or self._arrival is None:
            self._arriving = self._mark, summed.clone()
            return
        self._room.copy_(summed, non_blocking=True)
        self._arrival.record()
        self._arriving = self._mark, self._room

    def _report(self, mark: _Mark, summed: torch.Tensor) -> None:
        total, last = float(summed), self._last
        seconds = max(mark.at - last.at, 1e-9)
        self._send_progress(
            ProgressReport(
                steps=mark.steps,
                total_steps=self._total_steps,
                loss=(total - self._last_sum) / max(mark.mine - last.mine, 1),
                examples_per_second=(mark.steps - last.steps) * self._examples / seconds,
                units_per_second=(mark.everyones - last.everyones) / seconds,
            )
        )
        self._last, self._last_sum = mark, total
