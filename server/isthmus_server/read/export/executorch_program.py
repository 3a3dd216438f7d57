"""A model as a program of ExecuTorch, for apps on phones and small devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from isthmus.errors import UserError
from isthmus.task import Task
from isthmus_server.read.export.program import TaskProgram, close_to, example_batch


def export_executorch(task: Task, module: nn.Module, path: Path) -> None:
    """Write the model as a program for one example at a time, with portable kernels.

    It is executed by ExecuTorch's runtime and compared with the model.

    Args:
        task: the task, whose `forward` is part of the program.
        module: its model, in evaluation mode.
        path: of the file, `.pte`.

    Raises:
        UserError: ExecuTorch is not installed, the task has no central held-out data, ExecuTorch
            cannot express the model, or the program computes something else.
    """
    try:
        from executorch.exir import to_edge
        from executorch.runtime import Runtime
    except ImportError as error:
        raise UserError(
            f"--format executorch needs ExecuTorch, which cannot be imported ({error}); install "
            "it with: pip install executorch"
        ) from None
    program = TaskProgram(task, module).eval()
    inputs = example_batch(task, 1)
    try:
        traced = torch.export.export(program, (inputs,))
        written: bytes = to_edge(traced).to_executorch().buffer
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise UserError(
            f"ExecuTorch cannot express the model ({type(error).__name__}: {first}); use --format "
            "torch-export or safetensors"
        ) from error
    path.write_bytes(written)
    leaves = pytree.tree_leaves(inputs)
    found: Any = Runtime.get().load_program(path).load_method("forward").execute(leaves)
    with torch.no_grad():
        expected = program(inputs)
    if not close_to(pytree.tree_leaves(expected), list(found)):
        path.unlink()
        raise UserError(
            "the program of ExecuTorch does not compute what the model does; use --format "
            "torch-export or safetensors"
        )
