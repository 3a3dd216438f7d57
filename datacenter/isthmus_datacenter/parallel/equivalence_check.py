"""What a sample of the data makes of a model, before and after something was done to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def run_still(model: nn.Module, *inputs: Any) -> Any:
    """The output of a module in evaluation mode, without gradients; nothing remembers it."""
    was = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return model(*inputs)
    finally:
        for module, training in was.items():
            module.training = training


def same(first: Any, second: Any, tolerance: float) -> bool:
    """Whether two outputs agree: tensors up to `tolerance`, relative to the largest element."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        if first.shape != second.shape:
            return False
        if not first.is_floating_point():
            return torch.equal(first, second.to(first.device))
        there = second.to(first.device, first.dtype)
        scale = float(first.abs().max()) if first.numel() else 0.0
        return bool(((first - there).abs() <= tolerance * max(scale, 1e-6)).all())
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(
            same(first[key], second[key], tolerance) for key in first
        )
    if isinstance(first, (tuple, list)) and isinstance(second, (tuple, list)):
        return len(first) == len(second) and all(
            same(one, other, tolerance) for one, other in zip(first, second, strict=True)
        )
    return type(first) is type(second)
