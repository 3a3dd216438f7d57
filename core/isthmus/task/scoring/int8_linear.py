"""Linear layers whose weights are whole numbers of 8 bits, with one scale for each output.

They are frozen. The gradient of their input is computed with the same numbers, which get another
type only while they are used: a backward pass that kept them so would keep what they save.

>>> layer = nn.Linear(3, 2).requires_grad_(False)
>>> weight = layer.weight.clone()
>>> hold_in_int8(layer, *quantised(weight))
>>> layer.held.dtype, bool(((layer.weight_in_float32() - weight).abs() < 0.003).all())
(torch.int8, True)

Code that reads the weight itself, as DoRA's or a model that casts to its type, gets the values:

>>> layer.weight.dtype, bool(((layer.weight.float() - weight).abs() < 0.006).all())
(torch.bfloat16, True)
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from isthmus.tensors.given_memory import give_memory

_LARGEST = 127
"""The largest number, and minus the smallest one: a scale is for both signs."""


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest whole numbers of 8 bits for a matrix, and the scale of each row.

    Args:
        weight: float32, (outputs, inputs); rows of a larger one give the same rows.

    Returns:
        int8, (outputs, inputs), and float32, (outputs): number times scale is the value, within
        half a scale. A row of zeros has the scale 1.

    Raises:
        ValueError: a value is not finite, for which there is no number.
    """
    largest = weight.abs().amax(1) if weight.shape[1] else weight.new_zeros(len(weight))
    if not largest.isfinite().all():
        raise ValueError("a value is not finite")
    scale = torch.where(largest > 0, largest / _LARGEST, 1.0)
    whole = (weight / scale[:, None]).round().clamp(-_LARGEST, _LARGEST)
    return whole.to(torch.int8), scale


def hold_in_int8(layer: nn.Linear, whole: torch.Tensor, scale: torch.Tensor) -> None:
    """Give a frozen linear layer the weight that `quantised` has made."""
    give_memory(cast("nn.Parameter", layer.weight), whole)
    layer.register_buffer("weight_scale", scale, persistent=False)
    layer.__class__ = Int8Linear


class Int8Linear(nn.Linear):
    """A frozen linear layer with a weight in int8; made by `hold_in_int8`.

    If its weight is in float32 for a while, it computes what `nn.Linear` does.
    """

    weight_scale: torch.Tensor
    """Float32, (outputs)."""

    def __getattr__(self, name: str) -> Any:
        """The attribute; as `weight` the values, (outputs, inputs), and not the numbers.

        In bfloat16, as all else that is frozen, and computed for each call.
        """
        if name == "weight" and self.held.dtype == torch.int8:
            return self.weight_in_float32().to(torch.bfloat16)
        return super().__getattr__(name)

    @property
    def held(self) -> torch.Tensor:
        """The parameter `weight`: int8, (outputs, inputs)."""
        return cast("torch.Tensor", self._parameters["weight"])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Multiply in the input's type, or that of autocast; sums are scaled in float32."""
        if self.held.dtype != torch.int8:
            return super().forward(inputs)
        product = cast(
            "torch.Tensor",
            _Product.apply(  # type: ignore[no-untyped-call]  # of PyTorch
                inputs, self.held, self.weight_scale
            ),
        )
        return product if self.bias is None else product + self.bias.to(product.dtype)

    def weight_in_float32(self) -> torch.Tensor:
        """The values that the weight stands for, float32, (outputs, inputs)."""
        return self.held * self.weight_scale[:, None]


class _Product(torch.autograd.Function):
    """Input times the transposed weight, which has no gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(inputs: torch.Tensor, whole: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if _is_half(inputs):
            return nn.functional.linear(inputs, _in_half(whole, scale))
        # Whole numbers up to 127 are exact in each floating type.
        sums = nn.functional.linear(inputs, whole.to(inputs.dtype))
        return (sums * scale).to(sums.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        multiplied, whole, scale = inputs
        ctx.dtype = multiplied.dtype
        ctx.save_for_backward(whole, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None, None]:
        whole, scale = ctx.saved_tensors
        [gradient] = gradients
        if gradient.dtype == torch.float16:
            return (gradient @ _in_half(whole, scale)).to(ctx.dtype), None, None
        scaled = (gradient * scale).to(gradient.dtype)
        return (scaled @ whole.to(gradient.dtype)).to(ctx.dtype), None, None


def _is_half(inputs: torch.Tensor) -> bool:
    """Whether a product is computed in float16: in the input's type, or that of autocast."""
    kind = inputs.device.type
    if torch.is_autocast_enabled(kind) and inputs.dtype != torch.float64:
        return torch.get_autocast_dtype(kind) == torch.float16
    return inputs.dtype == torch.float16


def _in_half(whole: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The values in float16, where sums of the numbers themselves would be above its range."""
    return (whole * scale[:, None]).to(torch.float16)
