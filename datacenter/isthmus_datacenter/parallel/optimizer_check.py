"""Check that the task's optimizer computes from a rank's part what it computes from the model.

An optimizer that treats each element by itself does so on any sharding. One that uses norms, means
or products of a matrix may fail on a shard, or use the shard alone, without an error. One that
clips the norm of all parameters, or gives each a rate by its place among them, would do so for each
stage of a pipeline alone. So a few steps on small parameters of the same names, dimensions and
sharding are compared before training.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from isthmus.errors import TaskError
from isthmus.task.definition import Parameters
from isthmus.task.optimizers import TaskOptimizers
from isthmus_datacenter.parallel.equivalence_check import first_line
from isthmus_datacenter.parallel.model_shard import ModelShard, local
from isthmus_datacenter.rank_messages import RankMessages

_SHAPES: RankMessages[dict[str, list[int]]] = RankMessages(
    "parameters of stages", dict[str, list[int]], 1 << 22
)
_FOUND: RankMessages[str] = RankMessages("optimizers of stages", str)

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
_SCALES = (1.0, 1e4)
"""Factors of gradients: what limits their norm may do so for large ones only."""
_TOLERANCE = 1e-4
"""Difference of movements allowed, relative to the largest one: sums over shards round otherwise
than sums over whole parameters."""
_ROUNDINGS = 4
"""Roundings of a parameter that are allowed besides; each of the steps rounds it."""


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
    try:
        values, whole_gradients, whole = _steps_of_whole(factory, values, whole_gradients)
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
        start, end = (local(_like(trained[name], tensor)) for tensor in (values[name], whole[name]))
        if not _end_alike(start, end, local(each)):
            what = f"moves shards of {name!r} otherwise than all of it"
            raise refuse_on_shards(optimizers, what)


def check_on_stages(
    shard: ModelShard,
    optimizers: Sequence[torch.optim.Optimizer],
    factory: Callable[[Parameters], Any],
) -> None:
    """Compare steps of an optimizer on the parameters of this rank's stages and of all stages.

    All ranks call this together, and all of a pipeline fail if one of them does.

    Args:
        shard: its trainable parameters, and those of other stages, are the pattern of small ones.
        optimizers: what the factory made of them.
        factory: the task's `optimizer()`.

    Raises:
        TaskError: the optimizer computes something else, or fails on small parameters.
    """
    if shard.dims.pipeline == 1:
        return
    assert shard.mesh is not None
    group = shard.mesh.get_group("pipeline")
    trained = {name: each for name, each in shard.parameters().items() if each.requires_grad}
    own = {name: list(_values(each, 0).shape) for name, each in trained.items()}
    shapes: dict[str, list[int]] = {}
    for each in _SHAPES.all_gather(own, group):
        shapes |= each
    # In the order of the model, as in one process.
    ordered = {name: shapes[name] for name in shard.all_names if name in shapes}
    known = all(type(each) in ELEMENTWISE for each in optimizers)
    found = next(filter(None, _FOUND.all_gather(_fault(factory, ordered, own, known), group)), "")
    if found:
        names = " and ".join(dict.fromkeys(type(each).__name__ for each in optimizers))
        raise TaskError(
            f"optimizer() returned {names}, which {found}; have it treat each parameter by itself "
            "(datacenter.clip_norm limits the norm of the whole gradient), or set "
            "pipeline_parallel = 1"
        )


def _fault(
    factory: Callable[[Parameters], Any],
    shapes: Mapping[str, Sequence[int]],
    own: Collection[str],
    known: bool,
) -> str:
    """What an optimizer of a stage does otherwise than one of all parameters; empty if nothing.

    Args:
        factory: the task's `optimizer()`.
        shapes: those of all parameters.
        own: the names of those of the stage.
        known: whether it treats each element by itself, and may fail on small parameters.
    """
    if not own:
        return ""
    try:
        differing = [
            name for scale in _SCALES for name in _moved_otherwise(factory, shapes, own, scale)
        ]
    except Exception as error:  # noqa: BLE001 - the task's code may raise anything
        # It may want parameters of the real sizes.
        what = "fails on the small parameters by which its work on stages is checked"
        return "" if known else f"{what} ({first_line(error)})"
    if not differing:
        return ""
    return (
        f"moves {differing[0]!r} otherwise with the parameters of one pipeline stage, which are "
        "those that a rank has, than with those of the whole model"
    )


def _moved_otherwise(
    factory: Callable[[Parameters], Any],
    shapes: Mapping[str, Sequence[int]],
    own: Iterable[str],
    scale: float,
) -> list[str]:
    """The names of a stage's parameters that an optimizer of all of them moves otherwise.

    Args:
        factory: the task's `optimizer()`.
        shapes: those of all parameters.
        own: the names of those of the stage.
        scale: factor of the gradients.
    """
    values = {}
    gradients = {}
    for number, (name, shape) in enumerate(shapes.items()):
        pattern = torch.empty(list(shape))
        values[name] = _values(pattern, 2 * number)
        gradients[name] = scale * _values(pattern, 2 * number + 1)
    values, gradients, whole = _steps_of_whole(factory, values, gradients)
    part = {name: nn.Parameter(values[name].clone()) for name in own}
    _take_steps(factory, part, gradients, lambda optimizer: None)
    return [
        name
        for name, each in part.items()
        if not _end_alike(values[name], whole[name], each.detach())
    ]


_Tensors = dict[str, torch.Tensor]


def _steps_of_whole(
    factory: Callable[[Parameters], Any], values: _Tensors, gradients: _Tensors
) -> tuple[_Tensors, _Tensors, _Tensors]:
    """Take a few steps with whole parameters.

    In float64, if the optimizer takes it: of movements by a learning rate of fine-tuning, float32
    loses what they differ by.

    Args:
        factory: the task's `optimizer()`.
        values: of the parameters.
        gradients: of the first step.

    Returns:
        The values and gradients in the type that was used, and the parameters afterwards.
    """
    for dtype in (torch.float64, torch.float32):
        values = {name: each.to(dtype) for name, each in values.items()}
        gradients = {name: each.to(dtype) for name, each in gradients.items()}
        whole = {name: nn.Parameter(each.clone()) for name, each in values.items()}
        try:
            _take_steps(factory, whole, gradients, lambda optimizer: None)
        except Exception:  # an optimizer's own, which may take float32 only
            if dtype is torch.float32:
                raise
        else:
            break
    return values, gradients, {name: each.detach() for name, each in whole.items()}


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


def _end_alike(start: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two movements of a tensor are alike, by where they end.

    The ends alone would be alike for any two movements by a small learning rate.
    """
    if not start.numel():
        return True
    largest = float((first - start).abs().max())
    size = max(float(start.abs().max()), float(first.abs().max()))
    rounding = torch.finfo(start.dtype).eps * size
    limit = _TOLERANCE * largest + _ROUNDINGS * rounding
    return bool(((first - second).abs() <= limit).all())


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
