"""Terms of the gradient of a device's local steps, and steps that train a part of the model."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn


def add_proximal(model: nn.Module, anchors: Mapping[str, torch.Tensor], mu: float) -> None:
    """Add the gradient of FedProx's mu/2 |w - w_round|^2 (Li et al. 2020).

    `anchors` are the parameters at the start of the round by name, where the model is.
    """
    if not anchors:
        return
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and name in anchors:
            parameter.grad.add_(parameter.detach() - anchors[name], alpha=mu)


def train_in_turn(model: nn.Module, personal: Collection[str], *, first: bool) -> None:
    """Leave gradients only to the personal parameters in the `first` steps, and to others then.

    FedRep (Collins et al. 2021, algorithm 1). Optimizers skip parameters without a gradient.
    """
    for name, parameter in model.named_parameters():
        if (name in personal) != first:
            parameter.grad = None


def add_gradient(model: nn.Module, added: Mapping[str, torch.Tensor]) -> None:
    """Add the gradient of the datacenter's data, which is the same in every step."""
    if not added:
        return
    for name, parameter in model.named_parameters():
        if name not in added:
            continue
        if parameter.grad is None:
            parameter.grad = added[name].to(parameter.dtype, copy=True)
        else:
            parameter.grad.add_(added[name])
