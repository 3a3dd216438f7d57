"""Buffers that participants do not exchange, and which of them training changes.

>>> from torch import nn
>>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
>>> model.register_buffer("calls", torch.zeros(()))
>>> buffers = OwnBuffers(model)
>>> _ = model.train()(torch.ones(2, 2))  # changes running statistics, which are exchanged
>>> model.calls += 1
>>> buffers.changed(model)
['calls']
"""

from __future__ import annotations

import torch
from torch import nn

from isthmus.tensors.running_statistics import find_statistics

_COUNTS = "num_batches_tracked"
"""Name of a buffer of normalisation layers on which their outputs do not depend."""

_SHOWN = 4


class OwnBuffers:
    """The buffers of a model's state that are no running statistics, and their first values."""

    def __init__(self, model: nn.Module) -> None:
        """Copy the values."""
        self._before = {name: buffer.clone() for name, buffer in _buffers(model).items()}

    def changed(self, model: nn.Module) -> list[str]:
        """The names of those that have other values now, in the order of the model."""
        now = _buffers(model)
        return [
            name
            for name, before in self._before.items()
            if name in now and not _equal(before, now[name])
        ]

    def in_words(self, model: nn.Module) -> str:
        """What `isthmus job check` says of them after a training step; empty if none changed."""
        changed = self.changed(model)
        if not changed:
            return ""
        names = ", ".join(map(repr, changed[:_SHOWN]))
        if len(changed) > _SHOWN:
            names += f" and {len(changed) - _SHOWN} more"
        return (
            f", which changes buffers that are not exchanged ({names}): the model that is "
            "delivered has the values of model()"
        )


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict(keep_vars=True)
    statistics = find_statistics(model)
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if name in state and name not in statistics and not name.endswith(_COUNTS)
    }


def _equal(before: torch.Tensor, now: torch.Tensor) -> bool:
    if before.shape != now.shape or before.dtype != now.dtype:
        return False
    # A value that was and is nan has not changed.
    return bool(torch.equal(before.cpu().nan_to_num(), now.cpu().nan_to_num()))
