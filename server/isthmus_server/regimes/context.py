"""What all federated work of a run shares: the link, the model's layout, the sum of updates."""

from __future__ import annotations

from pathlib import Path

from isthmus.job import Job
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_privacy.secagg import Directory
from isthmus_server.model.fixed_point_sum import SUM_BYTES, WeightedSum
from isthmus_server.model.mmap_buffer import MmapBuffer
from isthmus_server.transport.link import Link


class Federation:
    """One run, as rounds and comparisons with devices see it."""

    def __init__(
        self, link: Link, job: Job, run_id: str, layout: TensorLayout, spool: Path
    ) -> None:
        """`spool` is a directory for updates that are too large to hold while they arrive."""
        self.link = link
        self.job = job
        self.run_id = run_id
        self.layout = layout
        self.spool = spool
        self.directory = Directory(link.enrolments.authority, revoked=link.enrolments.revoked)
        self._sum: MmapBuffer | None = None

    def weighted_sum(self, declared_weight: int) -> WeightedSum:
        """An empty sum, in the memory of the last one and its mean: fresh memory costs time."""
        if self._sum is None:
            self._sum = MmapBuffer(SUM_BYTES * self.layout.size)
        return WeightedSum(self.layout.size, declared_weight, self._sum)
