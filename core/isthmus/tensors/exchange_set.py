"""The exchange set: the exchanged parameters as one flat vector and as safetensors bytes.

A model's trainable parameters, sorted by name, form one float32 vector, on which all operations
work: sending, masking, adding, stepping. The running statistics of normalisation layers follow
them: they are averaged like parameters, but have no gradients and no optimizer. `TensorLayout` maps
parts of the vector to both. Its header followed by the vector's bytes is a safetensors file, so
that every program that reads this format can read what is sent and stored.

Shape legend: N = number of float32 elements in the exchange set.

>>> import torch
>>> from torch import nn
>>> layout = TensorLayout.of(nn.Linear(2, 3))
>>> layout.size, [entry.name for entry in layout.entries]
(9, ['bias', 'weight'])
>>> vector = layout.gather(nn.Linear(2, 3))
>>> payload = layout.encode(vector)
>>> torch.equal(layout.decode(payload), vector)
True
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any

from isthmus.errors import TaskError, UpdateError

if TYPE_CHECKING:
    import torch
    from torch import nn

MAX_HEADER_BYTES = 64 << 20
"""Largest header that is read, whatever size a peer announces."""

_LENGTH = struct.Struct("<Q")


@dataclasses.dataclass(frozen=True)
class Entry:
    """The position of one parameter in the vector."""

    name: str
    shape: tuple[int, ...]
    offset: int
    """In elements, from the start of the vector."""
    statistic: bool = False
    """Whether it is a running statistic of a normalisation layer instead of a parameter."""

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class TensorLayout:
    """Names and shapes of the exchange set, in the vector's order: parameters, then statistics.

    Both are sorted by name.

    Guarantees:
      * models with equal layouts can exchange vectors;
      * `header + vector bytes` is a valid safetensors file, and the only encoding of that vector.
    """

    entries: tuple[Entry, ...]

    @classmethod
    def of(
        cls, model: nn.Module, *, statistics: bool = True, unfilled: bool = False
    ) -> TensorLayout:
        """The layout of a module's trainable parameters, tied ones once, and running statistics.

        Args:
            model: the module.
            statistics: whether running statistics of normalisation layers are exchanged.
            unfilled: whether parameters get their values later, and may be on the device `meta`.

        Raises:
            TaskError: nothing to train, a parameter that is not of a real floating type, has no
                values yet or shares memory with another, or a layer that normalises by its batch
                in evaluation too.
        """
        from torch.nn.parameter import is_lazy

        from isthmus.tensors.overlap import explain_overlap
        from isthmus.tensors.running_statistics import find_statistics

        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if is_lazy(tensor):
                raise TaskError(
                    f"{name!r} has no shape before the first forward pass; give its layer explicit "
                    "sizes, or have model() run the model once"
                )
        buffers = find_statistics(model) if statistics else {}
        shapes: dict[str, tuple[int, ...]] = {}
        trained: dict[str, torch.Tensor] = dict(buffers)
        for name, parameter in model.named_parameters():
            if parameter.is_meta and not unfilled:
                raise TaskError(
                    f"parameter {name!r} is on the device 'meta', which stores no values; have "
                    "model() create it on the CPU"
                )
            if not parameter.requires_grad:
                continue
            if not parameter.is_floating_point():
                raise TaskError(
                    f"parameter {name!r} is of dtype {parameter.dtype}; only real floating-point "
                    "parameters can be trained here"
                )
            shapes[name] = tuple(parameter.shape)
            trained[name] = parameter
        if not shapes:
            raise TaskError("the model has nothing to train: no parameter has requires_grad")
        known = {id(tensor) for tensor in trained.values()}
        others = {
            name: tensor
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]
            if id(tensor) not in known
        }
        if overlap := explain_overlap(trained, others):
            raise TaskError(overlap)
        shapes |= {name: tuple(buffer.shape) for name, buffer in buffers.items()}
        return cls.from_shapes(shapes, buffers)

    @classmethod
    def from_shapes(
        cls, shapes: Mapping[str, tuple[int, ...]], statistics: Collection[str] = ()
    ) -> TensorLayout:
        """The layout of the given names and shapes, in any order; some are of statistics."""
        entries = []
        offset = 0
        for name in sorted(shapes, key=lambda name: (name in statistics, name)):
            entries.append(Entry(name, shapes[name], offset, name in statistics))
            offset += entries[-1].count
        return cls(tuple(entries))

    @classmethod
    def from_header(cls, header: bytes | memoryview) -> TensorLayout:
        """Parse the bytes of `header`.

        Raises:
            UpdateError: the bytes are not a header that `header` writes.
        """
        raw = bytes(header)
        try:
            (length,) = _LENGTH.unpack_from(raw)
            if length != len(raw) - _LENGTH.size or length > MAX_HEADER_BYTES:
                raise ValueError("its length does not match")
            table = json.loads(raw[_LENGTH.size :])
            shapes = {
                name: tuple(int(size) for size in row["shape"])
                for name, row in table.items()
                if name != "__metadata__"
            }
            statistics = json.loads(table.get("__metadata__", {}).get("statistics", "[]"))
            if not isinstance(statistics, list) or not shapes.keys() >= set(statistics):
                raise ValueError("its statistics are not tensors of it")
            if any(size < 0 for shape in shapes.values() for size in shape):
                raise ValueError("it has a negative size")
        except (
            struct.error,
            ValueError,
            OverflowError,
            TypeError,
            KeyError,
            AttributeError,
            RecursionError,
        ) as error:
            raise UpdateError(
                f"this is not a safetensors header of an exchange set: {error}"
            ) from error
        layout = cls.from_shapes(shapes, statistics)
        if layout.header != raw:
            raise UpdateError("this safetensors header does not have the form that Isthmus writes")
        return layout

    @cached_property
    def size(self) -> int:
        """N: number of elements of the vector."""
        return self.entries[-1].offset + self.entries[-1].count if self.entries else 0

    @property
    def trained_size(self) -> int:
        """Number of elements of parameters; those of running statistics follow them."""
        return next((entry.offset for entry in self.entries if entry.statistic), self.size)

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the running statistics."""
        return tuple(entry.name for entry in self.entries if entry.statistic)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors."""
        return tuple(entry.name for entry in self.entries)

    @property
    def nbytes(self) -> int:
        """Bytes of one encoded vector including the header."""
        return len(self.header) + 4 * self.size

    @cached_property
    def header(self) -> bytes:
        """The safetensors header: 8 bytes of length, then JSON padded with spaces to 8 bytes."""
        table: dict[str, Any] = {}
        if self.statistics:
            table["__metadata__"] = {"statistics": json.dumps(self.statistics)}
        table |= {
            entry.name: {
                "dtype": "F32",
                "shape": list(entry.shape),
                "data_offsets": [4 * entry.offset, 4 * (entry.offset + entry.count)],
            }
            for entry in self.entries
        }
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return _LENGTH.pack(len(text)) + text

    @cached_property
    def gradient_and_update(self) -> TensorLayout:
        """The layout (2N) of a gradient and, after it, an update, each of this layout.

        >>> layout = TensorLayout.from_shapes({"bias": (3,)})
        >>> [entry.name for entry in layout.gradient_and_update.entries]
        ['gradient.bias', 'update.bias']
        """
        # A slash sorts after a dot: statistics follow the parameters in each half.
        return TensorLayout.from_shapes(
            {
                f"{part}{'/' if entry.statistic else '.'}{entry.name}": entry.shape
                for part in ("gradient", "update")
                for entry in self.entries
            }
        )

    @property
    def gradient_room(self) -> int:
        """Bytes in front of an encoded vector that make it end a `gradient_and_update`."""
        return self.gradient_and_update.nbytes - self.nbytes

    def explain_difference(self, other: TensorLayout) -> str | None:
        """The first difference from `other` as half a sentence, or None."""
        own = {entry.name: entry.shape for entry in self.entries}
        others = {entry.name: entry.shape for entry in other.entries}
        for name in sorted(own.keys() | others.keys()):
            if name not in others:
                return f"parameter {name!r} is here and not there"
            if name not in own:
                return f"parameter {name!r} is there and not here"
            if own[name] != others[name]:
                return f"parameter {name!r} has shape {own[name]} here and {others[name]} there"
        return None

    def explain_half_precision(self, model: nn.Module) -> str | None:
        """Why secure sums of updates to a module of this layout are refused; None if they are not.

        Devices hide on which numbers of float32 an update lies (`isthmus_privacy.secagg.spacing`).
        Numbers of fewer digits lie so far apart that what hides them would be as large as updates.
        """
        import torch

        coarsest = torch.finfo(torch.float32).eps
        for tensor, name in zip(self._tensors(model), self.names, strict=True):
            if torch.finfo(tensor.dtype).eps > coarsest:
                kind = str(tensor.dtype).removeprefix("torch.")
                return (
                    f"{name!r} is of type {kind}, and devices hide in secure sums only on which "
                    "numbers of float32 their updates lie; build the model in float32, with "
                    'federated.precision = "bf16" or "fp16" to compute in half precision, or set '
                    "federated.secure_aggregation = false"
                )
        return None

    # -- module and vector ----------------------------------------------------------------------

    def gather(self, model: nn.Module, out: torch.Tensor | None = None) -> torch.Tensor:
        """The module's values, in a new float32 vector (N) or in `out`."""
        import torch

        vector = torch.empty(self.size, dtype=torch.float32) if out is None else out
        for tensor, part in self.pairs(model, vector):
            part.copy_(tensor)
        return vector

    def scatter(self, vector: torch.Tensor, model: nn.Module) -> None:
        """Copy the vector (N) into the module's parameters and statistics, in place."""
        for tensor, part in self.pairs(model, vector):
            tensor.copy_(part)

    def pairs(
        self, model: nn.Module, vector: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each exchanged tensor of a module, detached, and a view of its part of the vector."""
        for tensor, (_, part) in zip(self._tensors(model), self.parts(vector), strict=True):
            yield tensor.detach(), part

    def _tensors(self, model: nn.Module) -> list[torch.Tensor]:
        """The exchanged tensors of a module, in the vector's order."""
        tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
        return [tensors[name] for name in self.names]

    def parts(self, vector: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Each entry's name and a view of its part of the vector."""
        for entry in self.entries:
            yield entry.name, vector.narrow(0, entry.offset, entry.count).view(entry.shape)

    def parameters_of_update(self, vector: torch.Tensor) -> torch.Tensor:
        """A view of an update's parameters, without its running statistics.

        Args:
            vector: the update (N), or a gradient and the update (2N), see `gradient_and_update`.
        """
        return vector.narrow(0, len(vector) - self.size, self.trained_size)

    # -- vector and bytes -----------------------------------------------------------------------

    def encode(self, vector: torch.Tensor) -> bytearray:
        """The vector as a safetensors file in memory: one copy."""
        payload = bytearray(self.nbytes)
        payload[: len(self.header)] = self.header
        self.decode(payload).copy_(vector)
        return payload

    def decode(self, payload: bytearray | memoryview) -> torch.Tensor:
        """The vector as a view of `payload`; both share their memory.

        Raises:
            UpdateError: the payload has another layout or size.
        """
        import torch

        if len(payload) != self.nbytes:
            raise UpdateError(
                f"{len(payload)} bytes were received, and this exchange set has {self.nbytes} "
                f"({self.size} float32 parameters)"
            )
        if bytes(memoryview(payload)[: len(self.header)]) != self.header:
            received = TensorLayout.from_header(memoryview(payload)[: len(self.header)])
            raise UpdateError(
                f"another exchange set was received: {received.explain_difference(self)}"
            )
        if self.size == 0:
            return torch.empty(0, dtype=torch.float32)
        return torch.frombuffer(payload, dtype=torch.float32, offset=len(self.header))


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a tensor's name matches one of the job's patterns, which are those of `fnmatch`."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def about_brackets(pattern: str) -> str:
    """A hint for a pattern that matches nothing: what its brackets mean, if it has any."""
    return "; [ begins a set of characters in a pattern, [[] stands for [" if "[" in pattern else ""


def digest(payload: bytes | bytearray | memoryview) -> bytes:
    """The SHA-256 that identifies a blob."""
    return hashlib.sha256(payload).digest()
