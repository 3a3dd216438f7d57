"""Bytes of the blobs of a federated round, by the code that encodes them in a run."""

from __future__ import annotations

import dataclasses

import torch

from isthmus.errors import JobError, RoundFailed
from isthmus.job import Job
from isthmus.job.planned import EXACT, Figure
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.wire import link_pb2
from isthmus_privacy.compression.changes import changes_codec
from isthmus_privacy.compression.single_updates import UpdateMessages
from isthmus_privacy.dp.calibration import NoisePlan
from isthmus_privacy.secagg.ranges import USUAL_CLIP, USUAL_WEIGHT, Ranges, counts_of
from isthmus_server.regimes.base import AttemptSpec
from isthmus_server.regimes.committed_sums import CommittedSums
from isthmus_server.regimes.secure_sums.round_configs import range_config, training_config

BY_CODEC = "at most, by the codec"
"""How a bound on bytes was obtained that only the values decide."""
BY_RANGES = "exact for each width of the ring, which follows from the updates"
"""How the bytes of a sum were obtained whose range devices find."""
_NOTHING = bytes(32)
"""In place of the digests of a model and of a purpose, on which no size depends."""


@dataclasses.dataclass(frozen=True)
class PlannedNoise:
    """The noise of a job with `[privacy]` before its first round."""

    plan: NoisePlan
    clip: float

    @classmethod
    def of(cls, job: Job) -> PlannedNoise | None:
        """The noise of a job; None without `[privacy]`.

        Raises:
            JobError: no noise meets the budget.
        """
        if job.privacy is None:
            return None
        plan = NoisePlan.of_job(job)
        bound = plan.first_bound
        return cls(plan, job.privacy.clip if bound is None else bound.bound)


@dataclasses.dataclass(frozen=True)
class PlannedSums:
    """What the configurations of secure sums follow from, of a run that there is not."""

    job: Job
    layout: TensorLayout
    privacy: PlannedNoise | None
    sums: CommittedSums
    run_id: str = "plan"

    @property
    def certified(self) -> bool:
        """Devices that `isthmus run` starts have no certificates; those of a server do."""
        return not self.job.federated.clients


def update_figures(job: Job, layout: TensorLayout) -> list[Figure]:
    """What a device sends in a round: of the first round, and of the later ones if they differ.

    Messages, such as the keys and shares of secure sums, are not counted.

    Raises:
        JobError: the updates cannot be encoded, with the reason.
    """
    if job.federated.secure_aggregation:
        return _of_sums(job, layout)
    messages = UpdateMessages.of(job, layout)
    if messages is None:
        controlled = job.federated.control_variates is not None
        sent = layout.gradient_and_update if controlled else layout
        return [Figure("update", sent.nbytes, "bytes", EXACT)]
    return [Figure("update", 0, "bytes", BY_CODEC, most=messages.max_bytes)]


def model_figures(job: Job, layout: TensorLayout) -> list[Figure]:
    """What a device receives in a round of the model: as a whole, and as a change.

    A device that has the model, as it has evaluated it, receives nothing. With control variates
    the server's is sent in the form of a model, after it.
    """
    vectors = 1 if job.federated.control_variates is None else 2
    whole = Figure("model", vectors * layout.nbytes, "bytes", EXACT)
    codec = changes_codec(job, layout)
    if codec is None:
        return [whole]
    return [whole, Figure("change of the model", 0, "bytes", BY_CODEC, most=codec.nbytes)]


def _of_sums(job: Job, layout: TensorLayout) -> list[Figure]:
    noise = PlannedNoise.of(job)
    first = _sum_bytes(PlannedSums(job, layout, noise, CommittedSums()))
    if job.federated.compression is None:
        return [first]
    later = CommittedSums()
    later.magnitude = 0.0  # any: the number of bits is the job's once it is known
    others = _sum_bytes(PlannedSums(job, layout, noise, later))
    return [first, dataclasses.replace(others, name="update of a later round")]


def _sum_bytes(run: PlannedSums) -> Figure:
    """Bytes of both sums of a round, that of ranges and that of updates."""
    settings = run.job.federated
    if settings.robust is not None:
        # Groups differ by one device, which changes no ring but for the largest cohorts.
        group = settings.for_group(-(-settings.invited // settings.robust_groups))
        settings = settings if group is None else group
    spec = AttemptSpec(round=1, attempt=1, model=link_pb2.Blob(), cohort={}, settings=settings)
    try:
        if not run.job.finds_ranges:
            exact = training_config(run, spec, _NOTHING, _NOTHING).payload_bytes
            return Figure("update", exact, "bytes", EXACT)
        ranges = range_config(run, spec, _NOTHING, _NOTHING).payload_bytes
        alike = counts_of(torch.full((1,), USUAL_CLIP), [torch.ones(1)], USUAL_WEIGHT)
        known = Ranges.of(alike * settings.cohort, settings.cohort)
        least = ranges + training_config(run, spec, _NOTHING, _NOTHING, known).payload_bytes
        if settings.compression is not None:  # its ring does not follow from the ranges
            return Figure("update", least, "bytes", EXACT)
        wide = training_config(run, spec, _NOTHING, _NOTHING, Ranges.unknown(), wider=True)
        most = ranges + wide.payload_bytes
    except RoundFailed as error:
        raise JobError(str(error)) from None
    return Figure("update", least, "bytes", BY_RANGES, most=most)
