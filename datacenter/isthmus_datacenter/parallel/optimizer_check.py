"""Check that the task's optimizer computes from shards what it computes from whole parameters.

An optimizer that treats each element by itself does so on any sharding. One that uses norms, means
or products of a matrix may fail on a shard, or use the shard alone, without an error. So a few
steps on small parameters of the same names, dimensions and sharding are compared before training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from isthmus.errors import TaskError
from isthmus.task.definition import Parameters
from isthmus.task.optimizers import TaskOptimizers
from isthmus_datacenter.parallel.equivalence_check import outputs_match
from isthmus_datacenter.parallel.model_shard import ModelShard, local

ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.ASGD,
)
"""Optimizers that work on any sharding. Others of PyTorch do not: Rprop fails on shards."""

_STEPS = 3
_SIZES = (5, 3, 2)
"""Largest sizes of the first dimensions: uneven, and on many ranks less than one row for each."""
_TOLERANCE = 1e-4
"""Relative difference allowed: sums over shards round otherwise than sums over whole parameters."""


def refuse_on_shards(optimizers: Iterable[torch.optim.Optimizer], what: str) -> TaskError:
    """The error that says what an optimizer does on shards, and which ones can be used."""
    kinds = {type(each): type(each).__name__ for each in optimizers}
    wrong = " and ".join(name for kind, name in kinds.items() if kind not in ELEMENTWISE)
    wrong = wrong or " and ".join(kinds.values())
    *names, last = (kind.__name__ for kind in ELEMENTWISE)
    return TaskError(
        f"optimizer() returned {wrong}, which {what}; {', '.join(names)} and {last} work with "
        f"every zero_stage and tensor_parallel, and {wrong} may with zero_stage = 0 and "
        "tensor_parallel = 1"
    )


def check_on_shards(
    shard: ModelShard,
    optimizers: Sequence[torch.optim.Optimizer],
    factory: Callable[[Parameters], Any],
    split: Callable[[torch.optim.Optimizer], object],
) -> None:
    """Compare steps of an optimizer on sharded and whole parameters.

    All ranks call this together. A rank that fails may leave the others waiting: it must end.

    Args:
        shard: its trainable parameters are the pattern of the small ones.
        optimizers: what the factory made of them.
        factory: the task's `optimizer()`.
        split: splits the parameter groups of an optimizer by mesh.

    Raises:
        TaskError: the optimizer fails on shards, or computes something else.
    """
    trained = {name: each for name, each in shard.parameters().items() if each.requires_grad}
    if not any(isinstance(each, DTensor) for each in trained.values()):
        return
    numbered = list(enumerate(trained.items()))
    values = {name: _values(each, 2 * number) for number, (name, each) in numbered}
    # Not in proportion to the parameters, whose norms would then cancel out.
    whole_gradients = {name: _values(each, 2 * number + 1) for number, (name, each) in numbered}
    whole = {name: nn.Parameter(each.clone()) for name, each in values.items()}
    try:
        _take_steps(factory, whole, whole_gradients, lambda optimizer: None)
    except Exception as error:
        # It may want parameters of the real sizes.
        if all(type(each) in ELEMENTWISE for each in optimizers):
            return
        what = "fails on the small parameters by which its work on shards is checked"
        raise refuse_on_shards(optimizers, what) from error
    sharded = {name: nn.Parameter(_like(trained[name], each)) for name, each in values.items()}
    gradients = {name: _like(trained[name], each) for name, each in whole_gradients.items()}
    try:
        _take_steps(factory, sharded, gradients, split)
    except Exception as error:
        raise refuse_on_shards(optimizers, "fails on shards of the parameters") from error
    for name, each in sharded.items():
        expected = local(_like(trained[name], whole[name].detach()))
        if not outputs_match(expected, local(each), _TOLERANCE):
            what = f"moves shards of {name!r} otherwise than all of it"
            raise refuse_on_shards(optimizers, what)


def _take_steps(
    factory: Callable[[Parameters], Any],
    parameters: Mapping[str, nn.Parameter],
    gradients: Mapping[str, torch.Tensor],
    split: Callable[[torch.optim.Optimizer], object],
) -> None:
    """Take a few steps with gradients of changing lengths and signs."""
    optimizers = TaskOptimizers(
        factory(Parameters(list(parameters.items()))), list(parameters.values())
    )
    for optimizer in optimizers.named.values():
        split(optimizer)
    for step in range(_STEPS):
        for name, parameter in parameters.items():
            # Another one in each step, as optimizers may change gradients in place.
            parameter.grad = gradients[name] * (1.0 - 0.7 * step)
        optimizers.step()


def _values(parameter: torch.Tensor, number: int) -> torch.Tensor:
    """A small tensor with the dimensions of a parameter, the same on all ranks that have it."""
    limits = (*_SIZES, *[_SIZES[-1]] * parameter.ndim)
    sizes = [min(size, limit) for size, limit in zip(parameter.shape, limits, strict=False)]
    generator = torch.Generator().manual_seed(number)
    return torch.randn(sizes, generator=generator).to(parameter.device)


def _like(parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The values, sharded like a parameter."""
    if not isinstance(parameter, DTensor):
        return values.clone()
    # A dimension that two axes of the mesh shard is sharded in another order there, which makes no
    # difference here.
    placements = [
        each if (dim := getattr(each, "dim", None)) is None else Shard(dim)
        for each in parameter.placements
    ]
    return distribute_tensor(values, parameter.device_mesh, placements, src_data_rank=None)
