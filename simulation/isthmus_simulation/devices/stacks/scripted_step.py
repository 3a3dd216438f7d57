"""Have PyTorch's own interpreter run a recorded step, without Python between its operations.

In a step of a small model, Python takes about as long between the operations as they take.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Sequence

import torch

Step = Callable[..., Sequence[torch.Tensor]]
"""Computes tensors of tensors, and changes some of these; numbers come after the tensors."""

log = logging.getLogger(__name__)

_MOST_OPERATIONS = 200
"""Most operations of a step that is scripted. Scripting takes a second for some hundred, and steps
of so many operations belong to larger models, whose operations take longer than Python between
them."""


def scripted(recorded: torch.fx.GraphModule, arguments: Sequence[torch.Tensor | float]) -> Step:
    """A step that computes the same bits as a recorded one; that one if there is no faster.

    Args:
        recorded: operations of PyTorch, each with the overload that was recorded.
        arguments: with which both are compared; they stay as they are.
    """
    if len(recorded.graph.nodes) > _MOST_OPERATIONS:
        return recorded
    try:
        script = _script(recorded, arguments)

        def step(*arguments: torch.Tensor | float) -> Sequence[torch.Tensor]:
            try:
                with torch.jit.optimized_execution(False):  # which would compile for each new shape
                    results: Sequence[torch.Tensor] = script(*arguments)
                    return results
            except RuntimeError as error:  # without the stack of the script
                raise RuntimeError(str(error).rpartition("RuntimeError: ")[2].strip()) from None

        return step if _are_equal(recorded, step, arguments) else recorded
    except Exception:  # TorchScript has many kinds for what it does not know, without a base
        log.debug("a step stays in Python", exc_info=True)
        return recorded


def _script(
    recorded: torch.fx.GraphModule, arguments: Sequence[torch.Tensor | float]
) -> torch.jit.ScriptModule:
    step = torch.fx.GraphModule(recorded, copy.deepcopy(recorded.graph))
    inputs = [node for node in step.graph.nodes if node.op == "placeholder"]
    for node, argument in zip(inputs, arguments, strict=True):
        node.type = float if isinstance(argument, float) else torch.Tensor
    for node in step.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            node.target = node.target.overloadpacket  # which TorchScript finds by the arguments
    step.recompile()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript gets no new features
        script: torch.jit.ScriptModule = torch.jit.script(step)
    return script


def _are_equal(one: Step, other: Step, arguments: Sequence[torch.Tensor | float]) -> bool:
    """Whether two steps compute the same bits, also in the arguments that they change."""
    results = []
    for step in (one, other):
        own = [each.clone() if isinstance(each, torch.Tensor) else each for each in arguments]
        with torch.random.fork_rng(devices=[]), torch.no_grad():  # no GPU is used for it
            torch.default_generator.manual_seed(0)
            computed = step(*own)
        results.append([*computed, *(each for each in own if isinstance(each, torch.Tensor))])
    return len(results[0]) == len(results[1]) and all(
        a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(*results, strict=True)
    )
