"""Convolutions and pools of stacked models, as a processor computes them fastest.

`torch.vmap` makes the models a part of a pool's batch, and of a convolution's channels, and copies
all elements in between. Here they are a part of the channels of both, and channels are last in
memory, because the kernels for processors are vectorised over these.

Shape legend: K = devices of a stack, B = examples of a step, C = channels of a model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from isthmus_simulation.devices.stacks.recorded_step import trace

log = logging.getLogger(__name__)

aten = torch.ops.aten
Pair = Sequence[int]


def record_by_channels(
    step: Callable[..., Any], arguments: Sequence[torch.Tensor]
) -> tuple[torch.fx.GraphModule, bool]:
    """Record a step as said above, and whether that could be done.

    Otherwise it is recorded with PyTorch's own rules, which know more: derivatives of gradients, a
    `vmap` of the model's own, complex numbers.
    """
    try:
        with StackedChannels():
            return trace(step, arguments), True
    except Exception:  # whatever it is, the task gets its own errors from PyTorch's rules
        log.debug("convolutions are recorded with the rules of PyTorch", exc_info=True)
    return trace(step, arguments), False


class _Rectified(NamedTuple):
    """What a ReLU was computed of, while neither has changed."""

    source: torch.Tensor
    state: tuple[object, ...]

    @staticmethod
    def state_of(source: torch.Tensor, result: torch.Tensor) -> tuple[object, ...]:
        """Is the same as long as a ReLU of pooled elements is the pool of the ReLU's result."""
        gradients = torch.is_grad_enabled(), source.requires_grad == result.requires_grad
        return source._version, result._version, *gradients, bool(result._backward_hooks)


class StackedChannels(TorchFunctionMode):
    """While it is active, models under `torch.vmap` compute convolutions and pools as said above.

    A pool of a ReLU's results becomes the ReLU of a pool's results, which are fewer.
    """

    def __init__(self) -> None:
        """Begin without results."""
        self._rectified = WeakIdKeyDictionary()
        """`_Rectified` by the result of the ReLU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See `TorchFunctionMode`."""
        known: dict[Callable[..., Any], Callable[..., torch.Tensor | None]] = {
            torch.conv2d: _convolution,
            torch.max_pool2d: self._pool,
            functional.max_pool2d: self._pool,
            functional.relu: self._relu,
            torch.relu: self._relu,
            functional.group_norm: _group_norm,
            torch.Tensor.view: torch.Tensor.reshape,  # with channels last, a view may be impossible
        }
        if func in known and args and args[0].dim() == 4:  # a batch of images
            result = known[func](*args, **kwargs or {})
            if result is not None:
                return result
        return func(*args, **kwargs or {})

    def _relu(self, inputs: torch.Tensor, inplace: bool = False) -> torch.Tensor | None:
        if inplace:
            return None
        result = torch.relu(inputs)
        self._rectified[result] = _Rectified(inputs, _Rectified.state_of(inputs, result))
        return result

    def _pool(
        self,
        inputs: torch.Tensor,
        kernel_size: int | Pair,
        stride: int | Pair | None = None,
        padding: int | Pair = 0,
        dilation: int | Pair = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> torch.Tensor | None:
        if return_indices:
            return None
        source = inputs
        rectify = False
        if inputs in self._rectified:
            rectified: _Rectified = self._rectified[inputs]
            rectify = rectified.state == _Rectified.state_of(rectified.source, inputs)
            source = rectified.source if rectify else inputs
        found = _MaxPool.of(
            source,
            rectify,
            _pair(kernel_size),
            _pair(stride or kernel_size),
            _pair(padding),
            _pair(dilation),
            ceil_mode,
        )
        values: torch.Tensor = found[0]
        return values


def _group_norm(inputs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Group normalisation as by PyTorch, whose rule for `vmap` refuses channels that are last."""
    return functional.group_norm(inputs.contiguous(), *args, **kwargs)


def _pair(value: int | Pair) -> Pair:
    return (value, value) if isinstance(value, int) else tuple(value)


def _convolution(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int | Pair = 1,
    padding: int | Pair | str = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
) -> torch.Tensor | None:
    if isinstance(padding, str):
        return None
    result: torch.Tensor = _Convolution.of(
        inputs, weight, bias, _pair(stride), _pair(padding), _pair(dilation), groups
    )
    return result


class _Operation(torch.autograd.Function):
    """Has rules of its own for `torch.vmap`; see `torch.autograd.Function` for the methods."""

    @classmethod
    def of(cls, *arguments: Any) -> Any:
        """The results."""
        return cls.apply(*arguments)  # type: ignore[no-untyped-call]  # PyTorch has no type

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep nothing for `backward`."""


class _Convolution(_Operation):
    """A convolution of two dimensions, not transposed."""

    @staticmethod
    def forward(
        inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *options: Any
    ) -> Any:
        *sizes, groups = options
        return aten.convolution(inputs, weight, bias, *sizes, False, [0, 0], groups)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.options = inputs[3:]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        wanted = ctx.needs_input_grad[:3]
        found = iter(_ConvolutionBackward.of(gradient, *ctx.saved_tensors, wanted, *ctx.options))
        return *(next(found) if each else None for each in wanted), None, None, None, None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Sequence[int | None],
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *options: Any,
    ) -> tuple[Any, Any]:
        count, (*sizes, groups) = info.batch_size, options
        result = _Convolution.of(
            _in_channels(inputs, in_dims[0], count),
            _side_by_side(weight, in_dims[1], count),
            None if bias is None else _side_by_side(bias, in_dims[2], count),
            *sizes,
            count * groups,
        )
        return result.unflatten(1, (count, -1)), 1


class _ConvolutionBackward(_Operation):
    """The gradients that are wanted, of inputs, weight and bias."""

    @staticmethod
    def forward(
        gradient: torch.Tensor,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        wanted: Sequence[bool],
        *options: Any,
    ) -> Any:
        *sizes, groups = options
        found = aten.convolution_backward(
            gradient, inputs, weight, [len(weight)], *sizes, False, [0, 0], groups, wanted
        )
        return tuple(each for each, is_wanted in zip(found, wanted, strict=True) if is_wanted)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Sequence[int | None],
        gradient: torch.Tensor,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        wanted: Sequence[bool],
        *options: Any,
    ) -> tuple[Any, Any]:
        count, (*sizes, groups) = info.batch_size, options
        found = _ConvolutionBackward.of(
            _in_channels(gradient, in_dims[0], count),
            _in_channels(inputs, in_dims[1], count),
            _side_by_side(weight, in_dims[2], count),
            wanted,
            *sizes,
            count * groups,
        )
        dims = [1] * wanted[0] + [0] * sum(wanted[1:])
        each = zip(found, dims, strict=True)
        return tuple(one.unflatten(dim, (count, -1)) for one, dim in each), tuple(dims)


class _MaxPool(_Operation):
    """The largest elements, or zero where they are negative if `rectify`, and their places."""

    @staticmethod
    def forward(inputs: torch.Tensor, rectify: bool, *options: Any) -> Any:
        values, places = aten.max_pool2d_with_indices(inputs, *options)
        return aten.relu(values) if rectify else values, places

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], *output)
        ctx.options = inputs[1:]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
        found = _MaxPoolBackward.of(gradient, *ctx.saved_tensors, *ctx.options)
        return found, *[None] * len(ctx.options)

    @staticmethod
    def vmap(
        info: Any, in_dims: Sequence[int | None], inputs: torch.Tensor, *options: Any
    ) -> tuple[Any, Any]:
        found = _MaxPool.of(_in_channels(inputs, in_dims[0], info.batch_size), *options)
        return tuple(each.unflatten(1, (info.batch_size, -1)) for each in found), (1, 1)


class _MaxPoolBackward(_Operation):
    @staticmethod
    def forward(
        gradient: torch.Tensor,
        inputs: torch.Tensor,
        values: torch.Tensor,
        places: torch.Tensor,
        rectify: bool,
        *options: Any,
    ) -> Any:
        if rectify:
            gradient = aten.threshold_backward(gradient, values, 0)
        return aten.max_pool2d_with_indices_backward(gradient, inputs, *options, places)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> tuple[Any, Any]:
        count = info.batch_size
        tensors = zip(arguments[:4], in_dims[:4], strict=True)
        channels = (_in_channels(each, dim, count) for each, dim in tensors)
        found = _MaxPoolBackward.of(*channels, *arguments[4:])
        return found.unflatten(1, (count, -1)), 1


def _side_by_side(parameter: torch.Tensor, dim: int | None, count: int) -> torch.Tensor:
    """The parameters of all models: (K x C, ...)."""
    if dim is None:
        parameter = parameter.expand(count, *parameter.shape)
        dim = 0
    return parameter.movedim(dim, 0).flatten(0, 1)


def _in_channels(images: torch.Tensor, dim: int | None, count: int) -> torch.Tensor:
    """The images of all models, channels last in memory: (B, K x C, height, width)."""
    if dim is None:
        images = images.expand(count, *images.shape)
        dim = 0
    images = images.movedim(dim, 1)
    if images.stride(1) == images.shape[2] * images.stride(2):
        return images.flatten(1, 2).contiguous(memory_format=torch.channels_last)
    return images.permute(0, 3, 4, 1, 2).flatten(3).contiguous().movedim(3, 1)  # copied once
