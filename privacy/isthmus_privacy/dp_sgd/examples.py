"""The examples of each step, read in groups whose tensors have the same shapes."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import hashlib
import inspect
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from isthmus.errors import TaskError
from isthmus.task import Task, user_code
from isthmus.task.definition import defines
from isthmus.task.scoring import map_tensors
from isthmus.task.scoring.inputs import move, tensors_of
from isthmus_privacy.dp_sgd.isolation import (
    compares,
    kept_generators,
    same_bits,
    seed_generators,
)
from isthmus_privacy.dp_sgd.kept_state import ModelTensors
from isthmus_privacy.dp_sgd.sampling import poisson_sample

_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
)
"""Types of what cannot change, and whose values are equal if they look the same.

A class that is made from one of them may have attributes, and look as it likes.
"""

_GONE = object()
"""In place of an attribute that is not there."""


@dataclasses.dataclass(frozen=True)
class ExampleGroup:
    """Examples whose tensors have the same shapes."""

    one: Any
    """The first example as a batch of one: the structure of all."""
    tensors: Sequence[torch.Tensor]
    """The tensors of that structure, with one row for each example."""

    def __len__(self) -> int:
        return len(self.tensors[0])

    def batch_of(self, rows: Sequence[torch.Tensor]) -> Any:
        """The structure with other tensors, one row each: shapes (1, ...)."""
        following = iter(rows)
        return map_tensors(lambda _: next(following).unsqueeze(0), self.one)

    def parts(self, size: int) -> Iterator[Sequence[torch.Tensor]]:
        """The rows in parts of at most `size`."""
        for start in range(0, len(self), size):
            yield [each[start : start + size] for each in self.tensors]


class SampledExamples:
    """The examples of each step, drawn anew whenever they are asked for.

    Ranks of a datacenter divide the examples among them and each draws among its own, so that
    together they have drawn among all; a device draws among all that it has. An example is collated
    alone, from memory of its own and with random numbers of its own, so that nothing of it depends
    on others but by what the dataset or collate() keeps, which is compared.
    """

    def __init__(
        self, task: Task, dataset: Dataset[Any], own: range, probability: float, device: Any
    ) -> None:
        """`own` are the indices of the examples that are drawn among."""
        self._task = task
        self._dataset = dataset
        self._device = device
        self._own = own
        self._probability = probability
        self._steps = 0
        self._repeated: tuple[int, int, Any] | None = None
        """An example that is read again: its index, what its random numbers follow from, and it."""
        self._model: nn.Module | None = None

    def watch(self, model: nn.Module) -> None:
        """Refuse from now on a dataset or collate() that changes a tensor of this model."""
        self._model = model

    def check(self, indices: Sequence[int]) -> list[ExampleGroup]:
        """Read some examples as `read` does, and refuse data in which they depend on each other.

        The first one is read again, now and later: it must have the same bits. Random numbers that
        this takes are drawn again afterwards.

        Raises:
            TaskError: it has not; or see `read`.
        """
        with self._leaving_model(closely=True):
            with kept_generators(self._device):
                origin = secrets.randbits(64)
                one = self._one(indices[0], origin)
            self._repeated = indices[0], origin, one
            groups = self.read(indices)
            self._check_repeats()
        return groups

    def batches(self, first: int, until: int) -> Iterator[list[ExampleGroup]]:
        """The examples of steps `first` (included) to `until`, on the device; some have none.

        Raises:
            TaskError: see `check`, in some steps; or see `read`.
        """
        for _ in range(first, until):
            compared = compares(self._steps)
            with self._leaving_model(closely=compared):
                groups = self.read(poisson_sample(self._own, self._probability))
                if compared:
                    self._check_repeats()
            self._steps += 1
            yield groups

    def read(self, indices: Sequence[int]) -> list[ExampleGroup]:
        """The examples at some indices, in groups of equal shapes.

        Raises:
            TaskError: the dataset or collate() failed, or gave a tensor without rows, or what is
                neither a tensor nor a number or text.
        """
        if not indices:
            return []
        if type(self._dataset) is TensorDataset and not defines(self._task, "collate"):
            with user_code("reading the dataset"):
                rows = [tensor[torch.as_tensor(indices)] for tensor in self._dataset.tensors]
            rows = move(rows, self._device)
            return [ExampleGroup([each[:1] for each in rows], rows)]
        groups: dict[str, list[Any]] = {}
        origin = secrets.randbits(64)
        with kept_generators(self._device):
            for index in indices:
                one = self._one(index, origin)
                groups.setdefault(_shapes(one), []).append(one)
        return [self._group(members) for members in groups.values()]

    @contextlib.contextmanager
    def _leaving_model(self, *, closely: bool) -> Iterator[None]:
        """Refuse what changes the watched model within it.

        A statistic in a buffer would change what is computed for all other examples, and on a
        device it would be sent with the model, without noise.

        Args:
            closely: whether to compare all values of large tensors.

        Raises:
            TaskError: with the tensor.
        """
        if self._model is None:
            yield
            return
        tensors = ModelTensors(self._task, self._model, closely=closely)
        yield
        place = tensors.changed()
        if place is not None:
            raise TaskError(
                f"reading an example changes {place!r}: the dataset or collate() keeps something "
                "in a tensor of the model, by which one example could change the gradients of "
                "others, and differential privacy of examples does not bound that; make what is "
                "the same for all examples in model()"
            )

    def _one(self, index: int, origin: int) -> Any:
        """An example as a batch of one, in memory that the dataset does not use again.

        What it draws follows from its index and `origin`, a secret: an augmentation that draws
        until the result fits would else change the random numbers of all examples after it.
        Generators are left behind as the example left them.
        """
        digest = hashlib.blake2b(f"{origin} {index}".encode(), digest_size=8).digest()
        seed_generators(self._device, int.from_bytes(digest))
        with user_code("reading the dataset"):
            row = self._dataset[index]
        with user_code("collate()"):
            batch = self._task.collate([row])
        copied = map_tensors(torch.clone, batch, _checked_other)
        _check_attributes(batch, copied)
        return copied

    def _check_repeats(self) -> None:
        """Read the first example again, after whatever was read since."""
        if self._repeated is None:
            return
        index, origin, before = self._repeated
        with kept_generators(self._device):
            now = self._one(index, origin)
        if not _is_same(before, now):
            raise TaskError(
                "an example is another one when it is read again after others, with the same "
                "random numbers: the dataset or collate() keeps something, or has a generator of "
                "its own, and differential privacy of examples does not bound what an example "
                "changes in others; make each from what is stored of it alone, and from random "
                "numbers of PyTorch, NumPy or Python that have no generator of their own"
            )

    def _group(self, members: Sequence[Any]) -> ExampleGroup:
        columns = zip(*map(tensors_of, members), strict=True)
        one = move(members[0], self._device)
        return ExampleGroup(one, move([torch.cat(column) for column in columns], self._device))


def _checked_other(leaf: object) -> object:
    """Return a leaf of a batch that is no tensor, if it cannot change.

    Raises:
        TaskError: it may hold data that depend on other examples, which nothing would compare.
    """
    if not _is_plain(leaf):
        raise TaskError(
            f"a batch of one example has a {type(leaf).__module__}.{type(leaf).__qualname__}, "
            "which is not compared when the example is read again; with differential privacy of "
            "examples return tensors, numbers or text from the dataset or collate()"
        )
    return leaf


def _is_plain(value: object) -> bool:
    kind = type(value)
    # Numbers and text of NumPy are made from those of Python, and have no attributes.
    of_numpy = kind.__module__ == "numpy" and isinstance(value, _PLAIN)
    return kind in _PLAIN or of_numpy or isinstance(value, enum.Enum)


def _check_attributes(before: Any, after: Any) -> None:
    """Refuse a batch in which something has attributes that `map_tensors` does not follow.

    A group has the structure of its first example: its attributes would be those of all others.

    Args:
        before: a batch of one example.
        after: its copy by `map_tensors`. What a tokenizer keeps of the text in a `BatchEncoding` is
            removed from it.

    Raises:
        TaskError: with the attribute.
    """
    if isinstance(before, torch.Tensor):
        return
    if isinstance(before, Mapping):
        inner = [(before[key], each) for key, each in after.items()]
        _check_keys(before)
        lost = _lost_of_mapping(before, after)
    elif isinstance(before, list | tuple):
        inner = list(zip(before, after, strict=True))
        lost = list(_attributes(before))
    elif dataclasses.is_dataclass(before) and not isinstance(before, type):
        inner = [(getattr(before, name), getattr(after, name)) for name in _given_fields(before)]
        lost = _lost_of_dataclass(before, after)
    else:
        return
    if lost:
        raise TaskError(
            f"a batch of one example has a {type(before).__module__}.{type(before).__qualname__} "
            f"with the attribute {lost[0]!r}, and a group of examples would have that of its first "
            "one; with differential privacy of examples have all that depends on an example among "
            "the keys, items or fields of a batch"
        )
    for one, other in inner:
        _check_attributes(one, other)


def _check_keys(batch: Mapping[Any, Any]) -> None:
    """Refuse keys that may differ between examples without looking so.

    Raises:
        TaskError: with the type of one.
    """
    for key in batch:
        parts = key if type(key) is tuple else (key,)
        for each in parts:
            if not _is_plain(each):
                raise TaskError(
                    f"a batch of one example has a key of type {type(each).__module__}."
                    f"{type(each).__qualname__}, and a group of examples would have the keys of "
                    "its first one; with differential privacy of examples use numbers or text"
                )


def _lost_of_mapping(before: Any, after: Any) -> list[str]:
    """Attributes of a mapping that its copy has not, or that are no items of it and may change."""
    if "_encodings" in _attributes(after):  # what a tokenizer keeps of the text
        after._encodings = None
    kept = _attributes(after)
    gone = [name for name in _attributes(before) if name not in kept]
    may_change = {name: each for name, each in kept.items() if not _is_plain(each)}
    return gone + [
        name for name, each in may_change.items() if name not in after or after[name] is not each
    ]


def _lost_of_dataclass(before: Any, after: Any) -> list[str]:
    """Attributes of a dataclass that its copy has not, or has with another value.

    Those that it is made with are not compared; all others are computed from them, or are gone.
    """
    names = [*(field.name for field in dataclasses.fields(before)), *_attributes(before)]
    others = dict.fromkeys(name for name in names if name not in _given_fields(before))
    return [
        name
        for name in others
        if not _is_same(getattr(before, name, _GONE), getattr(after, name, _GONE))
    ]


def _given_fields(value: Any) -> list[str]:
    """Names of the fields with which a dataclass is made."""
    return [field.name for field in dataclasses.fields(value) if field.init]


def _attributes(value: object) -> dict[str, Any]:
    """What an object keeps besides its items; a `UserDict` has these in `data`."""
    kept = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        if "__slots__" in vars(kind):
            slots = filter(inspect.ismemberdescriptor, vars(kind).values())
            names = [each.__name__ for each in slots]
            kept |= {name: getattr(value, name) for name in names if hasattr(value, name)}
    if isinstance(value, collections.UserDict):
        kept.pop("data", None)
    return kept


def _shapes(value: Any) -> str:
    """Equal for batches of one whose tensors can be put together.

    It is followed as `map_tensors` follows it, with the types, keys and fields on the way: those of
    the first example are those of all of a group.

    Raises:
        TaskError: a tensor has not one row.
    """
    if isinstance(value, torch.Tensor):
        has_rows = value.layout is torch.strided and not value.is_nested
        if not has_rows or value.is_quantized or value.is_meta:
            raise TaskError(
                "a batch of one example has a tensor that is sparse, nested, quantized or without "
                "values; with differential privacy of examples return dense ones, and make others "
                "of them in forward()"
            )
        if value.ndim == 0 or len(value) != 1:
            raise TaskError(
                f"a batch of one example has a tensor of shape {tuple(value.shape)}; with "
                "differential privacy of examples every tensor must have one row for each"
            )
        return f"{tuple(value.shape)} {value.dtype}"
    if isinstance(value, Mapping):
        inner = [(_text(key), _shapes(each)) for key, each in value.items()]
        attributes = _attributes(value)
        inner += [(name, _text(each)) for name, each in attributes.items() if _is_plain(each)]
    elif isinstance(value, list | tuple):
        inner = [("", _shapes(each)) for each in value]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = [(name, _shapes(getattr(value, name))) for name in _given_fields(value)]
    else:
        return _text(value)
    return f"{type(value)} {inner}"


def _text(value: object) -> str:
    """Equal for what is no tensor and the same."""
    return f"{type(value)} {value._name_ if isinstance(value, enum.Enum) else repr(value)}"


def _is_same(one: Any, other: Any) -> bool:
    """Whether two batches of one example have the same bits."""
    leaves = _leaves(one), _leaves(other)
    return len(leaves[0]) == len(leaves[1]) and all(map(_is_same_leaf, *leaves))


def _leaves(value: Any) -> list[object]:
    found: list[object] = []

    def note(each: object) -> object:
        found.append(each)
        return each

    map_tensors(note, value, note)
    return found


def _is_same_leaf(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and same_bits(one, other)
    return _text(one) == _text(other)
