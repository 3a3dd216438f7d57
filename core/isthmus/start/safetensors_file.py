"""Read safetensors files of any program: the header at once, the values in pieces.

>>> import struct, tempfile
>>> header = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
>>> with tempfile.NamedTemporaryFile() as file:
...     _ = file.write(struct.pack("<Q", len(header)) + header + bytes(8))
...     file.flush()
...     SafetensorsFile.open(Path(file.name)).tensors["w"]
StoredTensor(name='w', dtype='F32', shape=(2,), begin=62, end=70)
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.errors import UserError
from isthmus.tensors.exchange_set import MAX_HEADER_BYTES

if TYPE_CHECKING:
    import torch

_LENGTH = struct.Struct("<Q")

PIECE_BYTES = 1 << 20
"""Bytes that are read at a time. Larger memory would stay with the process after it is freed."""

MAX_DIMENSIONS = 64
"""Most dimensions of a tensor of PyTorch."""
MAX_NUMBER = (1 << 63) - 1
"""The largest size of a tensor of PyTorch, and the largest position in a file."""

_DTYPES = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "F32": ("float32", 4),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
    "F64": ("float64", 8),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "C64": ("complex64", 8),
}
"""PyTorch's name and the bytes of each type of the format."""


def torch_dtype(name: str) -> torch.dtype:
    """PyTorch's type of the format's name of a type."""
    import torch

    dtype: torch.dtype = getattr(torch, _DTYPES[name][0])
    return dtype


def stored_dtype(dtype: torch.dtype) -> str:
    """The format's name of PyTorch's type.

    Raises:
        UserError: the format has no such type.
    """
    written = str(dtype).removeprefix("torch.")
    for name, (known, _) in _DTYPES.items():
        if known == written:
            return name
    raise UserError(f"safetensors files have no type for {dtype}")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where a file has a tensor."""

    name: str
    dtype: str
    """The format's name, such as `BF16`."""
    shape: tuple[int, ...]
    begin: int
    """In bytes, from the start of the file."""
    end: int
    """One beyond the last byte."""

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return _DTYPES[self.dtype][1]


@dataclasses.dataclass(frozen=True)
class SafetensorsFile:
    """The header of a file. Values are read from the file when they are asked for.

    Guarantees:
      * the tensors fill the file from the end of its header to its end, without gaps and overlaps.
    """

    path: Path
    size: int
    """Size of the file, in bytes."""
    values: int
    """Where the values begin, in bytes."""
    tensors: Mapping[str, StoredTensor]
    """By name, in the order in which the file has them."""
    metadata: Mapping[str, str]
    state: tuple[int, ...]
    """See `_state`, when the header was read."""

    @classmethod
    def open(cls, path: Path) -> SafetensorsFile:
        """Read the header of a file.

        Raises:
            UserError: the file cannot be read, or is no whole safetensors file.
        """
        try:
            with path.open("rb") as file:
                found = os.fstat(file.fileno())
                size = found.st_size
                first = file.read(_LENGTH.size)
                length = _LENGTH.unpack(first)[0] if len(first) == _LENGTH.size else 0
                if not 2 <= length <= min(MAX_HEADER_BYTES, size - _LENGTH.size):
                    raise UserError(
                        f"{path} is no safetensors file, or only the beginning of one: its header "
                        f"would have {length} bytes, and the file has {size}"
                    )
                text = file.read(length)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
        try:
            table = json.loads(text.decode(), object_pairs_hook=_without_repeats)
            metadata = table.pop("__metadata__", {})
            rows = [_row(name, row, _LENGTH.size + length) for name, row in table.items()]
            texts = {str(key): str(value) for key, value in metadata.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UserError(f"{path} is no safetensors file: {error}") from None
        rows.sort(key=lambda row: (row.begin, row.end))
        _check_extents(path, rows, _LENGTH.size + length, size)
        values = _LENGTH.size + length
        return cls(path, size, values, {row.name: row for row in rows}, texts, _state(found))

    def check_unchanged(self) -> None:
        """Refuse a file that was replaced or written since its header was read.

        Raises:
            UserError: so it was.
        """
        try:
            now = self.path.stat()
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror or error}") from None
        if _state(now) != self.state:
            raise UserError(
                f"{self.path} has changed while it was read; try again when it is written"
            )

    def read(self, tensor: StoredTensor) -> torch.Tensor:
        """A tensor of the file as a new tensor, in the file's type.

        Raises:
            UserError: the file has become shorter, or cannot be read.
        """
        import torch

        whole = torch.empty(math.prod(tensor.shape), dtype=torch_dtype(tensor.dtype))
        at = 0
        for piece in self.pieces(tensor):
            values = torch.frombuffer(piece, dtype=whole.dtype)
            whole[at : at + len(values)] = values
            at += len(values)
        return whole.view(tensor.shape)

    def pieces(self, tensor: StoredTensor) -> Iterator[bytearray]:
        """The bytes of a tensor in pieces of whole elements; the same memory each time.

        Raises:
            UserError: the file has become shorter, or cannot be read.
        """
        yield from self.read_pieces(tensor.begin, tensor.end)

    def mapping(self) -> mmap.mmap:
        """The file in memory, which all processes that map it share as far as they only read it.

        If the file becomes shorter, a process that reads it ends.

        Raises:
            UserError: it cannot be mapped.
        """
        try:
            with self.path.open("rb") as file:
                return mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path} cannot be mapped: {error}") from None

    def read_pieces(self, begin: int, end: int) -> Iterator[bytearray]:
        """The bytes of a part of the file, as `pieces` does."""
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(begin)
                buffer = bytearray(min(PIECE_BYTES, end - begin))
                while begin < end:
                    if len(buffer) > end - begin:
                        buffer = bytearray(end - begin)
                    self._fill(file, buffer)
                    yield buffer
                    begin += len(buffer)
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror or error}") from None

    def _fill(self, file: Any, buffer: bytearray) -> None:
        view = memoryview(buffer)
        while view:
            count = file.readinto(view)
            if not count:
                raise UserError(
                    f"{self.path} has become shorter while it was read; wait until it is written, "
                    "and try again"
                )
            view = view[count:]


def write_file(
    path: Path,
    rows: Mapping[str, tuple[str, tuple[int, ...]]],
    pieces: Callable[[str], Iterable[bytes | bytearray]],
    metadata: Mapping[str, str],
) -> None:
    """Write a file, one piece of a tensor after the other.

    Args:
        path: of the file.
        rows: type, as the format names it, and shape of each tensor by name.
        pieces: the bytes of a tensor by its name.
        metadata: for the header.

    Raises:
        OSError: it cannot be written.
    """
    # The widest types first: all begin at a multiple of their size, which some readers need.
    names = sorted(rows, key=lambda name: (-_DTYPES[rows[name][0]][1], name))
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name in names:
        dtype, shape = rows[name]
        end = at + math.prod(shape) * _DTYPES[dtype][1]
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(_LENGTH.pack(len(text)) + text)
        for name in names:
            for piece in pieces(name):
                file.write(piece)


def _state(found: os.stat_result) -> tuple[int, ...]:
    """What changes with the content of a file: of the two times, only the second cannot be set."""
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A table of a header, of which two readers cannot take different rows."""
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("its header has a name twice")
    return table


def _row(name: str, row: Mapping[str, Any], data: int) -> StoredTensor:
    """The entry of a tensor in a header; `data` is where the values begin in the file."""
    dtype = row["dtype"]
    shape = tuple(row["shape"])
    begin, end = row["data_offsets"]
    if dtype not in _DTYPES:
        raise ValueError(f"{name!r} has the type {dtype!r}, which this version does not read")
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"{name!r} has more than {MAX_DIMENSIONS} dimensions")
    numbers = (*shape, begin, end)
    if any(type(each) is not int or not 0 <= each <= MAX_NUMBER for each in numbers):
        raise ValueError(
            f"{name!r} has a size or a position that is no whole number of at most 63 bits"
        )
    if end - begin != math.prod(shape) * _DTYPES[dtype][1]:
        raise ValueError(f"{name!r} of shape {shape} in {dtype} does not have {end - begin} bytes")
    return StoredTensor(name, dtype, shape, data + begin, data + end)


def _check_extents(path: Path, rows: list[StoredTensor], data: int, size: int) -> None:
    """Refuse gaps, overlaps, and a file that is shorter or longer than its header says."""
    at = data
    for row in rows:
        if row.begin != at:
            raise UserError(f"{path} is no safetensors file: {row.name!r} is not where it should")
        at = row.end
    if at != size:
        what = "shorter" if size < at else "longer"
        raise UserError(
            f"{path} has {size} bytes and is {what} than its header says ({at} bytes); copy it "
            "again from where it is whole"
        )
