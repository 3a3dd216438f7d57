"""Check that a split or sharded model computes the same outputs as the whole one, on a sample.

Neither pipeline stages nor tensor-parallel plans can be proved correct from the outside, so a few
examples pass through the model before and after, and the outputs must agree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from isthmus.errors import TaskError
from isthmus.task.scoring.kept_values import KeptValues

StageTrace = tuple[tuple[Any, ...], Any]
"""Inputs and output of one stage, for the sample."""

RunModule = Callable[..., Any]
"""Calls a module with inputs, as `run_in_eval_mode` does."""

LEFT_OTHERS = "other ranks may be waiting for this one in an exchange"
"""Note of an error that came up while ranks exchanged parts of a model."""
_STAGES_TOLERANCE = 1e-4
"""Relative difference allowed between a model and its stages, which compute in the same order."""
_SHARDING_TOLERANCE = 1e-3
"""Relative difference allowed between a whole and a sharded model, which sums in another order:
above the rounding of a GPU's TF32, and far below the effect of a wrong plan."""


class PartitionError(TaskError):
    """A model that is partitioned over tensor-parallel ranks is not what it was as a whole."""

    def __init__(self, fact: str, remedy: str) -> None:
        """`fact`: what differs, as the end of a clause; `remedy`: what to do about it."""
        super().__init__(f"with its matrices sharded {fact}; {remedy}")
        self.fact = fact


def run_in_eval_mode(model: nn.Module, *inputs: Any) -> Any:
    """Return the output of a module in evaluation mode, without gradients.

    The modules' modes, what they keep in attributes and the state of the random number generators
    are restored.
    """
    modes = {module: module.training for module in model.modules()}
    kept = KeptValues(modes)
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return model(*inputs)
    finally:
        kept.undo()
        for module, training in modes.items():
            module.training = training


def check_stages(
    stages: Sequence[nn.Module], expected: Any, sample: Any, run: RunModule = run_in_eval_mode
) -> list[StageTrace]:
    """Run the stages in order on a sample and compare the last output with the whole model's.

    Returns:
        The inputs and the output of each stage.

    Raises:
        TaskError: the outputs differ.
    """
    traces = trace_stages(stages, sample, run)
    _, output = traces[-1]
    if not outputs_match(expected, output, _STAGES_TOLERANCE):
        raise TaskError("called in order, they give another output than the model")
    return traces


def trace_stages(
    stages: Sequence[nn.Module], sample: Any, run: RunModule = run_in_eval_mode
) -> list[StageTrace]:
    """Run the stages in order on a sample; returns the inputs and the output of each."""
    value = sample
    traces: list[StageTrace] = []
    for stage in stages:
        inputs = value if isinstance(value, tuple) else (value,)
        value = run(stage, *inputs)
        traces.append((inputs, value))
    return traces


def check_sharded(module: nn.Module, trace: StageTrace, device: torch.device) -> None:
    """Compare the output of a tensor-parallel module with the output it had before sharding.

    All ranks that share the module call this together.

    Raises:
        TaskError: the module fails, or its output differs.
    """
    inputs, expected = trace
    try:
        output = run_in_eval_mode(module, *on_device(inputs, device))
    except TaskError:  # has said what to change
        raise
    except Exception as error:
        raise PartitionError(
            f"the model fails ({first_line(error)})",
            "give the task a tensor_parallel_plan(model) that fits it",
        ) from error
    if not outputs_match(expected, output, _SHARDING_TOLERANCE):
        raise PartitionError(
            "the model gives another output than whole",
            "correct the task's tensor_parallel_plan(model), or give it one",
        )


@contextlib.contextmanager
def while_exchanging() -> Iterator[None]:
    """Within it ranks exchange parts of a model; a refusal gets the note `LEFT_OTHERS`."""
    try:
        yield
    except TaskError as error:
        error.add_note(LEFT_OTHERS)
        raise


def has_left_others(error: BaseException | None) -> bool:
    """Whether an error, or what has caused it, came up while ranks exchanged parts of a model."""
    while error is not None:
        if LEFT_OTHERS in getattr(error, "__notes__", ()):
            return True
        error = error.__cause__
    return False


@contextlib.contextmanager
def with_values(others: Mapping[nn.Parameter, torch.Tensor]) -> Iterator[None]:
    """Within it some parameters have other values."""
    own = {parameter: parameter.detach().clone() for parameter in others}
    with torch.no_grad():
        for parameter, values in others.items():
            parameter.copy_(values)
        try:
            yield
        finally:
            for parameter, values in own.items():
                parameter.copy_(values)


def unlike_a_constant(values: torch.Tensor) -> torch.Tensor | None:
    """Values in place of those of a parameter that is one number everywhere; None for any other.

    Adding zeros twice, or multiplying by ones twice, shows only with these.

    >>> unlike_a_constant(torch.zeros(3))
    tensor([0.2500, 0.5000, 0.7500])
    >>> unlike_a_constant(torch.arange(3.0)) is None
    True
    """
    if not values.is_floating_point() or not values.numel() or values.min() != values.max():
        return None
    change = torch.linspace(0.25, 0.75, values.numel(), device=values.device)
    return (values + change.reshape(values.shape)).to(values.dtype)


def on_device(inputs: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    """The inputs with their tensors on a device."""
    moved: tuple[Any, ...] = torch.utils._pytree.tree_map(
        lambda each: each.to(device) if isinstance(each, torch.Tensor) else each, inputs
    )
    return moved


def outputs_match(first: Any, second: Any, tolerance: float) -> bool:
    """Whether two outputs agree: tensors up to `tolerance`, relative to the largest element."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        if first.shape != second.shape:
            return False
        if not first.is_floating_point():
            return torch.equal(first, second.to(first.device))
        converted = second.to(first.device, first.dtype)
        scale = float(first.abs().max()) if first.numel() else 0.0
        return bool(((first - converted).abs() <= tolerance * max(scale, 1e-6)).all())
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(
            outputs_match(first[key], second[key], tolerance) for key in first
        )
    if isinstance(first, (tuple, list)) and isinstance(second, (tuple, list)):
        return len(first) == len(second) and all(
            outputs_match(left, right, tolerance) for left, right in zip(first, second, strict=True)
        )
    return type(first) is type(second)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, at most 200 characters."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
