"""The open run of a device as the server's request describes it, without the task's code."""

from __future__ import annotations

import dataclasses

from isthmus.errors import UpdateError
from isthmus.job import Job, read_job
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.wire import link_pb2

MAX_MODELS = 8
"""Maximum number of models of one comparison."""


@dataclasses.dataclass(frozen=True)
class ActiveRun:
    """What the agent checks requests against, before and after the task works on them."""

    run_id: str
    job: Job
    layout: TensorLayout
    """Of the server's model, which the task's must equal; empty with a Flower app."""

    @classmethod
    def of(cls, work: link_pb2.OpenRun) -> ActiveRun:
        """Read the request that opens a run.

        Raises:
            JobError: the job cannot be read.
            UpdateError: the layout is not valid.
        """
        job = read_job(work.job)
        flower = job.federated.flower
        if flower is not None and flower.app is not None:
            return cls(work.run_id, job, TensorLayout(()))
        return cls(work.run_id, job, TensorLayout.from_header(work.layout))

    @property
    def has_app(self) -> bool:
        """Whether a Flower app runs instead of the task."""
        return self.job.federated.flower is not None and self.job.federated.flower.app is not None

    def check_size(self, request: link_pb2.Request, size: int) -> None:
        """Check the announced size of the payload of a request to train, score or answer.

        Raises:
            UpdateError: it is not that of its models, or above the job's limit.
        """
        kind = request.WhichOneof("work")
        if kind == "flower":
            assert self.job.federated.flower is not None
            max_bytes = self.job.federated.flower.max_bytes
            if size > max_bytes:
                raise UpdateError(
                    f"a message of {size} bytes was announced where federated.flower.max_bytes="
                    f"{max_bytes}"
                )
            return
        count = 2 if request.train_local.with_gradient else 1
        if kind == "score":
            candidates = request.score.candidates
            count = 1 + max((number for mean in candidates for number in mean.of), default=0)
            if count > MAX_MODELS:
                raise UpdateError(
                    f"{count} models are to be scored, and the maximum is {MAX_MODELS}"
                )
        if size != count * self.layout.nbytes:
            raise UpdateError(
                f"{count} models in {size} bytes were announced; a model of this run has "
                f"{self.layout.nbytes}"
            )

    def check_plain_allowed(self) -> None:
        """Refuse to send figures in plaintext if the opened job promises secure aggregation.

        Raises:
            UpdateError: it does.
        """
        if self.job.federated.secure_aggregation:
            raise UpdateError(
                f"{self.job.name!r} was opened with federated.secure_aggregation, and this request "
                "would send this device's own figures in plaintext"
            )
