"""Have a GPU repeat a recorded step as one graph of kernels, without launching each of them.

The kernels of a small model's step take less time than their launches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

log = logging.getLogger(__name__)

_WARM_UP = 3
"""Runs before a capture, in which libraries allocate what they keep, see `torch.cuda.graph`."""


def captured(
    recorded: torch.fx.GraphModule, arguments: Sequence[torch.Tensor]
) -> Callable[..., Sequence[torch.Tensor]]:
    """A recorded step as a CUDA graph; that step itself if it cannot be one.

    Args:
        recorded: operations of PyTorch that change none of their arguments and draw no numbers.
        arguments: tensors with the shapes of all later ones.

    Returns:
        The step; what it returns is overwritten by the next call.
    """
    try:
        return _Captured(recorded, arguments)
    except RuntimeError:  # of an operation that waits for the GPU, or has no memory left
        log.debug("a step is launched kernel by kernel", exc_info=True)
        return recorded


class _Captured:
    """A CUDA graph with memory for its arguments and results."""

    def __init__(self, recorded: torch.fx.GraphModule, arguments: Sequence[torch.Tensor]) -> None:
        self._arguments = [each.clone() for each in arguments]
        self._graph = torch.cuda.CUDAGraph()
        device = arguments[0].device
        with torch.cuda.device(device), torch.no_grad():
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # of PyTorch
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARM_UP):
                    recorded(*self._arguments)
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(self._graph):
                self._results: Sequence[torch.Tensor] = recorded(*self._arguments)

    def __call__(self, *arguments: torch.Tensor) -> Sequence[torch.Tensor]:
        torch._foreach_copy_(self._arguments, arguments)
        self._graph.replay()
        return self._results
