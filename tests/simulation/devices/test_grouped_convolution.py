"""Convolutions with groups as products of matrices, compared with those of PyTorch."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_simulation.devices.stacks.grouped_convolution import (
    aten,
    convolution,
    convolution_backward,
)


@st.composite
def settings_of_convolutions(draw):
    dimensions = draw(st.integers(1, 3))
    one_for_each = st.lists(st.integers(1, 3), min_size=dimensions, max_size=dimensions)
    kernel, stride, dilation = (draw(one_for_each) for _ in range(3))
    padding = [each - 1 for each in draw(one_for_each)]
    places = [draw(st.integers(d * (k - 1) + 1, 8)) for k, d in zip(kernel, dilation, strict=True)]
    groups, channels, outputs = (draw(st.integers(1, 3)) for _ in range(3))
    inputs = torch.randn(draw(st.integers(1, 3)), groups * channels, *places)
    weight = torch.randn(groups * outputs, channels, *kernel)
    return inputs, weight, (stride, padding, dilation, False, [0] * dimensions, groups)


@settings(deadline=None)
@given(settings_of_convolutions(), st.lists(st.booleans(), min_size=3, max_size=3), st.booleans())
def test_products_give_the_convolution_and_its_gradients(given, wanted, has_bias):
    inputs, weight, rest = given
    bias = torch.randn(len(weight)) if has_bias else None
    expected = aten.convolution(inputs, weight, bias, *rest)
    found = convolution(inputs, weight, bias, *rest)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    gradient = torch.randn_like(expected)
    arguments = gradient, inputs, weight, [len(weight)], *rest, wanted
    found, expected = convolution_backward(*arguments), aten.convolution_backward(*arguments)
    for is_wanted, one, other in zip(wanted, found, expected, strict=True):
        assert (one is not None) == is_wanted
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
