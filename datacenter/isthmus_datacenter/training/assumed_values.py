"""What is assumed of values that tensors do not have, where the code of models depends on them.

Experts of mixtures: which expert a token gets depends on its values, and how much memory an expert
takes on how many tokens it gets. Training balances them, so tokens are spread evenly over the
experts. The choices are tensors with values, so that code which looks for the tokens of an expert
finds them, and all else stays without.

Packed sequences: `transformers` looks at the values of positions, to see whether several sequences
are in a row. Where it cannot, it makes a mask for all positions, and copies of keys and values for
each head, which a step with values does not have.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from isthmus_datacenter.parallel.expert_parallel import find_experts


def spread_evenly(model: nn.Module) -> None:
    """Have the experts of a model choose evenly; before ranks divide them."""
    for module in find_experts(model).values():
        module.forward = _ChosenEvenly(module)


class _ChosenEvenly:
    """The `forward` of experts; a copy of the module has one of its own."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._forward: Callable[..., Any] = module.forward
        self.__signature__ = inspect.signature(module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self.__signature__.bind(*args, **kwargs)
        hidden_states, chosen, weights = given.arguments.values()
        if not isinstance(chosen, FakeTensor):
            return self._forward(hidden_states, chosen, weights)
        count: Any = self._module.num_experts
        with _with_values():
            even = torch.arange(chosen.numel()).view(chosen.shape) % count
            return self._forward(hidden_states, even.to(chosen.dtype), weights)


@contextlib.contextmanager
def rows_of_one_sequence(batch: Any) -> Iterator[None]:
    """Within it, models of `transformers` take each row without values for one sequence.

    Not if the batch has positions of its own, which may be those of several.
    """
    masks = sys.modules.get("transformers.masking_utils")
    find = getattr(masks, "find_packed_sequence_indices", None)
    if masks is None or find is None or _has_positions(batch):
        yield
        return

    @functools.wraps(find)
    def found(position_ids: torch.Tensor) -> torch.Tensor | None:
        return None if isinstance(position_ids, FakeTensor) else find(position_ids)

    masks.find_packed_sequence_indices = found  # type: ignore[attr-defined]  # until the block ends
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = find  # type: ignore[attr-defined]  # its own again


def _has_positions(batch: Any) -> bool:
    if isinstance(batch, Mapping):
        return "position_ids" in batch or any(map(_has_positions, batch.values()))
    return isinstance(batch, (tuple, list)) and any(map(_has_positions, batch))


@contextlib.contextmanager
def _with_values() -> Iterator[None]:
    """Within it, tensors that are not made of others without values have some."""
    with _disable_current_modes() as modes, contextlib.ExitStack() as kept:
        for mode in reversed(modes):
            if not isinstance(mode, FakeTensorMode):
                kept.enter_context(mode)
        yield
