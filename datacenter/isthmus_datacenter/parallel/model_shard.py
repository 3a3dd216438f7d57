"""What one rank holds of the model: some stages of it, under the names the whole model gives.

Everything that goes between ranks and files goes by these names. A parameter that the model uses
in two places has one name; where the two places are on different ranks, the first of them owns it
and the other keeps a copy that is trained alike.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from isthmus.errors import TaskError
from isthmus_datacenter.parallel.parallel_dims import ParallelDims
from isthmus_datacenter.parallel.replicas import Replicas


@dataclasses.dataclass(frozen=True)
class Names:
    """Names of the parameters and buffers of a whole model, found by what they are."""

    parameters: Mapping[int, str]
    """By `id`: a tied parameter's first name."""
    buffers: Mapping[int, str]

    @classmethod
    def of(cls, model: nn.Module) -> Names:
        """Take them before anything is moved or replaced."""
        return cls(
            {id(parameter): name for name, parameter in model.named_parameters()},
            {id(buffer): name for name, buffer in model.named_buffers()},
        )

    def in_stage(self, stage: nn.Module) -> dict[str, str]:
        """From the names inside a stage to those in the model.

        Raises:
            TaskError: the stage has a parameter that the model does not have.
        """
        found = {}
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            if id(parameter) not in self.parameters:
                raise TaskError(
                    f"pipeline_stages() made a stage with a parameter {name!r} that is not the "
                    "model's; stages must be built from the model's own modules"
                )
            found[name] = self.parameters[id(parameter)]
        for name, buffer in stage.named_buffers(remove_duplicate=False):
            found[name] = self.buffers.get(id(buffer), name)
        return found


class ModelShard:
    """One rank's part of the model."""

    def __init__(
        self,
        layout: ParallelDims,
        stages: Mapping[int, nn.Module],
        names: Mapping[int, Mapping[str, str]],
    ) -> None:
        """`stages` by their number; `names` from those inside each stage to the model's."""
        self.layout = layout
        self.stages = dict(stages)
        self.names = {at: dict(table) for at, table in names.items()}
        self.mesh: DeviceMesh | None = None
        self.replicas: Replicas | None = None
        """Who adds up gradients with this rank; None where `fully_shard` does it, or nobody."""
        self.sample_flops = 0
        """Operations of the whole model's forward pass of the sample, where it was made."""
        self.notes: list[str] = []
        """What a person should know of how the model was cut."""
        self.copies: set[str] = set()
        """Parameters that a rank of an earlier stage owns."""
        self.tied: dict[str, dist.ProcessGroup] = {}
        """Parameters that other stages hold too, each with the group of those who do."""
        self.holders: dict[str, int] = {}
        """How many stages hold each of those."""

    def modules(self) -> Iterator[nn.Module]:
        """All modules of all stages."""
        for stage in self.stages.values():
            yield from stage.modules()

    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters as they are now: shards, unless a forward pass gathered them."""
        found: dict[str, nn.Parameter] = {}
        for at, stage in self.stages.items():
            for name, parameter in stage.named_parameters():
                found.setdefault(self.names[at][name], parameter)
        return found

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients there are, cut as their parameters are."""
        found = {}
        for name, parameter in self.parameters().items():
            gradient = parameter.grad
            if gradient is None:
                continue
            # Without fully_shard nobody adds up what the ranks that share a matrix found.
            placements = parameter.placements if isinstance(parameter, DTensor) else ()
            if isinstance(gradient, DTensor) and gradient.placements != placements:
                gradient = parameter.grad = gradient.redistribute(placements=placements)
            found[name] = gradient
        return found

    def add_up(self, gradients: dict[str, torch.Tensor]) -> None:
        """Make gradients those of all replicas, where `fully_shard` does not do it.

        A parameter has one afterwards if it has one on any of them.
        """
        if self.replicas is None:
            return
        trained = {name: each for name, each in self.parameters().items() if each.requires_grad}
        whole = {
            name: gradients[name] if name in gradients else torch.zeros_like(each)
            for name, each in trained.items()
        }
        finders = torch.tensor([float(name in gradients) for name in whole])
        self.replicas.add_up([*map(local, whole.values()), finders])
        for (name, gradient), found in zip(whole.items(), finders.tolist(), strict=True):
            if found and name not in gradients:
                gradients[name] = trained[name].grad = gradient

    def agree_on_whole(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Make alike what all ranks of a tensor-parallel group found for what none of them cuts.

        It is the same but for rounding, which depends on where a rank's memory lies; after many
        steps, copies of one parameter would not be copies any more.
        """
        if self.layout.tensor == 1:
            return
        assert self.mesh is not None
        whole = [local(each) for _, each in sorted(gradients.items()) if not _is_cut(each)]
        if not whole:
            return
        flat = torch.cat([each.flatten() for each in whole])
        dist.all_reduce(flat, group=self.mesh.get_group("tensor"))
        flat /= self.layout.tensor
        parts = torch.split(flat, [each.numel() for each in whole])
        torch._foreach_copy_(
            whole, [new.view_as(old) for new, old in zip(parts, whole, strict=True)]
        )

    def buffers(self) -> dict[str, torch.Tensor]:
        """This rank's buffers."""
        found: dict[str, torch.Tensor] = {}
        for at, stage in self.stages.items():
            for name, buffer in stage.named_buffers():
                found.setdefault(self.names[at].get(name, name), buffer)
        return found

    def has_buffers(self) -> bool:
        """Whether the model has any, here or in another stage. All ranks call this together."""
        found = torch.tensor([len(self.buffers())])
        if self.layout.pipeline > 1:
            dist.all_reduce(found)
        return bool(found)

    def at_rest(self) -> None:
        """Free what a forward pass without a backward one left gathered.

        Until then the modules' parameters are the gathered ones, and not those of the optimizer.
        """
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def find_tied(self, tables: Sequence[Mapping[str, str]], rank: int) -> None:
        """Make the groups of ranks that hold one parameter. All ranks call this together.

        Args:
            tables: the names of every stage's parameters, also of stages that others hold.
            rank: this one.

        Raises:
            TaskError: two stages of one rank share a parameter.
        """
        layout = self.layout
        holders: dict[str, list[int]] = {}
        for at, table in enumerate(tables):
            for name in sorted(set(table.values())):
                holders.setdefault(name, []).append(at)
        here = layout.place(rank)
        for name, stages in sorted(holders.items()):
            rows = [at % layout.pipeline for at in stages]
            if len(rows) == 1:
                continue
            if len(set(rows)) < len(rows):
                raise TaskError(
                    f"parameter {name!r} is used in pipeline stages {stages}, two of which are on "
                    "one rank; use schedule='1f1b' or untie it"
                )
            for column in range(layout.data * layout.tensor):
                members = [row * layout.data * layout.tensor + column for row in rows]
                group = _group(tuple(members))
                if rank in members:
                    self.tied[name] = group
                    self.holders[name] = len(rows)
            if here.pipeline in rows and here.pipeline != rows[0]:
                self.copies.add(name)


@functools.cache  # as the meshes are
def _group(members: tuple[int, ...]) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(list(members))
    return group


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds, detached."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():  # or this would be recorded, at some cost, to be forgotten
            tensor = tensor.to_local()
    return tensor.detach()


def _is_cut(tensor: torch.Tensor) -> bool:
    """Whether ranks of a tensor-parallel group hold different parts of it."""
    return isinstance(tensor, DTensor) and any(
        name == "tensor" and not placement.is_replicate()
        for name, placement in zip(
            tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True
        )
    )
