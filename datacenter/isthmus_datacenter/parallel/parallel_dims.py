"""Degrees of parallelism, ZeRO stage and pipeline schedule, and the device mesh they define.

>>> dims = ParallelDims(ranks=8, zero_stage=3, tensor=2, pipeline=2, microbatches=4)
>>> dims.axes
{'pipeline': 2, 'shard': 2, 'tensor': 2}
>>> dims.coordinates(5)
Coordinates(pipeline=1, data=0, tensor=1)
>>> ParallelDims(ranks=4, zero_stage=0).axes
{'replicate': 4, 'shard': 1}
>>> ParallelDims(ranks=8, zero_stage=3, shard_groups=2).axes
{'replicate': 2, 'shard': 4}
>>> ParallelDims(ranks=8, zero_stage=3, shard_groups=2, expert=2).expert_axes
{'replicate': 2, 'shard': 2, 'expert': 2}
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from isthmus.errors import UserError
from isthmus.job.datacenter import DatacenterSection
from isthmus_datacenter.parallel.kept_groups import kept

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
Precision = Literal["fp32", "bf16", "fp16"]

_LOOPED = ("interleaved", "zero_bubble")
_STAGES_PER_RANK = 2
"""Stages on each rank in schedules that pass through the ranks several times ('looped')."""


class LayoutError(UserError):
    """The job's parallel layout does not fit the ranks; the message has the arithmetic."""


@dataclasses.dataclass(frozen=True)
class Coordinates:
    """Position of one rank on the mesh, as an index along each axis."""

    pipeline: int
    data: int
    """Index of the replica, which decides what data the rank trains on."""
    tensor: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """How one model is distributed over the ranks.

    ZeRO stages differ in the mesh (`data_mesh`) and one option (`reshard_after_forward`) of
    `fully_shard`; see `fully_sharded.apply_zero_stage`. Between steps, stages 1 to 3 shard
    parameters, gradients and optimizer state. Only stage 0 on processors works without
    `fully_shard` (`uses_all_reduce`).

    An *axis* is one of the mesh; a *dim* of a tensor. The innermost axis is tensor parallelism,
    which communicates most, then data, then pipeline.
    """

    ranks: int
    """Size of the group."""
    zero_stage: int
    """0 to 3, as in Rajbhandari et al. 2020."""
    tensor: int = 1
    """Ranks over which each matrix is sharded, or that share positions (`context`)."""
    context: int = 1
    """Ranks that have whole layers and share the positions of sequences; 1, or as `tensor`."""
    shard_groups: int = 1
    """Groups of replicas of which each has the whole model in its shards (hybrid sharding)."""
    sequence: bool = False
    """Whether the tensor-parallel ranks also share the positions of sequences within blocks."""
    expert: int = 1
    """Replicas that divide the experts of mixtures among themselves."""
    pipeline: int = 1
    """Ranks over which the layers are divided."""
    schedule: Schedule = "1f1b"
    microbatches: int = 1
    """Parts of a batch that are in the pipeline at the same time."""
    accumulate: int = 1
    """Parts of a batch whose gradients are accumulated one after the other."""
    precision: Precision = "fp32"
    offload: bool = False
    """Whether shards of parameters, gradients and optimizer state are in the host's memory."""
    float8: bool = False
    """Whether linear layers of blocks multiply in float8."""
    compile: bool = False
    checkpoint_activations: bool | Literal["operators"] = False
    checkpoint_every: int = 1
    """Recompute every n-th sharding unit of a stage."""
    private: bool = False
    """Whether a rank needs the whole model for itself, for the gradients of single examples."""

    @classmethod
    def from_section(cls, section: DatacenterSection, ranks: int) -> ParallelDims:
        """Apply a job's [datacenter] section to a number of ranks.

        Raises:
            LayoutError: the section is impossible on so many ranks.
        """
        try:
            section = section.for_replicas(section.replicas(ranks))
        except ValueError as error:
            raise LayoutError(str(error)) from None
        dims = cls(
            ranks=ranks,
            zero_stage=section.zero_stage,
            shard_groups=section.shard_groups,
            tensor=section.tensor_parallel * section.context_parallel,
            context=section.context_parallel,
            sequence=section.sequence_parallel,
            expert=section.expert_parallel,
            pipeline=section.pipeline_parallel,
            schedule=section.schedule,
            microbatches=_microbatches(section),
            accumulate=section.accumulate,
            precision=section.precision,
            offload=section.offload == "parameters",
            float8=section.float8,
            compile=section.compile,
            checkpoint_activations=section.checkpoint_activations,
            checkpoint_every=section.checkpoint_every,
            private=section.privacy is not None and section.zero_stage == 0,
        )
        dims.check()
        return dims

    def check(self) -> None:
        """Refuse combinations that cannot work, or would give wrong results.

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
                "some ranks would always be idle"
            )
        if self.schedule in _LOOPED and self.microbatches % self.pipeline:
            raise LayoutError(
                f"schedule={self.schedule!r} needs microbatches in multiples of "
                f"pipeline_parallel={self.pipeline}, and microbatches={self.microbatches}"
            )

    @property
    def data(self) -> int:
        """Number of replicas; each trains on its own part of the data."""
        return self.ranks // (self.tensor * self.pipeline)

    @property
    def shares_positions(self) -> bool:
        """Whether each rank has a part of the positions of sequences within blocks."""
        return self.sequence or self.context > 1

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the mesh's axes by name, outermost first."""
        axes = {} if self.pipeline == 1 else {"pipeline": self.pipeline}
        # Where nothing is sharded each replica is a group by itself.
        groups = self.data if self.zero_stage == 0 else self.shard_groups
        if self.zero_stage == 0 or groups > 1:
            axes["replicate"] = groups
        axes["shard"] = self.data // groups
        return axes if self.tensor == 1 else {**axes, "tensor": self.tensor}

    @property
    def expert_axes(self) -> dict[str, int]:
        """Sizes of the axes of the mesh on which divided experts are, outermost first.

        Replicas that divide them are next to each other.
        """
        axes = {} if self.pipeline == 1 else {"pipeline": self.pipeline}
        if self.zero_stage == 0:
            axes["replicate"] = self.data // self.expert
            axes["shard"] = 1
        else:
            if self.shard_groups > 1:
                axes["replicate"] = self.shard_groups
            axes["shard"] = self.data // (self.shard_groups * self.expert)
        return {**axes, "expert": self.expert}

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        if self.pipeline == 1:
            return 1
        return self.pipeline * (_STAGES_PER_RANK if self.schedule in _LOOPED else 1)

    @property
    def reshard_after_forward(self) -> bool:
        """Whether gathered parameters are freed between the forward and the backward pass."""
        return self.zero_stage == 3

    @property
    def needs_fully_shard(self) -> bool:
        """Whether there are several replicas, mixed precision or offload: by `fully_shard`."""
        wants = self.data > 1 or self.precision != "fp32" or self.offload
        return wants and not self.private

    def uses_all_reduce(self, device_type: str) -> bool:
        """Whether a `GradientAllReduce` replaces `fully_shard`: whole replicas on processors."""
        # Divided experts have fewer replicas than the rest of the model.
        whole = self.zero_stage == 0 and self.expert == 1 and not self.offload
        return device_type == "cpu" and whole and self.precision == "fp32"

    def applies_fully_shard(self, device_type: str) -> bool:
        """Whether `fully_shard` distributes the parameters: needed, and replaced by nothing."""
        return self.needs_fully_shard and not self.uses_all_reduce(device_type)

    def overlaps_messages(self, device_type: str) -> bool:
        """Whether messages of `fully_shard` are sent while other units compute."""
        # Messages between processors end before the call returns.
        return device_type != "cpu"

    def coordinates(self, rank: int) -> Coordinates:
        """Position of a rank on the mesh."""
        rest, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return Coordinates(pipeline, data, tensor)

    def stages_of(self, rank: int) -> list[int]:
        """Numbers of a rank's pipeline stages, in the order of the layers."""
        return list(range(self.coordinates(rank).pipeline, self.stages, self.pipeline))

    def counts_losses(self, rank: int) -> bool:
        """Whether a rank contributes its replica's losses: one rank of each replica does."""
        coordinates = self.coordinates(rank)
        return coordinates.tensor == 0 and coordinates.pipeline == self.pipeline - 1

    def mesh(self, device_type: str) -> DeviceMesh:
        """Create or reuse the device mesh. All ranks call this together."""
        return _mesh(device_type, tuple(self.axes.items()))

    def expert_mesh(self, device_type: str) -> DeviceMesh:
        """Create or reuse the mesh of divided experts. All ranks call this together."""
        return _mesh(device_type, tuple(self.expert_axes.items()))

    @staticmethod
    def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
        """The axes of a mesh that `fully_shard` works on."""
        replicated = "replicate" in (mesh.mesh_dim_names or ())
        return mesh["replicate", "shard"] if replicated else mesh["shard"]


@kept
def _mesh(device_type: str, axes: tuple[tuple[str, int], ...]) -> DeviceMesh:
    names, sizes = zip(*axes, strict=True)
    return init_device_mesh(device_type, sizes, mesh_dim_names=names)


def _microbatches(section: DatacenterSection) -> int:
    """The job's number, or by default two for each rank of the pipeline, or one."""
    if section.pipeline_parallel == 1:
        if section.microbatches not in (None, 1):
            raise LayoutError(
                f"microbatches={section.microbatches} is for pipelines, and pipeline_parallel=1; "
                "use accumulate"
            )
        return 1
    microbatches = section.microbatches_in_pipeline()
    if microbatches is not None:
        return microbatches
    examples = section.batch_size // section.accumulate
    raise LayoutError(
        f"a batch of {examples} examples (batch_size={section.batch_size} / accumulate="
        f"{section.accumulate}) cannot be split into pipeline_parallel={section.pipeline_parallel} "
        "equal micro-batches, at least one for each rank"
    )
