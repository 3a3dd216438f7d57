"""Convolutions of stacked models on a GPU, as products of matrices.

`torch.vmap` makes one convolution of those of several models, with a group for each. On an H200 a
round of the CNN of benchmarks/simulation.py took 379 ms with those of cuDNN, and 69 ms with these.

Shape legend: G = groups, C = channels of a group's inputs, O = those of its outputs, B = batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

aten = torch.ops.aten

_COLUMN_BYTES = 256 << 20
"""Most bytes of the columns of a convolution; cuDNN computes larger ones."""

Sizes = Sequence[int]


def use_products(recorded: torch.fx.GraphModule) -> None:
    """Replace grouped convolutions of a step that was recorded on a GPU, and their gradients."""
    for node in recorded.graph.nodes:
        if node.target is aten.convolution.default:
            inputs, weight, _, stride, padding, dilation, transposed, _, groups = node.args
            product: object = convolution
        elif node.target is aten.convolution_backward.default:
            _, inputs, weight, _, stride, padding, dilation, transposed, _, groups, _ = node.args
            product = convolution_backward
        else:
            continue
        values: torch.Tensor = inputs.meta["val"]
        kernel = weight.meta["val"].shape[2:]
        if values.is_cuda and groups > 1 and not transposed:
            outputs = math.prod(_output_sizes(values, kernel, stride, padding, dilation))
            elements = len(values) * values.shape[1] * math.prod(kernel) * outputs
            if elements * values.element_size() <= _COLUMN_BYTES:
                node.target = product
    recorded.recompile()


def convolution(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
) -> torch.Tensor:
    """See `aten.convolution`; not transposed.

    >>> x, w, b = torch.randn(2, 6, 5, 7), torch.randn(9, 2, 3, 2), torch.randn(9)
    >>> rest = [2, 1], [1, 0], [1, 2], False, [0, 0], 3
    >>> torch.testing.assert_close(
    ...     convolution(x, w, b, *rest), aten.convolution(x, w, b, *rest), rtol=1e-4, atol=1e-4
    ... )
    """
    sizes = _output_sizes(inputs, weight.shape[2:], stride, padding, dilation)
    columns = _columns(inputs, weight.shape[2:], sizes, stride, padding, dilation, groups)
    product = torch.bmm(weight.reshape(groups, -1, columns.shape[1]), columns)  # (G, O, B x sizes)
    result = product.view(groups, -1, len(inputs), *sizes).movedim(2, 0)
    result = result.reshape(len(inputs), -1, *sizes)
    return result if bias is None else result + bias.view(-1, *[1] * len(sizes))


def convolution_backward(
    gradient: torch.Tensor,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sizes | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """See `aten.convolution_backward`; not transposed.

    >>> x, w, g = torch.randn(2, 6, 5, 7), torch.randn(9, 2, 3, 2), torch.randn(2, 9, 3, 5)
    >>> rest = [9], [2, 1], [1, 0], [1, 2], False, [0, 0], 3, [True] * 3
    >>> expected = aten.convolution_backward(g, x, w, *rest)
    >>> for one, other in zip(convolution_backward(g, x, w, *rest), expected):
    ...     torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    """
    batch = len(inputs)
    kernel = weight.shape[2:]
    sizes = gradient.shape[2:]
    by_group = gradient.reshape(batch, groups, -1, *sizes).movedim(0, 2)
    grouped = by_group.reshape(groups, -1, batch * math.prod(sizes))
    of_inputs = of_weight = of_bias = None
    if wanted[0]:
        columns = torch.bmm(weight.reshape(groups, grouped.shape[1], -1).mT, grouped)
        of_inputs = _added_columns(
            columns.view(groups, -1, *kernel, batch, *sizes), inputs, stride, padding, dilation
        )
    if wanted[1]:
        columns = _columns(inputs, kernel, sizes, stride, padding, dilation, groups)
        of_weight = torch.bmm(grouped, columns.mT).view(weight.shape)
    if wanted[2]:
        of_bias = grouped.sum(2).flatten()
    return of_inputs, of_weight, of_bias


def _output_sizes(
    inputs: torch.Tensor, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes
) -> list[int]:
    each = zip(inputs.shape[2:], kernel, stride, padding, dilation, strict=True)
    return [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in each]


def _columns(
    inputs: torch.Tensor,
    kernel: Sizes,
    sizes: Sizes,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    groups: int,
) -> torch.Tensor:
    """The inputs that each element of an output is computed of: (G, C x kernel, B x sizes)."""
    padded = functional.pad(inputs, [p for each in reversed(padding) for p in (each, each)])
    padded = padded.contiguous()
    of_batch, of_channel, *of_places = padded.stride()
    channels = inputs.shape[1] // groups
    views = padded.as_strided(
        (groups, channels, *kernel, len(inputs), *sizes),
        (
            channels * of_channel,
            of_channel,
            *(each * d for each, d in zip(of_places, dilation, strict=True)),
            of_batch,
            *(each * s for each, s in zip(of_places, stride, strict=True)),
        ),
    )
    return views.reshape(groups, channels * math.prod(kernel), len(inputs) * math.prod(sizes))


def _added_columns(
    columns: torch.Tensor, inputs: torch.Tensor, stride: Sizes, padding: Sizes, dilation: Sizes
) -> torch.Tensor:
    """The sum of what columns (G, C, *kernel, B, *sizes) have of each input, as `inputs`."""
    dimensions = len(stride)
    places = inputs.shape[2:]
    groups, channels = columns.shape[:2]
    kernel = columns.shape[2 : 2 + dimensions]
    sizes = columns.shape[3 + dimensions :]
    padded = [size + 2 * p for size, p in zip(places, padding, strict=True)]
    total = columns.new_zeros(groups, channels, len(inputs), *padded)
    for offsets in itertools.product(*map(range, kernel)):
        each = zip(offsets, sizes, stride, dilation, strict=True)
        place: Any = (..., *(slice(d * at, d * at + s * (n - 1) + 1, s) for at, n, s, d in each))
        column: Any = (slice(None), slice(None), *offsets)
        total[place].add_(columns[column])
    for dimension, (size, p) in enumerate(zip(places, padding, strict=True), 3):
        total = total.narrow(dimension, p, size)
    return total.movedim(2, 0).reshape(inputs.shape)
