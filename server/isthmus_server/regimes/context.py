"""What all federated attempts and model comparisons of a run share."""

from __future__ import annotations

from pathlib import Path

from isthmus.job import Job
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_privacy.secagg import Directory
from isthmus_server.model.fixed_point_sum import SUM_BYTES, WeightedSum
from isthmus_server.model.mmap_buffer import MmapBuffer
from isthmus_server.transport.link import Link


class FederatedContext:
    """The link, the job, the model's layout and the memory of update sums of one run."""

    def __init__(
        self, link: Link, job: Job, run_id: str, layout: TensorLayout, spool: Path
    ) -> None:
        """`spool` is the directory for updates too large to keep in memory while they arrive."""
        self.link = link
        self.job = job
        self.run_id = run_id
        self.layout = layout
        self.spool = spool
        self.directory = Directory(link.enrolments.authority, revoked=link.enrolments.revoked)
        self._sum: MmapBuffer | None = None

    def weighted_sum(self, declared_weight: int) -> WeightedSum:
        """An empty sum that reuses the memory of the previous one, since fresh pages cost time."""
        if self._sum is None:
            self._sum = MmapBuffer(SUM_BYTES * self.layout.size)
        return WeightedSum(self.layout.size, declared_weight, self._sum)
