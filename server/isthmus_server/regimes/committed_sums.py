"""What the committed rounds of a run say about its compressed updates and control variates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Self

from isthmus.job import Job
from isthmus.wire import link_pb2
from isthmus_privacy.compression.update_codec import MAX_MAGNITUDE
from isthmus_privacy.slots import MAGNITUDE
from isthmus_server.storage.records import AttemptRecord, RoundRecord

MAGNITUDE_STEP = 4.0
"""Binary digits by which the magnitude of a round may differ from that of the one before: with one
device that lies about it the range of the next sum is at most 16 times too wide or too narrow."""

LARGEST_WEIGHT = "weight_max"
"""The figure of a round's training that says which largest weight its ranges have given."""


class CommittedSums:
    """The last committed sum of each participant, and the magnitude of devices' last updates.

    Participants learn from it which of their updates counted, and devices and server which values
    rounding has to represent. It follows from the round log alone, so that a server that was
    killed continues with the same.
    """

    def __init__(
        self, attempts: Iterable[AttemptRecord] = (), *, of_all_updates: bool = False
    ) -> None:
        """Read the run so far.

        Args:
            attempts: those of the run, oldest first.
            of_all_updates: whether all updates of devices count, and not only compressed ones.
        """
        self._of_all_updates = of_all_updates
        self.magnitude: float | None = None
        """Mean binary logarithm of the root mean square of what devices sent; None before the
        first compressed round."""
        self._weight_max: float | None = None
        """Largest weight of that sum, if it was not in the job."""
        self._last: dict[str, tuple[int, int]] = {}
        for record in attempts:
            self.add(record)

    @classmethod
    def of(cls, job: Job, attempts: Callable[[], Iterable[AttemptRecord]]) -> Self:
        """The sums of a run; `attempts` reads its log, for a job whose participants keep state."""
        controlled = job.federated.control_variates is not None
        compressed = job.federated.compression or job.datacenter.compression
        return cls(attempts() if compressed or controlled else (), of_all_updates=controlled)

    def add(self, record: AttemptRecord) -> None:
        """Take note of an ended attempt; only committed ones count."""
        if not isinstance(record, RoundRecord):
            return
        figures = record.training.get("federated", {})
        used = [receipt for receipt in record.receipts if receipt.status == "accepted"]
        if MAGNITUDE.name in figures:
            self._follow(figures[MAGNITUDE.name], figures.get(LARGEST_WEIGHT))
            used = [receipt for receipt in used if receipt.regime == "federated"]
        elif self._of_all_updates:
            used = [receipt for receipt in used if receipt.regime == "federated"]
        elif record.regime != "datacenter" or len(used) == 1:
            return  # its updates were not compressed
        for receipt in used:
            self._last[receipt.participant] = record.round, record.attempt

    def _follow(self, magnitude: float, weight_max: float | None) -> None:
        """Take note of the magnitude of a sum with this largest weight, if the job has none."""
        if magnitude <= -MAX_MAGNITUDE + 1:
            return  # nothing was sent, which says nothing about later updates
        if self.magnitude is not None:
            before = self.magnitude_for(1 if weight_max is None else weight_max)
            assert before is not None
            magnitude = min(before + MAGNITUDE_STEP, max(before - MAGNITUDE_STEP, magnitude))
        self.magnitude = magnitude
        self._weight_max = weight_max

    def magnitude_for(self, weight_max: float) -> float | None:
        """`magnitude` in a sum whose largest weight, by which devices divide, is this one."""
        if self.magnitude is None or self._weight_max is None:
            return self.magnitude
        return self.magnitude + math.log2(self._weight_max / weight_max)

    def tell(self, name: str, request: link_pb2.Request) -> None:
        """Add to a request for training which of the participant's updates counted last."""
        kind = request.WhichOneof("work")
        if kind == "train_local" or (kind == "train_steps" and request.train_steps.compressed):
            work = getattr(request, kind)
            work.summed_round, work.summed_attempt = self.last(name)

    def participants_with(self, names: Iterable[str]) -> int:
        """How many participants there are in committed sums, and in one of these names."""
        return len(self._last.keys() | set(names))

    def last(self, name: str) -> tuple[int, int]:
        """Round and attempt of the last committed sum that a participant is in; zeros for none."""
        return self._last.get(name, (0, 0))
