"""A glance at what does not travel: frozen parameters have to be the same on every participant.

Only trainable parameters are exchanged. If a device loaded the rest from another file than the
server did, everybody would train on something else, and nothing would say so. A few values of each
frozen parameter go along when a run is opened; they are compared with a tolerance, since processors
differ in their last digits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from isthmus.wire import link_pb2

_PLACES = 16
"""Values of each parameter that are looked at, evenly spread."""
_RELATIVE, _ABSOLUTE = 1e-4, 1e-6
"""Far above what the arithmetic of two processors differs by, far below another training's."""


@torch.no_grad()
def glance(model: nn.Module) -> dict[str, list[float]]:
    """Up to 16 values of each parameter that is not trained, by its name."""
    return {
        name: _some(parameter).tolist()
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    }


def explain_difference(model: nn.Module, expected: Mapping[str, Sequence[float]]) -> str | None:
    """The first difference of a model from somebody's `glance` as half a sentence, or None."""
    mine = glance(model)
    for name, values in expected.items():
        if name not in mine:
            return f"parameter {name!r} is frozen there and not here"
        here, there = torch.tensor(mine[name]), torch.tensor(list(values))
        if here.shape != there.shape or not torch.allclose(
            here, there, _RELATIVE, _ABSOLUTE, equal_nan=True
        ):
            return (
                f"the frozen parameter {name!r} has other values here than there; is it loaded "
                "from the same file?"
            )
    return None


def received(frozen: Mapping[str, link_pb2.Fingerprint]) -> dict[str, list[float]]:
    """A `glance` as it comes over the link."""
    return {name: list(glance.values) for name, glance in frozen.items()}


def sent(model: nn.Module) -> dict[str, link_pb2.Fingerprint]:
    """A `glance` as it goes over the link."""
    return {name: link_pb2.Fingerprint(values=values) for name, values in glance(model).items()}


def _some(parameter: torch.Tensor) -> torch.Tensor:
    flat = parameter.reshape(-1)
    places = torch.linspace(0, max(len(flat) - 1, 0), min(_PLACES, len(flat))).long()
    return flat[places].float()
