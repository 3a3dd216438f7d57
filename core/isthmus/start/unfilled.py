"""Build a model whose parameters have no memory, to be filled in parts.

>>> with parameters_without_memory():
...     model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
>>> model[0].weight.is_meta, model[1].running_mean.is_meta
(True, False)
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from isthmus.tensors.given_memory import MemoryUse


class Originals:
    """The parameters as they were made, with memory, before one without took the place of each."""

    def __init__(self) -> None:
        self._parameters: list[weakref.ref[nn.Parameter]] = []
        self._memory: list[MemoryUse] = []
        self._marked = False

    def replaced(self, parameter: nn.Parameter) -> None:
        """Note that another object takes the place of a parameter."""
        self._parameters.append(weakref.ref(parameter))
        self._memory.append(MemoryUse(parameter))
        hooks = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
        self._marked |= bool(vars(parameter)) or any(hooks)

    def are_missed(self) -> bool:
        """Whether the code of the model has one of them still, or had given it more than values.

        That is an attribute or a hook of the parameter, a reference from somewhere other than
        its module, or another tensor in its memory, as a view of it is.
        """
        if self._marked:
            return True
        if not self._are_held():
            return False
        gc.collect()  # what is in a cycle of references is no use of it
        return self._are_held()

    def _are_held(self) -> bool:
        return any(each() is not None for each in self._parameters) or not all(
            each.has_ended() for each in self._memory
        )


@contextlib.contextmanager
def parameters_without_memory() -> Iterator[Originals]:
    """Put the parameters of modules that are built in the block on the device `meta`.

    Each is made with memory, which is freed when it is registered; initialising it afterwards does
    nothing. Buffers and other tensors have their values. Not for several threads.
    """
    originals = Originals()

    def without_memory(_: nn.Module, __: str, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.is_meta:  # that of another module, which is tied: it stays the same object
            return parameter
        originals.replaced(parameter)
        return nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(
        without_memory  # type: ignore[arg-type]  # what it returns is registered, says PyTorch
    )
    try:
        yield originals
    finally:
        hook.remove()
