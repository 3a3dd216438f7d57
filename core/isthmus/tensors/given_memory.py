"""Give a parameter other memory, of another type or on another device; it stays the same object.

So it stays what it is for all that hold it: modules, lists of them, and layers that it is tied to.

>>> weight = nn.Parameter(torch.zeros(2), requires_grad=False)
>>> held = [weight]
>>> give_memory(weight, torch.ones(2, dtype=torch.bfloat16, device="meta"))
>>> held[0] is weight, weight.dtype, weight.is_meta
(True, torch.bfloat16, True)
"""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef


class MemoryUse:
    """Whether anything still uses the memory that a tensor had, such as a view of it.

    >>> weight = torch.zeros(2)
    >>> view = weight[:1]
    >>> use = MemoryUse(weight)
    >>> del weight
    >>> use.has_ended()
    False
    >>> del view
    >>> use.has_ended()
    True
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._memory = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # of PyTorch

    def has_ended(self) -> bool:
        """Whether it was freed."""
        return bool(self._memory.expired())  # type: ignore[no-untyped-call]  # of PyTorch


def can_move(parameter: nn.Parameter) -> bool:
    """Whether `give_memory` can put a parameter on another device.

    PyTorch refuses one that is referenced weakly, as those of recurrent layers are.
    """
    return not weakref.getweakrefs(parameter)


def give_memory(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Have a parameter without gradients use the memory of `values`, of its shape.

    What it had is freed, if nothing else uses it.

    Raises:
        RuntimeError: `values` are on another device, and it cannot move.
    """
    if values.device == parameter.device:
        parameter.data = values
        return
    attributes = dict(vars(parameter))
    other = nn.Parameter(values, requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]  # of PyTorch
    vars(parameter).update(attributes)
