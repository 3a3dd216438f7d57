"""The part of the model that one rank has: pipeline stages, by the parameter names of the whole.

Ranks and files exchange parameters by these names. A parameter that the model uses in two places
has one name; where the two places are in stages on different ranks, the first of them owns it and
the other has a copy that receives the same updates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from isthmus.errors import TaskError
from isthmus.tensors.structure import Structure, added
from isthmus_datacenter.parallel.built_parameters import BuiltParameters
from isthmus_datacenter.parallel.gradient_check import Reductions
from isthmus_datacenter.parallel.kept_groups import kept
from isthmus_datacenter.parallel.module_calls import REDUCES_UNUSED
from isthmus_datacenter.parallel.parallel_dims import ParallelDims

BUCKET_BYTES = 1 << 25
"""Maximum size of a message that combines several gradients."""


_SAMPLE = 16
"""Values of a frozen parameter by which a change of it is noticed."""


@dataclasses.dataclass(frozen=True)
class ParameterNames:
    """Names of the parameters and buffers of a whole model, by object identity."""

    parameters: Mapping[int, str]
    """Names by `id`; a tied parameter has its first name."""
    buffers: Mapping[int, str]

    @classmethod
    def of(cls, model: nn.Module) -> ParameterNames:
        """Record the names before any parameter is moved or replaced."""
        return cls(
            {id(parameter): name for name, parameter in model.named_parameters()},
            {id(buffer): name for name, buffer in model.named_buffers()},
        )

    def in_stage(self, stage: nn.Module) -> dict[str, str]:
        """Map the names inside a stage to those in the model.

        Raises:
            TaskError: the stage has a parameter that the model does not have.
        """
        names = {}
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            if id(parameter) not in self.parameters:
                raise TaskError(
                    f"pipeline_stages() made a stage with a parameter {name!r} that is not the "
                    "model's; stages must be built from the model's own modules"
                )
            names[name] = self.parameters[id(parameter)]
        for name, buffer in stage.named_buffers(remove_duplicate=False):
            names[name] = self.buffers.get(id(buffer), name)
        return names


@dataclasses.dataclass(frozen=True)
class TiedParameters:
    """Parameters of this rank that stages on other ranks use too, by name in the model."""

    copies: frozenset[str] = frozenset()
    """Tied parameters that a rank of an earlier stage owns."""
    groups: Mapping[str, dist.ProcessGroup] = dataclasses.field(default_factory=dict)
    """The ranks that have the parameter."""
    stage_counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """How many stages use the parameter."""

    @classmethod
    def find(
        cls, dims: ParallelDims, stage_names: Sequence[Mapping[str, str]], rank: int
    ) -> TiedParameters:
        """Create the process groups of tied parameters. All ranks call this together.

        Args:
            dims: how the stages are distributed.
            stage_names: for each stage of the model, the map from its names to the model's.
            rank: this rank.

        Raises:
            TaskError: two stages of one rank share a parameter.
        """
        users: dict[str, list[int]] = {}
        for index, names in enumerate(stage_names):
            for name in sorted(set(names.values())):
                users.setdefault(name, []).append(index)
        pipeline_rank = dims.coordinates(rank).pipeline
        copies: set[str] = set()
        groups: dict[str, dist.ProcessGroup] = {}
        stage_counts: dict[str, int] = {}
        # Sorted, and on all ranks alike: a group is created by all of them together, in one order.
        for name, stages in sorted(users.items()):
            rows = [index % dims.pipeline for index in stages]
            if len(rows) == 1:
                continue
            if len(set(rows)) < len(rows):
                raise TaskError(
                    f"parameter {name!r} is used in pipeline stages {stages}, two of which are on "
                    "one rank; use schedule='1f1b' or untie it"
                )
            # Also the groups of other ranks: a rank that leaves out the creation of one keeps all
            # others waiting.
            for column in range(dims.data * dims.tensor):
                members = [row * dims.data * dims.tensor + column for row in rows]
                group = _process_group(tuple(members))
                if rank in members:
                    groups[name] = group
                    stage_counts[name] = len(rows)
            if pipeline_rank in rows and pipeline_rank != rows[0]:
                copies.add(name)
        return cls(frozenset(copies), groups, stage_counts)


class GradientAllReduce:
    """Sums gradients over ranks that hold the same whole parameters, on processors.

    `fully_shard` does the same on devices, where its copies of parameters and gradients cost little
    and it overlaps messages with the backward pass. Processors have nothing to overlap messages
    with, and pay for every copy.
    """

    def __init__(self, group: dist.ProcessGroup, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._group = group
        self._bucket_bytes = bucket_bytes
        self._buffers: dict[torch.dtype, torch.Tensor] = {}
        """Reused: allocating a buffer costs as much as copying into it."""

    def sum(self, gradients: Sequence[torch.Tensor]) -> None:
        """Replace each tensor by its sum over the ranks, identical to the last bit on all.

        All ranks of the group call this together, with tensors of the same shapes and dtypes in
        the same order.
        """
        for bucket in _buckets(gradients, self._bucket_bytes):
            if len(bucket) == 1 and bucket[0].is_contiguous():
                dist.all_reduce(bucket[0], group=self._group)
                continue
            flat = self._flat_buffer(bucket)
            torch.cat([each.flatten() for each in bucket], out=flat)
            dist.all_reduce(flat, group=self._group)
            _copy_back(flat, bucket)

    def _flat_buffer(self, bucket: Sequence[torch.Tensor]) -> torch.Tensor:
        """A vector with as many elements as the tensors together."""
        size = sum(each.numel() for each in bucket)
        dtype = bucket[0].dtype
        buffer = self._buffers.get(dtype)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[dtype] = torch.empty(size, dtype=dtype)
        return buffer[:size]


class ModelShard:
    """One rank's part of the model."""

    def __init__(
        self,
        dims: ParallelDims,
        stages: Mapping[int, nn.Module],
        names: Mapping[int, Mapping[str, str]],
        *,
        mesh: DeviceMesh | None = None,
        expert_mesh: DeviceMesh | None = None,
        tied: TiedParameters | None = None,
        all_reduce: GradientAllReduce | None = None,
        reductions: Reductions | None = None,
        sample_flops: int = 0,
        notes: Sequence[str] = (),
        all_names: Sequence[str] = (),
        built: BuiltParameters | None = None,
        stage_inputs: Mapping[int, tuple[Any, ...]] | None = None,
    ) -> None:
        """Collect the stages of one rank.

        Args:
            dims: how the model is distributed.
            stages: this rank's pipeline stages by their number.
            names: for each stage, the map from the names inside it to the model's.
            mesh: the device mesh; None on a single rank without `fully_shard`.
            expert_mesh: that of divided experts; None if there are none.
            tied: parameters shared with stages on other ranks.
            all_reduce: sums gradients over the replicas; None where `fully_shard` does it, or
                where there is one replica.
            reductions: what tensor-parallel ranks do with gradients that none of them shards.
            sample_flops: operations of the whole model's forward pass of the sample; 0 if unknown.
            notes: for the user, on how the model was sharded.
            all_names: names of all parameters of the whole model, in the same order on all ranks.
            built: the parameters before they were distributed; None if they were not.
            stage_inputs: what this rank's stages take for the sample, by their number; for a model
                that is not compared with the whole one.
        """
        self.dims = dims
        self.stages = dict(stages)
        self.names = {index: dict(table) for index, table in names.items()}
        self.mesh = mesh
        self.expert_mesh = expert_mesh
        self.tied = tied or TiedParameters()
        self.all_reduce = all_reduce
        self.reductions = reductions or Reductions()
        self.sample_flops = sample_flops
        self.stage_inputs = stage_inputs or {}
        self._structures = {index: Structure.of(stage) for index, stage in self.stages.items()}
        self.notes = list(notes)
        self.all_names = all_names
        self._built = built
        self._gradients: WatchedGradients | None = None

    def modules(self) -> Iterator[nn.Module]:
        """Iterate over all modules of all stages."""
        for stage in self.stages.values():
            yield from stage.modules()

    def parameters(self) -> dict[str, nn.Parameter]:
        """Current parameters of this rank: shards, unless a forward pass gathered them.

        Raises:
            TaskError: a forward pass has added one.
        """
        parameters: dict[str, nn.Parameter] = {}
        for index, stage in self.stages.items():
            for name, parameter in stage.named_parameters():
                if name not in self.names[index]:
                    raise TaskError(added(name))
                parameters.setdefault(self.names[index][name], parameter)
        return parameters

    def buffers(self) -> dict[str, torch.Tensor]:
        """Buffers of this rank."""
        buffers: dict[str, torch.Tensor] = {}
        for index, stage in self.stages.items():
            for name, buffer in stage.named_buffers():
                buffers.setdefault(self.names[index].get(name, name), buffer)
        return buffers

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of this rank."""
        return {**self.buffers(), **self.parameters()}

    def mesh_of(self, tensor: torch.Tensor) -> DeviceMesh | None:
        """All axes of the mesh on which a parameter or buffer is; None without a mesh."""
        names = tensor.device_mesh.mesh_dim_names if isinstance(tensor, DTensor) else None
        return self.expert_mesh if "expert" in (names or ()) else self.mesh

    def check_structure(self) -> None:
        """Refuse parameters that running the model has added, removed or replaced.

        Raises:
            TaskError: see `Structure.explain_change`.
        """
        for index, stage in self.stages.items():
            self._structures[index].check(stage)

    def frozen_samples(self) -> dict[str, torch.Tensor]:
        """Some values of this rank's part of each frozen parameter."""
        return {
            name: local(each).flatten()[:_SAMPLE].clone()
            for name, each in self.parameters().items()
            if not each.requires_grad
        }

    def average_statistics(self, names: Sequence[str]) -> None:
        """Average running statistics over the replicas, each of which has seen other examples."""
        if not names or self.dims.ranks == 1:
            return
        buffers = self.buffers()
        statistics = [buffers[name] for name in names]
        # In one message: there are many statistics, and each is small.
        flat = torch.cat([each.float().flatten() for each in statistics])
        dist.all_reduce(flat)
        flat /= self.dims.ranks
        _copy_back(flat, statistics)

    def has_buffers(self) -> bool:
        """Whether any stage of the model has buffers. All ranks call this together."""
        count = torch.tensor([len(self.buffers())])
        if self.dims.pipeline > 1:
            dist.all_reduce(count)
        return bool(count)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Existing gradients, sharded as their parameters are.

        Raises:
            TaskError: the model does not use the parameters that are trained.
        """
        gradients = {}
        parameters = self.parameters()
        if self._built is not None:
            self._built.check(parameters.values())
        for name, parameter in parameters.items():
            gradient = parameter.grad
            if gradient is None:
                continue
            # Without fully_shard, partial sums of the tensor-parallel ranks are still pending.
            placements = parameter.placements if isinstance(parameter, DTensor) else ()
            if isinstance(gradient, DTensor) and gradient.placements != placements:
                gradient = parameter.grad = gradient.redistribute(placements=placements)
            gradients[name] = gradient
        return gradients

    def watch_gradients(self) -> None:
        """Allow that ranks use different parameters in a step, where `fully_shard` sums gradients.

        Without it, a parameter that some rank did not use would leave the others waiting.
        """
        # This schedule computes the gradients of parameters outside of autograd.
        if self.dims.schedule == "zero_bubble" and self.dims.pipeline > 1:
            return
        sharded = [
            (stage, self.names[index])
            for index, stage in self.stages.items()
            if isinstance(stage, FSDPModule)
        ]
        if sharded and REDUCES_UNUSED:
            self._gradients = WatchedGradients(sharded)

    def forget_gradients(self) -> None:
        """Forget which parameters were used; for a step that is not applied."""
        if self._gradients is not None:
            self._gradients.used.clear()

    def sum_over_replicas(self, gradients: dict[str, torch.Tensor]) -> None:
        """Sum gradients over all replicas, where `fully_shard` does not do it.

        A parameter has a gradient afterwards if it had one on any replica. One that the step did
        not use keeps its moments and is not decayed by an optimizer, which a gradient of zero would
        not do.
        """
        if self._gradients is not None:
            parameters = self.parameters()
            for name in self._gradients.take_unused(self.all_names, self.dims.ranks):
                if gradients.pop(name, None) is not None:
                    parameters[name].grad = None
        if self.all_reduce is None:
            return
        trained = {name: each for name, each in self.parameters().items() if each.requires_grad}
        summands = {
            name: gradients[name] if name in gradients else torch.zeros_like(each)
            for name, each in trained.items()
        }
        # Summed along: a branch of a model may be used on some replicas only, and the optimizers of
        # all replicas have to step on the same parameters.
        replicas_with_gradient = torch.tensor([float(name in gradients) for name in summands])
        self.all_reduce.sum([*map(local, summands.values()), replicas_with_gradient])
        for (name, gradient), count in zip(
            summands.items(), replicas_with_gradient.tolist(), strict=True
        ):
            if count and name not in gradients:
                gradients[name] = trained[name].grad = gradient

    def reduce_replicated(self, gradients: dict[str, torch.Tensor]) -> None:
        """Reduce over the tensor-parallel ranks the gradients that none of them shards.

        Gradients of parameters that act on sharded activations are summed. The others are equal but
        for rounding, which depends on memory addresses, and are averaged: after many steps, the
        copies of one parameter would differ.

        A parameter has a gradient afterwards if it had one on any of the ranks.

        Raises:
            TaskError: a parameter got a gradient for the first time, so that it is not known which
                of both is right.
        """
        if self.dims.tensor == 1:
            return
        assert self.mesh is not None
        group = self.mesh.get_group("tensor")
        if self.dims.shares_positions:
            self._add_gradients_of_others(gradients, group)
        replicated = {
            name: local(each)
            for name, each in sorted(gradients.items())
            if not is_tensor_sharded(each)
        }
        if not replicated:
            return
        unknown = self.reductions.unknown.intersection(replicated)
        if unknown:
            key = "tensor_parallel" if self.dims.context == 1 else "context_parallel"
            raise TaskError(
                f"parameter {min(unknown)!r} got no gradient from the two examples on which the "
                "partitioned model was checked, and gets one now, which may be wrong; freeze it, "
                f"or set {key} = 1"
            )
        names = iter(replicated)
        # Where ranks share positions these are all gradients of the model: never a copy of all.
        for bucket in _buckets(list(replicated.values()), BUCKET_BYTES):
            flat = torch.cat([each.flatten() for each in bucket])
            dist.all_reduce(flat, group=group)
            parts = torch.split(flat, [each.numel() for each in bucket])
            averaged = [part for part in parts if next(names) not in self.reductions.summed]
            if averaged:
                torch._foreach_div_(averaged, float(self.dims.tensor))
            _copy_back(flat, bucket)

    def _add_gradients_of_others(
        self, gradients: dict[str, torch.Tensor], group: dist.ProcessGroup
    ) -> None:
        """Add zeros for parameters whose gradient only other ranks of the group have.

        With parts of sequences, a layer such as an expert may be called for the positions of one
        rank only; without zeros the ranks would add up gradients of different parameters.
        """
        replicated = {
            name: each
            for name, each in sorted(self.parameters().items())
            if each.requires_grad and not is_tensor_sharded(each)
        }
        ranks_with_gradient = torch.tensor([float(name in gradients) for name in replicated])
        dist.all_reduce(ranks_with_gradient, group=group)
        for (name, parameter), count in zip(
            replicated.items(), ranks_with_gradient.tolist(), strict=True
        ):
            if count and name not in gradients:
                gradients[name] = parameter.grad = torch.zeros_like(parameter)

    def reshard(self) -> None:
        """Free parameters that a forward pass without a backward pass left gathered.

        Until then the modules' parameters are the gathered ones, and not those of the optimizer.
        """
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


class WatchedGradients:
    """Which parameters of `fully_shard` got a gradient, other than zeros in place of none."""

    def __init__(self, stages: Sequence[tuple[nn.Module, Mapping[str, str]]]) -> None:
        """Watch the stages, each given with the names of its parameters in the model."""
        self.used: set[str] = set()
        """Names of the parameters that got a gradient on this rank."""
        self._watched: dict[str, nn.Parameter] = {}
        for stage, table in stages:
            unit_of: dict[str, nn.Module] = {}
            owned: dict[nn.Module, list[tuple[nn.Module, str, str]]] = {}
            for path, module in stage.named_modules():
                is_unit = isinstance(module, FSDPModule)
                unit_of[path] = module if is_unit else unit_of[path.rpartition(".")[0]]
                for name, _ in module.named_parameters(recurse=False):
                    key = table[f"{path}.{name}".lstrip(".")]
                    owned.setdefault(unit_of[path], []).append((module, name, key))
            for unit, parameters in owned.items():
                assert isinstance(unit, FSDPModule)
                unit.set_reduce_scatter_unused_params(True, recurse=False)
                unit.register_forward_pre_hook(self._watch(parameters))

    def take_unused(self, all_names: Sequence[str], ranks: int) -> list[str]:
        """Names of the parameters that no rank has used since the last call.

        All ranks call this together.
        """
        uses = torch.tensor([float(name in self.used) for name in all_names])
        self.used.clear()
        if ranks > 1:
            dist.all_reduce(uses)
        return [name for name, count in zip(all_names, uses.tolist(), strict=True) if not count]

    def _watch(self, parameters: Sequence[tuple[nn.Module, str, str]]) -> Callable[..., None]:
        """Watch the gathered parameters of a unit, which exist from the first forward pass on."""

        def hook(*_: object) -> None:
            for module, name, key in parameters:
                parameter = module._parameters[name]
                assert parameter is not None
                if parameter.requires_grad and self._watched.get(key) is not parameter:
                    self._watched[key] = parameter
                    parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]  # PyTorch has no types for it
                        lambda _, key=key: self.used.add(key)
                    )

        return hook


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds, detached."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():  # otherwise autograd would record this, which costs time
            tensor = tensor.to_local()
    return tensor.detach()


@kept
def _process_group(members: tuple[int, ...]) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(list(members))
    return group


def _buckets(tensors: Sequence[torch.Tensor], max_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Group consecutive tensors of one dtype up to a number of bytes; a larger one stays single."""
    bucket: list[torch.Tensor] = []
    nbytes = 0
    for each in tensors:
        if bucket and (each.dtype != bucket[0].dtype or nbytes + each.nbytes > max_bytes):
            yield bucket
            bucket = []
            nbytes = 0
        bucket.append(each)
        nbytes += each.nbytes
    if bucket:
        yield bucket


def _copy_back(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy consecutive elements of a vector into tensors."""
    parts = torch.split(flat, [each.numel() for each in tensors])
    torch._foreach_copy_(
        list(tensors), [part.view_as(each) for part, each in zip(parts, tensors, strict=True)]
    )


def is_tensor_sharded(tensor: torch.Tensor) -> bool:
    """Whether the ranks of a tensor-parallel group hold different parts of a tensor."""
    return isinstance(tensor, DTensor) and any(
        name == "tensor" and not placement.is_replicate()
        for name, placement in zip(
            tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True
        )
    )
