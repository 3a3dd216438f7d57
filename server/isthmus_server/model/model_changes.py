"""The last changes of the model, for devices that have one of the models before.

A change is rounded before its model is committed, see `isthmus_privacy.compression.model_change`.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from isthmus.transport.blobs import describe
from isthmus.wire import link_pb2
from isthmus_privacy.compression.changes import ChangesCodec

MAX_CHANGES = 4
"""Rounds that a device may have missed and still need less than half of a model."""

_RESIDUAL = "change.residual"
_MODEL = "change.model"
"""Names in the stored state of the server optimizer."""


@dataclasses.dataclass(frozen=True)
class _Change:
    base: bytes
    """SHA-256 of the model before it."""
    result: bytes
    """SHA-256 of the model after it."""
    payload: bytearray


@dataclasses.dataclass(frozen=True)
class OfferedChange:
    """What leads from an earlier model to the present one."""

    message: link_pb2.ModelChange
    payload: bytearray
    """The changes of all rounds in between, one after the other."""


class ModelChanges:
    """Rounds the changes of one model, and keeps the last ones.

    Guarantees:
      * what rounding takes away is part of the next change;
      * it survives a restart with the server optimizer's state; the changes do not, and devices
        then receive the whole model once.
    """

    def __init__(self, codec: ChangesCodec) -> None:
        """`codec` encodes a change."""
        self._codec = codec
        self._changes: deque[_Change] = deque(maxlen=MAX_CHANGES)
        self._residual: torch.Tensor | None = None
        """What the model lacks because of rounding, float32 (N); None for nothing."""
        self._of = b""
        """SHA-256 of the model that the residual belongs to."""

    def round_step(self, before: torch.Tensor, base: bytes, after: torch.Tensor) -> bytearray:
        """Replace the model after a step by one that a change leads to.

        Args:
            before: the model before the step, float32 (N); it is replaced by the new model.
            base: its SHA-256.
            after: the model after the step, float32 (N); it is replaced by the new model.

        Returns:
            The change, for `note`.
        """
        trained = self._codec.trained
        changing = before[:trained] != after[:trained]  # few after a round of compressed updates
        if self._residual is not None and self._of == base:
            after.add_(self._residual)
        payload = self._codec.encode(before, after, changing)
        self._codec.apply(before, payload)
        residual = torch.sub(after, before, out=self._residual)
        self._residual = residual
        after.copy_(before)
        return payload

    def note(self, base: bytes, result: bytes, payload: bytearray) -> None:
        """Keep a change; the residual now belongs to the model that it leads to."""
        if base != result:  # a step can change nothing
            self._changes.append(_Change(base, result, payload))
        self._of = result

    def offers(self, model: bytes) -> list[OfferedChange]:
        """What leads to the model with this SHA-256, from one round before it to the most."""
        offers: list[OfferedChange] = []
        payload = bytearray()
        wanted = model
        for change in reversed(self._changes):
            if change.result != wanted:
                break
            payload = change.payload + payload
            wanted = change.base
            blob = describe(payload)
            offers.append(OfferedChange(link_pb2.ModelChange(base=wanted, blob=blob), payload))
        return offers

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """What has to survive a restart: tensors and plain values."""
        if self._residual is None:
            return {}, {}
        return {_RESIDUAL: self._residual}, {_MODEL: self._of.hex()}

    def load_state(self, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._residual = tensors.get(_RESIDUAL)
        self._of = bytes.fromhex(values.get(_MODEL, ""))
        # Changes after this state lead to models that were not committed.
        while self._changes and self._changes[-1].result != self._of:
            self._changes.pop()


def is_state(name: str) -> bool:
    """Whether a name in the stored state belongs to `ModelChanges`."""
    return name in (_RESIDUAL, _MODEL)
