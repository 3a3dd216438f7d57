"""Convert PyTorch's distributed checkpoints (DCP), as torchtitan and FSDP write them.

Such a folder has a description, `.metadata`, and the tensors in pieces, one file for each rank that
wrote them. The description is a pickle, which can execute code when it is read. Here it can name
nothing but the classes that PyTorch writes into it.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
import pickle
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import (
    _StorageInfo,
)

from isthmus.errors import UserError
from isthmus.start.safetensors_file import PIECE_BYTES, stored_dtype, write_file
from isthmus.tensors.exchange_set import matches

DESCRIPTION = ".metadata"
_MAX_DESCRIPTION_BYTES = 256 << 20

TRAINING_STATE = ("optimizer.*", "optim.*", "lr_scheduler.*", "dataloader.*", "train_state.*")
"""Names by which torchtitan and PyTorch's recipes store what is not the model."""

_NAMES = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    # The folder in which it was written.
    "pathlib": ("PosixPath", "PurePosixPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath"),
}
"""What a description may name, by module; types of elements besides."""


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A part of a tensor in a file."""

    file: str
    begin: int
    """In bytes, from the start of the file."""
    length: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor and where its pieces are, which fit into it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[_Piece, ...]


@dataclasses.dataclass(frozen=True)
class DistributedCheckpoint:
    """The description of a checkpoint; its tensors are read from the files when they are needed."""

    folder: Path
    tensors: dict[str, _Tensor]
    """The model's, by name."""
    left_out: tuple[str, ...]
    """Names of what is not the model's, see `TRAINING_STATE`, or no tensor."""

    @classmethod
    def open(cls, folder: Path) -> DistributedCheckpoint:
        """Read the description of a checkpoint.

        Raises:
            UserError: there is none, it is damaged, or names what PyTorch does not write there.
        """
        path = folder / DESCRIPTION
        try:
            with path.open("rb") as file:
                data = file.read(_MAX_DESCRIPTION_BYTES + 1)
        except OSError as error:
            raise UserError(
                f"{path} cannot be read: {error.strerror or error}; name the folder of a "
                "distributed checkpoint of PyTorch"
            ) from None
        if len(data) > _MAX_DESCRIPTION_BYTES:
            raise UserError(f"{path} is larger than {_MAX_DESCRIPTION_BYTES} bytes")
        try:
            described = _Unpickler(io.BytesIO(data)).load()
            tensors, left_out = _read_description(described)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        except Exception as error:  # noqa: BLE001 - damaged bytes raise errors of any kind
            raise UserError(
                f"{path} is no description of a distributed checkpoint, or a damaged one: "
                f"{type(error).__name__}"
            ) from None
        if not tensors:
            raise UserError(f"{path} has no tensors of a model")
        return cls(folder, tensors, left_out)

    def write(self, output: Path) -> None:
        """Write the tensors as a safetensors file, with one of them in memory at a time.

        Raises:
            UserError: a file of the checkpoint is missing, short or has other values than is said,
                or the output exists or cannot be written.
        """
        if output.exists():
            raise UserError(f"{output} exists already; name another file")
        rows = {name: (stored_dtype(each.dtype), each.shape) for name, each in self.tensors.items()}
        # A file of which the end is missing has its place only once it is whole.
        part = output.with_name(f".{output.name}.part")
        try:
            write_file(part, rows, self._bytes, {"format": "pt"})
            part.replace(output)
        except OSError as error:
            raise UserError(f"{output} cannot be written: {error.strerror or error}") from None
        finally:
            part.unlink(missing_ok=True)

    def _bytes(self, name: str) -> Iterator[bytes]:
        values = self.read(name).reshape(-1).view(torch.uint8)
        for begin in range(0, len(values), PIECE_BYTES):
            yield values[begin : begin + PIECE_BYTES].numpy().tobytes()

    def read(self, name: str) -> torch.Tensor:
        """A tensor, joined from its pieces.

        Raises:
            UserError: see `write`.
        """
        tensor = self.tensors[name]
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        covered = torch.zeros(tensor.shape, dtype=torch.bool)
        for piece in tensor.pieces:
            where = tuple(
                slice(offset, offset + size)
                for offset, size in zip(piece.offsets, piece.sizes, strict=True)
            )
            if covered[where].any():
                raise UserError(f"{self.folder} has pieces of {name!r} that overlap")
            covered[where] = True
            whole[where] = self._read_piece(name, tensor, piece)
        if not covered.all():
            raise UserError(f"{self.folder} does not have all pieces of {name!r}")
        return whole

    def _read_piece(self, name: str, tensor: _Tensor, piece: _Piece) -> torch.Tensor:
        path = self.folder / piece.file
        try:
            with path.open("rb") as file:
                file.seek(piece.begin)
                # Never more than the file has, whatever its description says.
                data = file.read(min(piece.length, os.fstat(file.fileno()).st_size))
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
        try:
            values = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # noqa: BLE001 - damaged bytes raise errors of any kind
            raise UserError(
                f"{path} is damaged or not whole where {name!r} should be: {type(error).__name__}; "
                "copy it again"
            ) from None
        if (
            not isinstance(values, torch.Tensor)
            or values.dtype != tensor.dtype
            or tuple(values.shape) != piece.sizes
            or values.layout != torch.strided
        ):
            raise UserError(f"{path} has other values than its description says for {name!r}")
        return values


class _Unpickler(pickle.Unpickler):
    """Reads a description, and nothing that names other objects than `_NAMES`."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _memory_format  # by which Python 3.11.2 stores a member of an enumeration
        if name not in _NAMES.get(module, ()):
            raise UserError(
                f"it names {module}.{name}, which PyTorch does not write there, and which could "
                "execute code; nothing was read"
            )
        if module == "pathlib._local":  # Python 3.13's name
            module = "pathlib"
        return super().find_class(module, name)


def _memory_format(kind: object, name: str) -> Any:
    """What `getattr` is in a description."""
    if kind is not dcp._MEM_FORMAT_ENCODING:
        raise UserError("it reads an attribute, which could execute code; nothing was read")
    return dcp._MEM_FORMAT_ENCODING[name]


def _read_description(described: Any) -> tuple[dict[str, _Tensor], tuple[str, ...]]:
    """The model's tensors of a description, and the names of all else."""
    if not isinstance(described, dcp.Metadata):
        raise UserError("it is no description of a distributed checkpoint")
    storage = {
        (index.fqn, tuple(index.offset or ())): found
        for index, found in described.storage_data.items()
    }
    tensors = {}
    left_out = []
    for name, each in described.state_dict_metadata.items():
        if not isinstance(name, str):
            raise UserError(f"{name!r} is no name of a tensor")
        if isinstance(each, dcp.TensorStorageMetadata) and not matches(name, TRAINING_STATE):
            tensors[name] = _tensor(name, each, storage)
        else:
            left_out.append(name)
    return tensors, tuple(left_out)


def _tensor(
    name: str, each: dcp.TensorStorageMetadata, storage: dict[tuple[str, tuple[int, ...]], Any]
) -> _Tensor:
    """A tensor of a description, of which nothing is believed that was not compared."""
    shape = _sizes(name, each.size)
    dtype = each.properties.dtype
    pieces = []
    for chunk in each.chunks:
        offsets = _sizes(name, chunk.offsets)
        sizes = _sizes(name, chunk.sizes)
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise UserError(f"{name!r} has a piece of another number of dimensions")
        if any(a + b > c for a, b, c in zip(offsets, sizes, shape, strict=True)):
            raise UserError(f"{name!r} has a piece that is not within {shape}")
        found = storage.get((name, offsets))
        if not isinstance(found, _StorageInfo):
            raise UserError(f"it does not say where {name!r} is")
        if found.transform_descriptors:
            raise UserError(f"{name!r} is compressed, which this version does not read")
        file = found.relative_path
        if not isinstance(file, str) or PurePath(file).name != file:
            raise UserError(f"{name!r} is in {file!r}, which is no name of a file")
        begin, length = _sizes(name, (found.offset, found.length))
        if math.prod(sizes) * dtype.itemsize > length:
            raise UserError(f"{name!r} has a piece of more bytes than are stored")
        pieces.append(_Piece(file, begin, length, offsets, sizes))
    if sum(math.prod(piece.sizes) for piece in pieces) != math.prod(shape):
        raise UserError(f"it does not have all pieces of {name!r}")
    return _Tensor(dtype, shape, tuple(pieces))


def _sizes(name: str, values: Any) -> tuple[int, ...]:
    found = tuple(values)
    if any(type(value) is not int or value < 0 for value in found):
        raise UserError(f"{name!r} has a size that is no whole number")
    return found
