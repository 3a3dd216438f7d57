"""Call a model without memory: each module has the values of its parameters while it is called.

Only the modules that are being called are in memory, and those whose backward pass still needs
their values. Where blocks are recomputed in the backward pass, that is one block.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

Read = Callable[[str, nn.Parameter], torch.Tensor]
"""Returns the values of a parameter, in memory of their own; given its first path and itself."""
Take = Callable[[str, torch.Tensor], None]
"""Receives the gradient of a parameter, given its first path."""


@contextlib.contextmanager
def values_while_called(root: nn.Module, read: Read, take: Take | None = None) -> Iterator[None]:
    """Within it, modules have the values of their own parameters while they are called.

    Code that uses a parameter while its module is not called finds it without memory, which raises
    a `RuntimeError`. So does code that changes a parameter in place, as the change is lost.

    Args:
        root: a module whose parameters have no memory; it is as before afterwards.
        read: gives the values.
        take: receives the gradient of each trained parameter, once: the sum over all calls of the
            modules that have it. That is in about the order of the backward pass. None to give
            parameters whose gradients nobody receives.
    """
    gradients = None if take is None else _Gradients(take)
    # Modules may share a parameter, which then has one gradient.
    paths = {parameter: path for path, parameter in root.named_parameters()}
    with contextlib.ExitStack() as restored:
        restored.enter_context(_RefusesMissingValues())  # type: ignore[no-untyped-call]  # PyTorch has no types for it
        for module in root.modules():
            own = {name: each for name, each in module._parameters.items() if each is not None}
            if own:
                restored.enter_context(_Calls(module, own, paths, read, gradients).watched())
        yield
    if gradients is not None:
        gradients.take_rest()


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Hide what is computed in the block from those who watch what the model computes.

    Reading values is no decision of the model's code about what it calls next, and draws nothing.
    """
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


class _RefusesMissingValues(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch has no types for it
    """Refuses operators on tensors without memory.

    PyTorch's product of a matrix on a processor and one on `meta` is a matrix of any numbers.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, torch.Tensor) and each.is_meta:
                raise RuntimeError("a parameter is used while its module is not called")
        return func(*args, **(kwargs or {}))


class _Gradients:
    """Sums the gradients of each parameter over the calls in which it was given."""

    def __init__(self, take: Take) -> None:
        self._take = take
        self._calls: dict[str, int] = {}
        """Calls in the forward pass whose gradient has not come yet."""
        self._sums: dict[str, torch.Tensor] = {}

    def given(self, path: str) -> None:
        # A block that is recomputed is no further call: its gradient goes to the first one.
        if torch._C._current_graph_task_id() == -1:
            self._calls[path] = self._calls.get(path, 0) + 1

    def received(self, path: str, gradient: torch.Tensor) -> None:
        self._calls[path] -= 1
        if path in self._sums:
            gradient = self._sums.pop(path) + gradient
        if self._calls[path]:
            self._sums[path] = gradient
        else:
            self._take(path, gradient)

    def take_rest(self) -> None:
        """Pass on the gradients of parameters that a call gave to nothing that has a gradient."""
        for path, gradient in self._sums.items():
            self._take(path, gradient)


class _Given(torch.autograd.Function):
    """Values as a function of nothing: the graph of the forward pass does not keep them."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        read: Callable[[], torch.Tensor],
        received: Callable[[torch.Tensor], None],
    ) -> torch.Tensor:
        """`anchor` has a gradient, so that the output has one."""
        ctx.received = received
        return read()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.received(gradient)
        return None, None, None


class _Calls:
    """The calls of one module that has parameters."""

    def __init__(
        self,
        module: nn.Module,
        own: Mapping[str, nn.Parameter],
        paths: Mapping[nn.Parameter, str],
        read: Read,
        gradients: _Gradients | None,
    ) -> None:
        self._module = module
        self._own = own
        self._paths = paths
        self._read = read
        self._gradients = gradients
        self._depth = 0
        """Calls of the module that have begun and not ended."""
        self._given: dict[str, tuple[torch.Tensor, int]] = {}
        """Values of the parameters in this call, by name, and their version before it."""

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within it the module has its values in calls, and in calls of its `forward` alone."""
        module = self._module
        before = vars(module).get("forward")
        forward = module.forward

        @functools.wraps(forward)
        def called(*args: Any, **kwargs: Any) -> Any:
            self._begin()
            try:
                return forward(*args, **kwargs)
            finally:
                self._end()

        # Both: other hooks may need the values, and recomputation calls `forward` alone.
        handles = (
            module.register_forward_pre_hook(self._begin, prepend=True),
            module.register_forward_hook(self._end, always_call=True),
        )
        module.forward = called
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            del module.forward
            if before is not None:
                module.forward = before

    def _begin(self, *_: object) -> None:
        self._depth += 1
        if self._depth == 1:
            for name, parameter in self._own.items():
                # Another tensor may stand in for it, as in `torch.func.functional_call`.
                if self._module._parameters.get(name) is parameter:
                    values = self._give(self._paths[parameter], parameter)
                    self._module._parameters[name] = values
                    self._given[name] = (values, values._version)

    def _end(self, *_: object) -> None:
        if not self._depth:  # a hook before the first of these has failed
            return
        self._depth -= 1
        if not self._depth:
            given = self._given
            self._given = {}
            self._module._parameters.update({name: self._own[name] for name in given})
            if any(values._version != version for values, version in given.values()):
                raise RuntimeError("a parameter is changed while its module is called")

    def _give(self, path: str, parameter: nn.Parameter) -> Any:
        gradients = self._gradients
        if gradients is None:
            return nn.Parameter(self._values(path, parameter), parameter.requires_grad)
        if not parameter.requires_grad or not torch.is_grad_enabled():
            return self._values(path, parameter)
        gradients.given(path)
        return _Given.apply(  # type: ignore[no-untyped-call]  # PyTorch has no types for it
            torch.empty(0, requires_grad=True),
            functools.partial(self._values, path, parameter),
            functools.partial(gradients.received, path),
        )

    def _values(self, path: str, parameter: nn.Parameter) -> torch.Tensor:
        with unobserved():
            return self._read(path, parameter)
