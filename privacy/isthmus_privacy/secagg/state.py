"""State dicts in and out: any floating type goes through the ring, integers never do.

>>> state = {"weight": torch.ones(2, dtype=torch.bfloat16), "steps": torch.tensor(7)}
>>> layout_of(state)
Traceback (most recent call last):
    ...
isthmus.errors.UpdateError: 'steps' is of dtype torch.int64, and a mean of those means nothing; ...
>>> layout = layout_of(state, only={"weight"})
>>> scatter(layout, gather(layout, state) * 3, state)
{'weight': tensor([3., 3.], dtype=torch.bfloat16), 'steps': tensor(7)}
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from isthmus.errors import UpdateError
from isthmus.tensors.exchange_set import TensorLayout


def layout_of(
    state: Mapping[str, torch.Tensor], *, only: Collection[str] | None = None
) -> TensorLayout:
    """Where each tensor of the exchange set lies in the vector.

    Args:
        state: a state dict.
        only: the names that travel; None for all.

    Raises:
        UpdateError: a tensor that is not of a real floating type, or a name that is not there.
    """
    names = set(state) if only is None else set(only)
    if missing := sorted(names - set(state)):
        raise UpdateError(f"the state has no {missing[0]!r}")
    for name in sorted(names):
        if not state[name].is_floating_point():
            raise UpdateError(
                f"{name!r} is of dtype {state[name].dtype}, and a mean of those means nothing; "
                "leave it out of the exchange set"
            )
    return TensorLayout.from_shapes({name: tuple(state[name].shape) for name in names})


def gather(layout: TensorLayout, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A float32 vector (N) of the layout's tensors."""
    vector = torch.empty(layout.size, dtype=torch.float32)
    for name, part in layout.parts(vector):
        part.copy_(state[name])
    return vector


def scatter(
    layout: TensorLayout, vector: torch.Tensor, state: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """A new state: the layout's tensors from the vector in their own types, others as they were."""
    parts = dict(layout.parts(vector))
    return {
        name: parts[name].to(tensor.dtype) if name in parts else tensor
        for name, tensor in state.items()
    }
