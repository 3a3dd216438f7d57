"""Which rank holds what: the degrees of parallelism, the ZeRO stage, and the mesh they make.

>>> layout = ParallelDims(ranks=8, zero_stage=3, tensor=2, pipeline=2, microbatches=4)
>>> layout.axes
{'pipeline': 2, 'shard': 2, 'tensor': 2}
>>> layout.place(5)
Coordinates(pipeline=1, data=0, tensor=1)
>>> ParallelDims(ranks=4, zero_stage=0).axes
{'replicate': 4, 'shard': 1}
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from isthmus.errors import UserError
from isthmus.job.datacenter import DatacenterSection

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
Precision = Literal["fp32", "bf16", "fp16"]

_LOOPED = ("interleaved", "zero_bubble")
_STAGES_PER_RANK = 2
"""Of the schedules that loop over the ranks."""


class LayoutError(UserError):
    """The model cannot be laid out on the ranks as the job says; the message has the arithmetic."""


@dataclasses.dataclass(frozen=True)
class Coordinates:
    """Where one rank is on the mesh."""

    pipeline: int
    data: int
    """Which replica: decides what data the rank trains on."""
    tensor: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """How one model lies on the ranks.

    Every ZeRO stage is the same code, `fully_shard`, on another mesh or with another option:
    stage 0 shards over an axis of one rank and replicates over the rest; stages 1 and 2 keep
    gathered parameters from forward to backward, and differ only when several pieces make a step;
    stage 3 gathers them twice. At rest, stages 1 to 3 hold a share of everything. Only stage 0 on
    processors leaves it out (`adds_up`).

    The innermost axis is tensor parallelism, which talks most, then data, then pipeline.
    """

    ranks: int
    """Size of the group."""
    zero_stage: int
    """0 to 3, as in Rajbhandari et al. 2020."""
    tensor: int = 1
    """Ranks that share each matrix."""
    pipeline: int = 1
    """Ranks that share the layers."""
    schedule: Schedule = "1f1b"
    microbatches: int = 1
    """Pieces that are in the pipeline together."""
    accumulate: int = 1
    """Pieces of a batch that are trained one after the other."""
    precision: Precision = "fp32"
    compile: bool = False
    checkpoint_activations: bool = False

    @classmethod
    def of(cls, section: DatacenterSection, ranks: int) -> ParallelDims:
        """The layout a job asks for, on the ranks there are.

        Raises:
            LayoutError: it is impossible.
        """
        try:
            section.replicas(ranks)
        except ValueError as error:
            raise LayoutError(str(error)) from None
        layout = cls(
            ranks=ranks,
            zero_stage=section.zero_stage,
            tensor=section.tensor_parallel,
            pipeline=section.pipeline_parallel,
            schedule=section.schedule,
            microbatches=_microbatches(section),
            accumulate=section.accumulate,
            precision=section.precision,
            compile=section.compile,
            checkpoint_activations=section.checkpoint_activations,
        )
        layout.check()
        return layout

    def check(self) -> None:
        """Refuse what cannot work, or would be silently wrong.

        Raises:
            LayoutError: with the reason.
        """
        if self.pipeline == 1:
            return
        if self.zero_stage == 3 and self.schedule == "zero_bubble":
            raise LayoutError(
                "schedule='zero_bubble' with zero_stage=3 loses gradients in PyTorch; "
                "use zero_stage=2 or another schedule"
            )
        if self.microbatches < self.pipeline:
            raise LayoutError(
                f"microbatches={self.microbatches} is below pipeline_parallel={self.pipeline}: "
                "some ranks would never have work"
            )
        if self.schedule in _LOOPED and self.microbatches % self.pipeline:
            raise LayoutError(
                f"schedule={self.schedule!r} needs microbatches in multiples of "
                f"pipeline_parallel={self.pipeline}, and microbatches={self.microbatches}"
            )

    @property
    def data(self) -> int:
        """Replicas that train on data of their own."""
        return self.ranks // (self.tensor * self.pipeline)

    @property
    def axes(self) -> dict[str, int]:
        """The mesh's axes, outermost first, with their sizes."""
        axes = {} if self.pipeline == 1 else {"pipeline": self.pipeline}
        axes |= {"replicate": self.data} if self.zero_stage == 0 else {}
        axes["shard"] = 1 if self.zero_stage == 0 else self.data
        return axes if self.tensor == 1 else {**axes, "tensor": self.tensor}

    @property
    def stages(self) -> int:
        """Stretches the layers are cut into."""
        if self.pipeline == 1:
            return 1
        return self.pipeline * (_STAGES_PER_RANK if self.schedule in _LOOPED else 1)

    @property
    def reshard_after_forward(self) -> bool:
        """Whether gathered parameters are dropped between forward and backward."""
        return self.zero_stage == 3

    @property
    def wrapped(self) -> bool:
        """Whether `fully_shard` has something to do: for replicas, or for mixed precision."""
        return self.data > 1 or self.precision != "fp32"

    def adds_up(self, device_type: str) -> bool:
        """Whether `Replicas` does the same for less: with whole replicas, on processors."""
        return device_type == "cpu" and self.zero_stage == 0 and self.precision == "fp32"

    def place(self, rank: int) -> Coordinates:
        """Where a rank is."""
        rest, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return Coordinates(pipeline, data, tensor)

    def stages_of(self, rank: int) -> list[int]:
        """The stages a rank holds, in the order of the layers."""
        return list(range(self.place(rank).pipeline, self.stages, self.pipeline))

    def scores(self, rank: int) -> bool:
        """Whether this rank's losses count: one rank of each replica sees them and is asked."""
        place = self.place(rank)
        return place.tensor == 0 and place.pipeline == self.pipeline - 1

    def mesh(self, device_type: str) -> DeviceMesh:
        """The device mesh; every rank must call this at the same point."""
        return _mesh(device_type, tuple(self.axes.items()))

    def data_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """The part of the mesh that `fully_shard` works on."""
        return mesh["replicate", "shard"] if self.zero_stage == 0 else mesh["shard"]


@functools.cache  # a process group cannot be given back, and a rank opens many runs
def _mesh(device_type: str, axes: tuple[tuple[str, int], ...]) -> DeviceMesh:
    names, sizes = zip(*axes, strict=True)
    return init_device_mesh(device_type, sizes, mesh_dim_names=names)


def _microbatches(section: DatacenterSection) -> int:
    """As given, or two for each rank of the pipeline, or one."""
    if section.pipeline_parallel == 1:
        if section.microbatches not in (None, 1):
            raise LayoutError(
                f"microbatches={section.microbatches} is for pipelines, and pipeline_parallel=1; "
                "use accumulate"
            )
        return 1
    if section.microbatches is not None:
        return section.microbatches
    piece = section.batch_size // section.accumulate
    for microbatches in (2 * section.pipeline_parallel, section.pipeline_parallel):
        if piece % microbatches == 0:
            return microbatches
    raise LayoutError(
        f"a batch of {piece} examples (batch_size={section.batch_size} / accumulate="
        f"{section.accumulate}) cannot be cut into pipeline_parallel={section.pipeline_parallel} "
        "equal micro-batches, one for each rank"
    )
