"""A model as a program of `torch.export`, which runs without the code of its task."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from isthmus.errors import UserError
from isthmus.task import Task
from isthmus.task.loading import user_code
from isthmus.task.scoring import batches, count_examples

_EXAMPLES = 3
"""In the batch that is traced: more than one, which `torch.export` would take for a constant."""


class TaskProgram(nn.Module):
    """A model as its task calls it: from a batch of inputs to the output."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._task = task

    def forward(self, inputs: Any) -> Any:
        """The output of `Task.forward` for a batch, as the task's dataset gives it."""
        return self._task.forward(self.model, inputs)


def export_program(task: Task, module: nn.Module, path: Path) -> bool:
    """Write the model as a program of `torch.export`, which runs without the task's code.

    It is traced with a batch of held-out data, and compared with the model on other batch sizes.

    Args:
        task: the task, whose `forward` is part of the program.
        module: its model, in evaluation mode.
        path: of the file, `.pt2`.

    Returns whether the program takes batches of any size; otherwise of 3 examples only.

    Raises:
        UserError: the task has no central held-out data, the model cannot be traced, or the program
            computes something else.
    """
    program = TaskProgram(task, module).eval()
    traced, *others = _example_batches(task)
    try:
        exported, any_size = _traced(program, traced)
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise UserError(
            f"torch.export cannot trace the model ({type(error).__name__}: {first}); its forward() "
            "may depend on values of the data; use --format safetensors"
        ) from error
    for inputs in [traced, *(others if any_size else [])]:
        with torch.no_grad():
            expected = program(inputs)
            found = exported.module()(inputs)
        if not close_to(expected, found):
            raise UserError(
                "the program of torch.export does not compute what the model does; a part of its "
                "forward() may depend on values of the data; use --format safetensors"
            )
    torch.export.save(exported, path)
    return any_size


def _traced(program: nn.Module, inputs: Any) -> tuple[torch.export.ExportedProgram, bool]:
    """The program, and whether the first dimension of its inputs may have any size."""
    sizes = pytree.tree_map(
        lambda leaf: {0: torch.export.Dim.AUTO} if isinstance(leaf, torch.Tensor) else None, inputs
    )
    exported = torch.export.export(program, (inputs,), dynamic_shapes=(sizes,))
    return exported, bool(exported.range_constraints)


def _example_batches(task: Task) -> Iterator[Any]:
    """Batches of held-out inputs: one to trace, and others of one and of all of these examples."""
    for size in (_EXAMPLES, 1, _EXAMPLES + 2):
        yield example_batch(task, size)


def example_batch(task: Task, size: int) -> Any:
    """The inputs of so many held-out examples, repeated if there are fewer.

    Raises:
        UserError: the task has no central held-out data.
    """
    with user_code("eval_data()"):
        data = task.eval_data()
    if data is None:
        with user_code("public_eval()"):
            data = task.public_eval()
    if data is None:
        raise UserError(
            "a program is traced with an example, and the task has neither eval_data() nor "
            "public_eval(); use --format safetensors"
        )
    count = count_examples(data, "eval_data()")
    indices = [index % count for index in range(size)]
    inputs, _ = next(iter(batches(task, data, indices, size, torch.device("cpu"))))
    return inputs


def close_to(expected: Any, found: Any) -> bool:
    """Whether two outputs are equal up to rounding, in all of their tensors."""
    one = pytree.tree_leaves(expected)
    other = pytree.tree_leaves(found)
    return len(one) == len(other) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        else type(a) is type(b)
        for a, b in zip(one, other, strict=True)
    )
