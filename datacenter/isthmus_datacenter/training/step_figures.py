"""Loss, gradient norm, learning rate and throughput of every n-th step, without a wait for each.

Numbers stay on the device until a later step finds that their copy has arrived. Between these steps
nothing is computed, and no rank waits for another.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from isthmus_datacenter.messages import RecordedStep


@dataclasses.dataclass(frozen=True)
class _Copying:
    """Figures of a step whose loss and norm are on their way."""

    figures: RecordedStep
    numbers: torch.Tensor
    """Loss and norm, float64 (2), in the host's memory."""
    arrived: torch.Event | None


class StepRecorder:
    """Records figures of some steps of one round, the same ones on all ranks."""

    def __init__(
        self,
        interval: int,
        device: torch.device,
        ranks: int,
        *,
        counts_losses: bool = True,
        earlier: Iterable[RecordedStep] = (),
    ) -> None:
        """Begin with a round, or within it.

        Args:
            interval: steps from one record to the next.
            device: of the losses and gradients.
            ranks: number of ranks, which all record.
            counts_losses: whether the losses of this rank count.
            earlier: what was recorded of the round before a restart.
        """
        self.recorded: list[RecordedStep] = [*earlier]
        """Figures that have arrived, in the order of steps."""
        self._interval = interval
        self._device = device
        self._ranks = ranks
        self._counts_losses = counts_losses
        self._copying: collections.deque[_Copying] = collections.deque()
        self._since = time.monotonic()
        self._units = 0.0
        """Units of all replicas since then."""

    def is_due(self, step: int) -> bool:
        """Whether a step, from 0, is recorded."""
        return (step + 1) % self._interval == 0

    def count(self, units: float) -> None:
        """Note the units of all replicas in a step that was taken."""
        self._units += units
        while self._copying and self._has_arrived(self._copying[0]):
            self._read(self._copying.popleft())

    def record(
        self,
        step: int,
        loss_sum: torch.Tensor,
        units: float,
        norms: Sequence[torch.Tensor],
        learning_rate: float | None,
    ) -> None:
        """Record a step. All ranks call this together.

        Args:
            step: from 0.
            loss_sum: losses of the units scored on this rank, a scalar.
            units: of all replicas.
            norms: of the gradients of each optimizer, over all ranks, scalars.
            learning_rate: of the first group of parameters.
        """
        now = time.monotonic()
        rate = self._units / max(now - self._since, 1e-9)
        self._since = now
        self._units = 0.0
        total = loss_sum.double() * self._counts_losses
        if self._ranks > 1:
            dist.all_reduce(total)
        norm = torch.stack([each.double() for each in norms]).norm()
        numbers = torch.stack([total / (units or 1), norm])
        figures = RecordedStep(
            step=step + 1,
            loss=0.0,
            gradient_norm=0.0,
            learning_rate=learning_rate,
            units_per_second=rate,
        )
        if self._device.type != "cuda":
            self._read(_Copying(figures, numbers, None))
            return
        pinned = torch.empty(2, dtype=torch.float64, pin_memory=True)
        pinned.copy_(numbers, non_blocking=True)
        arrived = torch.Event("cuda")
        arrived.record()
        self._copying.append(_Copying(figures, pinned, arrived))

    def finish(self) -> Sequence[RecordedStep]:
        """Wait for what is on its way, and return all records of the round."""
        while self._copying:
            copying = self._copying.popleft()
            if copying.arrived is not None:
                copying.arrived.synchronize()
            self._read(copying)
        return self.recorded

    def _has_arrived(self, copying: _Copying) -> bool:
        return copying.arrived is None or bool(copying.arrived.query())

    def _read(self, copying: _Copying) -> None:
        loss, norm = copying.numbers.tolist()
        # In fp16 a step whose gradients overflow is not taken, and has no figures.
        if math.isfinite(loss) and math.isfinite(norm):
            self.recorded.append(
                dataclasses.replace(copying.figures, loss=loss, gradient_norm=norm)
            )
