"""Split a model into pipeline stages: as its task says, or at its longest container of blocks.

Without help of the task, the longest container of blocks is split into contiguous groups with about
equal numbers of parameters. Modules that run before the first block go to the first stage, modules
that run after it to the last. A module that runs before, has no parameters, and returns something
else than the blocks' hidden states (the angles of rotary embeddings) is in every stage. None of
this can be proved from the outside, so the outputs for a sample of the data must agree with those
of the whole model (`equivalence_check`).
"""

from __future__ import annotations

import collections
import contextlib
import copy
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from isthmus.errors import TaskError
from isthmus.task import Task, user_code
from isthmus_datacenter.parallel.equivalence_check import (
    RunModule,
    StageTrace,
    check_stages,
    first_line,
    run_in_eval_mode,
    trace_stages,
    unlike_a_constant,
    with_values,
)
from isthmus_datacenter.parallel.parallel_dims import ParallelDims
from isthmus_datacenter.parallel.unfilled_model import UnfilledModel

_FOR_EXAMPLE = (
    "; for example, no stage can pass over positions(torch.arange(n)), whose output is without the "
    "dimension of examples"
)
"""What is said of a split that fails without values, in place of a message of PyTorch."""


def split_into_stages(
    task: Task,
    model: nn.Module,
    dims: ParallelDims,
    sample: Any,
    expected: Any,
    run: RunModule = run_in_eval_mode,
    *,
    compared: bool = True,
    unfilled: UnfilledModel | None = None,
) -> tuple[list[nn.Module], list[StageTrace]]:
    """Split a model into the pipeline's stages, and check them on a sample.

    Args:
        task: may give stages of its own.
        model: the whole model.
        dims: has more than one pipeline stage.
        sample: inputs of a few examples.
        expected: the whole model's output for them.
        run: calls the model and its stages.
        compared: whether outputs are compared with `expected`; tensors without values cannot be.
        unfilled: the model, if its parameters are without memory.

    Returns:
        The stages, which share the model's modules; and for each its inputs and output.

    Raises:
        TaskError: the model cannot be split like this, and what to do about it.
    """
    if type(task).forward is not Task.forward:
        raise TaskError(
            "the task has a forward() of its own, which a pipeline's stages cannot go through; "
            "move it into the model or set pipeline_parallel = 1"
        )
    if not isinstance(sample, torch.Tensor):
        raise TaskError(
            f"a pipeline takes a batch of inputs as one tensor, not {type(sample).__name__}; "
            "set pipeline_parallel = 1"
        )

    def check(stages: Sequence[nn.Module]) -> list[StageTrace]:
        if not compared:
            return trace_stages(stages, sample, run)
        traces = check_stages(stages, expected, sample, run)
        _check_shared_constants(model, stages, sample, run, unfilled)
        return traces

    with user_code("pipeline_stages()"):
        # The task knows its model; only without its help the blocks are looked for.
        task_stages = task.pipeline_stages(model, dims.stages)
    if task_stages is None:
        stages = split_at_blocks(model, dims.stages, sample, run)
        try:
            with _without_tracebacks():
                return stages, check(stages)
        except Exception as error:
            # Without values the message is about shapes within an operator's decomposition.
            is_told = compared or isinstance(error, TaskError)
            why = f" ({first_line(error)})" if is_told else _FOR_EXAMPLE
            raise TaskError(
                f"the model cannot be split into {dims.stages} pipeline stages without help, "
                f"because its forward() does more than call its blocks in order{why}; give the "
                "task a pipeline_stages(model, n)"
            ) from error
    stages = list(task_stages)
    if len(stages) != dims.stages or not all(isinstance(each, nn.Module) for each in stages):
        raise TaskError(
            f"pipeline_stages(model, {dims.stages}) must return {dims.stages} modules, and "
            f"returned {[type(each).__name__ for each in stages]}"
        )
    try:
        return stages, check(stages)
    except Exception as error:
        raise TaskError(
            "the stages of pipeline_stages() do not compute what the model computes: "
            f"{first_line(error)}"
        ) from error


@contextlib.contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Within it PyTorch does not log the traceback of an operator that fails on fake tensors.

    The split is only tried, and its failure is told in a sentence.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


def _check_shared_constants(
    model: nn.Module,
    stages: Sequence[nn.Module],
    sample: Any,
    run: RunModule,
    unfilled: UnfilledModel | None,
) -> None:
    """Compare again with other values of parameters that several stages have and that are constant.

    A position embedding that begins with zeros, for example, is added in each stage if it belongs
    to no module around the blocks, which shows only after it was trained.

    Raises:
        TaskError: the outputs differ.
    """
    users = collections.Counter(each for stage in stages for each in set(stage.parameters()))
    others = {}
    names = []
    for name, parameter in model.named_parameters():
        if users[parameter] > 1:
            values = parameter.detach() if unfilled is None else unfilled.read(name, parameter)
            if (other := unlike_a_constant(values)) is not None:
                others[parameter] = other
                names.append(name)
    if not others:
        return
    with with_values(others) if unfilled is None else unfilled.with_values(others):
        expected = run(model, sample)
        try:
            check_stages(stages, expected, sample, run)
        except TaskError as error:
            raise TaskError(
                f"with other values of {names[0]!r}, which several stages use: {error}"
            ) from error


def split_at_blocks(
    model: nn.Module, stages: int, sample: torch.Tensor, run: RunModule = run_in_eval_mode
) -> list[nn.Module]:
    """Split a model at its longest container of blocks; the stages share the model's modules.

    Raises:
        TaskError: there are fewer blocks than stages.
    """
    path, container = _longest_container(model, stages)
    positions = _positions_around_blocks(model, path, container, sample, run)
    groups = _balanced_groups(container, stages)
    return [
        _stage_view(model, path, positions, set(groups[index]), index, stages)
        for index in range(stages)
    ]


class SkippedModule(nn.Module):
    """Takes the place of a module that is in another stage: returns its first argument."""

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        self._first_parameter = _first_parameter(replaced)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first argument unchanged; None if there is none."""
        return args[0] if args else kwargs.get(self._first_parameter)


def _first_parameter(module: nn.Module) -> str:
    """Name of the first parameter of a module's forward()."""
    return next(iter(inspect.signature(module.forward).parameters), "")


def _longest_container(model: nn.Module, stages: int) -> tuple[list[str], nn.Module]:
    """The container to split, with the names that lead to it."""
    longest = 0
    best: tuple[int, str, nn.Module] | None = None
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        blocks = sum(_parameter_count(child) > 0 for child in module.children())
        longest = max(longest, blocks)
        # The container with most parameters, of those that are long enough: a long one may be a
        # small part of the model.
        if blocks >= stages and (best is None or _parameter_count(module) > best[0]):
            best = (_parameter_count(module), name, module)
    if best is None:
        raise TaskError(
            f"the model cannot be split into {stages} pipeline stages: its longest Sequential or "
            f"ModuleList has {longest} blocks with parameters; lower pipeline_parallel or give the "
            "task a pipeline_stages(model, n)"
        )
    return (best[1].split(".") if best[1] else []), best[2]


def _positions_around_blocks(
    model: nn.Module, path: list[str], container: nn.Module, sample: torch.Tensor, run: RunModule
) -> dict[str, str]:
    """Find by a forward pass whether each module around the blocks runs `before` or `after` them.

    `every_stage` marks a module that all stages need.
    """
    positions: dict[str, str] = {}
    output_shapes: dict[str, Any] = {}
    block_input_shapes: list[torch.Size | None] = []
    hooks = []
    module = model
    for depth, step in enumerate(path):
        for name, child in module.named_children():
            if name == step:
                continue
            full_name = ".".join([*path[:depth], name])

            def record_call(*_: Any, full_name: str = full_name) -> None:
                positions.setdefault(full_name, "after" if block_input_shapes else "before")

            def record_output(_: Any, args: Any, output: Any, full_name: str = full_name) -> None:
                output_shapes.setdefault(full_name, _shape(output))

            hooks.append(child.register_forward_pre_hook(record_call))
            if not _parameter_count(child):
                hooks.append(child.register_forward_hook(record_output))
        module = module.get_submodule(step)

    def record_block_input(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        block_input_shapes.append(_shape(args[0] if args else kwargs.get(_first_parameter(block))))

    hooks += [
        block.register_forward_pre_hook(record_block_input, with_kwargs=True)
        for block in container.children()
    ]
    try:
        run(model, sample)
    finally:
        for hook in hooks:
            hook.remove()
    # What runs before the blocks and gives another shape than theirs does not make the hidden
    # state, but something that blocks in all stages may take, such as angles of rotary embeddings.
    hidden_shape = block_input_shapes[0] if block_input_shapes else None
    for full_name, shape in output_shapes.items():
        if positions[full_name] == "before" and shape != hidden_shape:
            positions[full_name] = "every_stage"
    return positions


def _shape(value: Any) -> torch.Size | None:
    """Shape of a tensor; None for anything else."""
    return value.shape if isinstance(value, torch.Tensor) else None


def _balanced_groups(container: nn.Module, stages: int) -> list[list[str]]:
    """Names of each stage's blocks: contiguous, each with parameters, about equally many."""
    sizes = [(name, _parameter_count(block)) for name, block in container.named_children()]
    total = sum(size for _, size in sizes)
    blocks_left = sum(size > 0 for _, size in sizes)
    groups: list[list[str]] = [[]]
    assigned = blocks_in_group = 0
    for name, size in sizes:
        groups_left = stages - len(groups)
        # A block goes to the side on which most of it lies.
        full = 2 * assigned + size > 2 * total * len(groups) / stages
        if size and blocks_in_group and groups_left and (full or blocks_left <= groups_left):
            groups.append([])
            blocks_in_group = 0
        groups[-1].append(name)
        assigned += size
        blocks_in_group += size > 0
        blocks_left -= size > 0
    return groups


def _stage_view(
    model: nn.Module,
    path: Sequence[str],
    positions: Mapping[str, str],
    blocks: set[str],
    index: int,
    stages: int,
) -> nn.Module:
    """Copy the modules that lead to the blocks; share or skip everything else."""
    clone = root = _shallow_copy(model)
    for depth, step in enumerate(path):
        for name, module in clone._modules.items():
            position = positions.get(".".join([*path[:depth], name]))
            own_stage = 0 if position == "before" else stages - 1
            included = position == "every_stage" or index == own_stage
            if name != step and not included and module is not None:
                # Not removed: the model's forward() still calls it.
                clone._modules[name] = SkippedModule(module)
        child = clone._modules[step]
        assert child is not None
        clone._modules[step] = clone = _shallow_copy(child)
    for name, block in clone._modules.items():
        if name not in blocks and block is not None:
            clone._modules[name] = SkippedModule(block)
    return root


def _shallow_copy(module: nn.Module) -> nn.Module:
    """A copy that shares the tensors, with its own tables of parameters, buffers and children."""
    clone = copy.copy(module)
    for key, value in clone.__dict__.items():
        if isinstance(value, (dict, set)):
            clone.__dict__[key] = copy.copy(value)
    return clone


def _parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
