"""Build a model whose parameters have no memory, to be filled in parts.

>>> with parameters_without_memory():
...     model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
>>> model[0].weight.is_meta, model[1].running_mean.is_meta
(True, False)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Put the parameters of modules that are built in the block on the device `meta`.

    Each is made with memory, which is freed when it is registered; initialising it afterwards does
    nothing. Buffers and other tensors have their values. Not for several threads.
    """
    register = nn.Module.register_parameter

    def without_memory(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        # A parameter of another module that is tied stays the same object.
        if param is not None and not param.is_meta:
            self._parameters[name] = nn.Parameter(param.to("meta"), param.requires_grad)

    nn.Module.register_parameter = without_memory  # type: ignore[method-assign] # PyTorch has no hook
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign] # PyTorch has no hook
