"""The state of a Flower strategy between rounds, as tensors and plain numbers.

Flower's strategies keep moments and clipping norms as plain attributes and cannot store them. Each
round therefore uses a new strategy object, which receives the attributes that the previous round
changed. A resumed run then continues exactly as an uninterrupted one.

`current_arrays`, where several strategies keep the model at the start of a round, is not part of
the state: it is set again in each round, because the model may have been trained elsewhere since.

>>> from flwr.serverapp.strategy import FedAdam
>>> new, used = FedAdam(), FedAdam()
>>> used.m_t = {"weight": np.ones(2, dtype=np.float32)}
>>> state = StrategyState.of(used, new)
>>> state.tensors
{'m_t/weight': tensor([1., 1.])}
>>> state.apply_to(new)
>>> new.m_t
{'weight': array([1., 1.], dtype=float32)}
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy

from isthmus.errors import UserError
from isthmus_flower.messages import record_of

SET_EACH_ROUND = "current_arrays"
"""Attribute that `configure_train` sets in each round."""


@dataclasses.dataclass(frozen=True)
class StrategyState:
    """Attributes changed since construction; those of an inner strategy begin with `strategy.`."""

    tensors: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """`attribute/key` or `attribute/index`, each float32."""
    numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """By attribute: JSON data, or how to rebuild the attribute from its tensors."""

    @classmethod
    def of(cls, strategy: Strategy, new: Strategy) -> StrategyState:
        """Collect the attributes that differ from those of a new strategy with the same options.

        Raises:
            UserError: an attribute cannot be stored.
        """
        tensors: dict[str, torch.Tensor] = {}
        numbers: dict[str, Any] = {}
        defaults = dict(_attributes(new))
        for name, value in _attributes(strategy):
            if name in defaults and _same(defaults[name], value):
                continue
            attribute_tensors, description = _serialize(name, value, type(strategy).__name__)
            tensors |= attribute_tensors
            numbers[name] = description
        return cls(tensors, numbers)

    def apply_to(self, strategy: Strategy) -> None:
        """Set the attributes on a new strategy with the same options."""
        for name, description in self.numbers.items():
            *path, attribute = name.split(".")
            owner: Any = strategy
            for part in path:
                owner = getattr(owner, part)
            setattr(owner, attribute, self._deserialize(name, description))

    def _deserialize(self, name: str, description: Mapping[str, Any]) -> Any:
        kind = description["kind"]
        if kind == "data":
            return json.loads(json.dumps(description["value"]))
        arrays = {key: self.tensors[f"{name}/{key}"] for key in description["keys"]}
        if kind == "record":
            return record_of(arrays.items())
        copies = {key: tensor.numpy().copy() for key, tensor in arrays.items()}
        if kind == "dict":
            return copies
        return list(copies.values()) if kind == "list" else copies["0"]


def check_storable(strategy: Strategy) -> None:
    """Refuse a strategy with an attribute that cannot be stored between rounds.

    Raises:
        UserError: with the attribute and the supported types.
    """
    for name, value in _attributes(strategy):
        if not _is_code(value):
            _serialize(name, value, type(strategy).__name__)


def _attributes(strategy: Strategy, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in vars(strategy).items():
        if isinstance(value, Strategy):
            yield from _attributes(value, f"{path}{name}.")
        elif name != SET_EACH_ROUND:
            yield path + name, value


def _is_code(value: Any) -> bool:
    return inspect.isroutine(value) or inspect.isclass(value) or inspect.ismodule(value)


def _same(default: Any, value: Any) -> bool:
    if default is value:
        return True
    if type(default) is not type(value):
        return False
    try:
        return bool(default == value)
    except ValueError:  # arrays compare element by element
        return False


def _serialize(name: str, value: Any, owner: str) -> tuple[dict[str, torch.Tensor], Any]:
    arrays: dict[str, Any] | None = None
    if _is_array(value):
        kind = "array"
        arrays = {"0": value}
    elif isinstance(value, ArrayRecord) and value:
        kind = "record"
        arrays = {key: array.numpy() for key, array in value.items()}
    elif isinstance(value, dict) and value and _all_arrays(value.values()):
        kind = "dict"
        arrays = value
    elif isinstance(value, list) and value and _all_arrays(value):
        kind = "list"
        arrays = {str(index): array for index, array in enumerate(value)}
    if arrays is None:
        return {}, {"kind": "data", "value": _as_data(name, value, owner)}
    arrays = {key: np.asarray(array) for key, array in arrays.items()}
    if any(array.dtype != np.float32 for array in arrays.values()):
        raise UserError(
            f"the strategy {owner} keeps arrays in {name!r} that are not float32, which cannot be "
            "stored between rounds"
        )
    tensors = {
        f"{name}/{key}": torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
        for key, array in arrays.items()
    }
    return tensors, {"kind": kind, "keys": list(arrays)}


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic)  # arithmetic makes scalars of 0-d arrays


def _all_arrays(values: Iterable[Any]) -> bool:
    return all(_is_array(value) for value in values)


def _as_data(name: str, value: Any, owner: str) -> Any:
    try:
        data = json.loads(json.dumps(value))
    except (TypeError, ValueError):
        data = None
    if data != value:
        raise UserError(
            f"the strategy {owner} keeps a {type(value).__name__} in {name!r}, which cannot be "
            "stored between rounds; numbers, text, and lists or dicts of those or of float32 "
            "arrays can"
        )
    return data
