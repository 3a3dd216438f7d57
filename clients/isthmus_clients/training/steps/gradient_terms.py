"""What is done to the gradient of each local step after the backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientTerms:
    """The terms that a round adds to the gradients of its steps, and what it leaves out of them.

    Tensors are by the names of the model's parameters and where these are. With stacked models the
    parameters have the devices as another first dimension, and the tensors here do not: they are
    the same for all devices.
    """

    proximal: float = 0.0
    """The factor mu of FedProx."""
    anchors: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """The parameters at the start of the round; not used if `proximal` is 0."""
    added: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """The gradient of the datacenter's data, or the difference of control variates, which is the
    same in every step."""
    personal_steps: int = 0
    """Steps at the beginning that train only what is personal; the others train only the rest."""
    personal: Collection[str] = ()
    """Names of the personal parameters."""

    def __bool__(self) -> bool:
        """Whether they change any gradient."""
        return bool(self.proximal or self.added or self.personal_steps)

    def add_to(self, parameters: Mapping[str, torch.Tensor], step: int) -> None:
        """Change the gradients of parameters by name, in step `step`, from 0."""
        for name, parameter in parameters.items():
            if self.proximal:
                self._add_proximal(name, parameter)
            if name in self.added and parameter.requires_grad:
                self._add_gradient(name, parameter)
            # FedRep (Collins et al. 2021, algorithm 1). Optimizers skip parameters without a
            # gradient.
            is_personal_step = step < self.personal_steps
            if self.personal_steps and (name in self.personal) != is_personal_step:
                parameter.grad = None

    def _add_proximal(self, name: str, parameter: torch.Tensor) -> None:
        """Add the gradient of FedProx's mu/2 |w - w_round|^2 (Li et al. 2020)."""
        if parameter.grad is not None and name in self.anchors:
            parameter.grad.add_(parameter.detach() - self.anchors[name], alpha=self.proximal)

    def _add_gradient(self, name: str, parameter: torch.Tensor) -> None:
        added = self.added[name]
        if parameter.grad is None:
            # A copy: gradients are changed in place, and this one is added in every step.
            parameter.grad = torch.empty_like(parameter).copy_(added)
        else:
            parameter.grad.add_(added)
