"""Fingerprints of frozen parameters, which must be equal on every participant.

Only trainable parameters are exchanged. If a device loaded the frozen ones from another file than
the server, it would train another model without any error. A few values of each frozen parameter
are therefore sent when a run is opened and compared with a tolerance, because the arithmetic of
processors differs in the last digits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import nn

Fingerprint = dict[str, list[float]]
"""Up to 16 values of each frozen parameter, by the parameter's name."""

_VALUES = 16
"""Values of each parameter in its fingerprint, evenly spaced."""
_RELATIVE = 1e-4
_ABSOLUTE = 1e-6
"""Far above the difference between two processors, far below the effect of another training."""


@torch.no_grad()
def fingerprint(model: nn.Module, without: Collection[str] = ()) -> Fingerprint:
    """Up to 16 values of each parameter of a model that is not trained, `without` some."""
    return {
        name: _sample(parameter).tolist()
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and name not in without
    }


def explain_difference(model: nn.Module, expected: Mapping[str, Sequence[float]]) -> str | None:
    """The first difference of a model from a fingerprint as half a sentence, or None."""
    return explain_other_values(fingerprint(model), expected)


def explain_other_values(
    actual: Mapping[str, Sequence[float]],
    expected: Mapping[str, Sequence[float]],
    rounded: Mapping[str, torch.dtype] | None = None,
) -> str | None:
    """The first difference of one fingerprint from another as half a sentence, or None.

    Expected values of parameters in `rounded` are rounded to its type first.
    """
    for name, values in expected.items():
        if name not in actual:
            return f"parameter {name!r} is frozen there and not here"
        own = torch.tensor(actual[name])
        others = torch.tensor(list(values))
        if rounded is not None and name in rounded:
            others = others.to(rounded[name]).float()
        if own.shape != others.shape or not torch.allclose(
            own, others, _RELATIVE, _ABSOLUTE, equal_nan=True
        ):
            return (
                f"the frozen parameter {name!r} has other values here than there; is it loaded "
                "from the same file?"
            )
    return None


def explain_change(model: nn.Module, before: Mapping[str, Sequence[float]]) -> str | None:
    """Name a frozen parameter that training has changed, or one that it froze, or None.

    `before` is a fingerprint from before the training.
    """
    for name, values in fingerprint(model).items():
        if name not in before:
            return newly_frozen(name)
        if not same_values(torch.tensor(values), torch.tensor(before[name])):
            return changed_frozen(name)
    return None


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape are equal; nan, as in place of a value, equals itself."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def changed_frozen(name: str) -> str:
    """The sentence for a frozen parameter that training has changed.

    Such a change, as of a teacher that follows the model by an average, would stay on one
    participant.
    """
    return (
        f"training changed {name!r}, which is frozen and not exchanged; register it as a buffer, "
        "which has its first values again in every round, or set requires_grad"
    )


def newly_frozen(name: str) -> str:
    """The sentence for a parameter that training has frozen.

    It would stay frozen in this participant's later rounds, and not on others.
    """
    return (
        f"training froze {name!r}, which would stay so in later rounds; freeze it in model(), or "
        "leave it out of the optimizer"
    )


def fingerprint_of_rows(
    model: nn.Module,
    read: Callable[..., torch.Tensor],
    without: Collection[str] = (),
) -> Fingerprint:
    """The `fingerprint` of a model without memory.

    Args:
        model: its parameters have no values.
        read: returns a parameter by its name, or rows of it by the first one and their number.
        without: names of parameters that are left out.
    """
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or name in without:
            continue
        if not parameter.ndim or not parameter.numel():
            found[name] = _sample(read(name)).tolist()
            continue
        width = parameter.numel() // len(parameter)
        values = [
            read(name, index // width, 1).reshape(-1)[index % width]
            for index in _indices(parameter.numel()).tolist()
        ]
        found[name] = _plain(torch.stack(values)).tolist()
    return found


def _sample(parameter: torch.Tensor) -> torch.Tensor:
    flat = parameter.reshape(-1)
    return _plain(flat[_indices(len(flat)).to(flat.device)])


def _indices(count: int) -> torch.Tensor:
    """The elements of a fingerprint among `count`."""
    last = max(count - 1, 0)
    # Above 2^24 the numbers between are rounded, and the last one may be to one too many.
    return torch.linspace(0, last, min(_VALUES, count)).long().clamp(max=last)


def _plain(values: torch.Tensor) -> torch.Tensor:
    """Values as real numbers of one type."""
    return (torch.view_as_real(values) if values.is_complex() else values).float()
