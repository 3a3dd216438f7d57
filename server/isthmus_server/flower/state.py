"""What a strategy remembers from round to round, as tensors and plain numbers.

Flower's strategies keep moments and clipping norms as plain attributes and have no way to store
them. So each round is given a new strategy, into which the attributes are put that the round before
left behind: a run that was stopped and one that was not go the same way.

`current_arrays`, in which several of them keep the model a round began with, is no memory: it is
set anew each round, also where the model has been trained elsewhere since.

>>> from flwr.serverapp.strategy import FedAdam
>>> new, used = FedAdam(), FedAdam()
>>> used.m_t = {"weight": np.ones(2, dtype=np.float32)}
>>> state = State.of(used, new)
>>> state.tensors
{'m_t/weight': tensor([1., 1.])}
>>> state.put_into(new)
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
from isthmus.integrations.flower.messages import record_of

FROM_THE_ROUND = "current_arrays"
"""Set by `configure_train`."""


@dataclasses.dataclass(frozen=True)
class State:
    """Attributes that are not as they were made; those of an inner strategy after `strategy.`."""

    tensors: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """`attribute/key` or `attribute/index`, each float32."""
    numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """By attribute: JSON data, or which kind of thing its tensors make."""

    @classmethod
    def of(cls, strategy: Strategy, new: Strategy) -> State:
        """What differs from a new one of the same options.

        Raises:
            UserError: it keeps something that cannot be stored.
        """
        tensors: dict[str, torch.Tensor] = {}
        numbers: dict[str, Any] = {}
        before = dict(_attributes(new))
        for name, value in _attributes(strategy):
            if name in before and _same(before[name], value):
                continue
            arrays, how = _take_apart(name, value, type(strategy).__name__)
            tensors |= arrays
            numbers[name] = how
        return cls(tensors, numbers)

    def put_into(self, strategy: Strategy) -> None:
        """Give them to a new strategy of the same options."""
        for name, how in self.numbers.items():
            *path, attribute = name.split(".")
            owner: Any = strategy
            for part in path:
                owner = getattr(owner, part)
            setattr(owner, attribute, self._put_together(name, how))

    def _put_together(self, name: str, how: Mapping[str, Any]) -> Any:
        kind = how["kind"]
        if kind == "data":
            return json.loads(json.dumps(how["value"]))
        arrays = {key: self.tensors[f"{name}/{key}"] for key in how["keys"]}
        if kind == "record":
            return record_of(arrays.items())
        copies = {key: tensor.numpy().copy() for key, tensor in arrays.items()}
        if kind == "dict":
            return copies
        return list(copies.values()) if kind == "list" else copies["0"]


def check(strategy: Strategy) -> None:
    """Refuse a strategy that may remember what cannot be stored.

    Raises:
        UserError: which attribute, and what would do.
    """
    for name, value in _attributes(strategy):
        if not _is_code(value):
            _take_apart(name, value, type(strategy).__name__)


def _attributes(strategy: Strategy, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in vars(strategy).items():
        if isinstance(value, Strategy):
            yield from _attributes(value, f"{path}{name}.")
        elif name != FROM_THE_ROUND:
            yield path + name, value


def _is_code(value: Any) -> bool:
    return inspect.isroutine(value) or inspect.isclass(value) or inspect.ismodule(value)


def _same(before: Any, value: Any) -> bool:
    if before is value:
        return True
    if type(before) is not type(value):
        return False
    try:
        return bool(before == value)
    except ValueError:  # of arrays, each element has an answer of its own
        return False


def _take_apart(name: str, value: Any, owner: str) -> tuple[dict[str, torch.Tensor], Any]:
    arrays: dict[str, Any] | None = None
    if _is_array(value):
        kind, arrays = "array", {"0": value}
    elif isinstance(value, ArrayRecord) and value:
        kind, arrays = "record", {key: array.numpy() for key, array in value.items()}
    elif isinstance(value, dict) and value and _all_arrays(value.values()):
        kind, arrays = "dict", value
    elif isinstance(value, list) and value and _all_arrays(value):
        kind, arrays = "list", {str(index): array for index, array in enumerate(value)}
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
