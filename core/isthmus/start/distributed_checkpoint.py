"""Convert PyTorch's distributed checkpoints (DCP), as torchtitan and FSDP write them.

Such a folder has a description, `.metadata`, and the tensors in pieces, one file for each rank that
wrote them. The description is a pickle, which can execute code when it is read. Here it can name
nothing but the classes that PyTorch writes into it, and of these it gets others, which hold
attributes and have no code.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
import pickle
import stat
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, ClassVar

import torch

from isthmus.errors import UserError
from isthmus.start.safetensors_file import (
    MAX_DIMENSIONS,
    MAX_NUMBER,
    PIECE_BYTES,
    stored_dtype,
    write_file,
)
from isthmus.tensors.exchange_set import matches

DESCRIPTION = ".metadata"
_MAX_DESCRIPTION_BYTES = 256 << 20

TRAINING_STATE = ("optimizer.*", "optim.*", "lr_scheduler.*", "dataloader.*", "train_state.*")
"""Names by which torchtitan and PyTorch's recipes store what is not the model."""


class _Described:
    """In the place of an object of PyTorch: the attributes that a description gives it."""

    def set_attributes(self, state: object) -> None:
        """Take what an object of PyTorch was stored as.

        Raises:
            UserError: it is nothing that PyTorch writes.
        """
        if isinstance(self, _TensorProperties) and isinstance(state, tuple) and state:
            state = {"dtype": state[0]}  # what follows it is no longer used
        if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
            raise UserError("it has an object in a form that PyTorch does not write")
        vars(self).update(state)


class _BytesStorageMetadata(_Described):
    pass


class _ChunkStorageMetadata(_Described):
    offsets: Any
    sizes: Any


class _Metadata(_Described):
    state_dict_metadata: Any
    storage_data: Any


class _MetadataIndex(_Described):
    fqn: Any
    offset: Any = None
    """Offset of a part of a tensor. None by default, as in PyTorch's class: the index of what is no
    tensor of several ranks has none."""


class _StorageInfo(_Described):
    relative_path: Any
    offset: Any
    length: Any


class _StorageMeta(_Described):
    pass


class _TensorProperties(_Described):
    dtype: Any


class _TensorStorageMetadata(_Described):
    properties: Any
    size: Any
    chunks: Any


_OTHER_OPCODES = (
    *(pickle.PERSID, pickle.BINPERSID, pickle.EXT1, pickle.EXT2, pickle.EXT4),
    *(pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
    *(pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET, pickle.DICT),
)
"""What a pickle may have, and a description has not."""


def _unused(*_: object) -> None:
    """In the place of what makes an object that nothing here depends on, such as a path."""


def _memory_format(*_: object) -> None:
    """In the place of the enumeration of memory formats."""


def _member(kind: object, _: str) -> None:
    """In the place of `getattr`, by which Python 3.11.2 stores a member of an enumeration."""
    if kind is not _memory_format:
        raise UserError("it reads an attribute, which could execute code; nothing was read")


_METADATA = "torch.distributed.checkpoint.metadata"
_NAMES: Mapping[tuple[str, str], Any] = {
    ("builtins", "getattr"): _member,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _unused,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    (_METADATA, "BytesStorageMetadata"): _BytesStorageMetadata,
    (_METADATA, "ChunkStorageMetadata"): _ChunkStorageMetadata,
    (_METADATA, "Metadata"): _Metadata,
    (_METADATA, "MetadataIndex"): _MetadataIndex,
    (_METADATA, "StorageMeta"): _StorageMeta,
    (_METADATA, "TensorProperties"): _TensorProperties,
    (_METADATA, "TensorStorageMetadata"): _TensorStorageMetadata,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _memory_format,
    # The folder in which it was written; the second is Python 3.13's name.
    ("pathlib", "PosixPath"): _unused,
    ("pathlib", "PurePosixPath"): _unused,
    ("pathlib._local", "PosixPath"): _unused,
    ("pathlib._local", "PurePosixPath"): _unused,
}
"""What a description may name, with what it gets instead; types of elements besides."""


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
                size = os.fstat(file.fileno()).st_size
                data = file.read(min(size, _MAX_DESCRIPTION_BYTES) + 1)
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
        try:
            exists = output.exists()
        except OSError as error:
            raise UserError(f"{output} cannot be written: {error.strerror or error}") from None
        if exists:
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
        for piece in tensor.pieces:
            self._check_file(name, piece)
        try:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype)
            covered = torch.zeros(tensor.shape, dtype=torch.bool)
        except RuntimeError:
            count = math.prod(tensor.shape)
            raise UserError(
                f"{name!r} needs {count * (tensor.dtype.itemsize + 1):,} bytes of memory, which "
                "this machine does not have; convert it on a larger one"
            ) from None
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

    def _check_file(self, name: str, piece: _Piece) -> None:
        """Refuse a piece that its file cannot have, before memory of its size is taken."""
        path = self.folder / piece.file
        try:
            found = path.stat()
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
        if not stat.S_ISREG(found.st_mode):
            raise UserError(f"{path} cannot be read: it is no file")
        if found.st_size < piece.begin + piece.length:
            raise UserError(
                f"{path} is damaged or not whole where {name!r} should be: it has "
                f"{found.st_size} bytes; copy it again"
            )

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
            with zipfile.ZipFile(io.BytesIO(data)) as archive:  # as which PyTorch writes a piece
                unpacked = sum(each.file_size for each in archive.infolist())
            if unpacked > len(data):
                raise UserError(f"{path} is compressed, which this version does not read")
            values = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except UserError:
            raise
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
            or values.device.type != "cpu"  # "meta" has no values
        ):
            raise UserError(f"{path} has other values than its description says for {name!r}")
        return values


def _build(reader: Any) -> None:
    """Give an object its attributes: no class, and by no method of its own."""
    state = reader.stack.pop()
    described = reader.stack[-1]
    if not isinstance(described, _Described):
        raise UserError("it changes an object that PyTorch does not write there")
    described.set_attributes(state)


def _set_item(reader: Any) -> None:
    """Add to a table."""
    _check_keys(reader.stack[-2:])
    _LOADING[pickle.SETITEM[0]](reader)


def _set_items(reader: Any) -> None:
    """Add to a table all that follows a mark."""
    _check_keys(reader.stack)
    _LOADING[pickle.SETITEMS[0]](reader)


def _check_keys(items: list[Any]) -> None:
    """Refuse keys that are made of others: the hash of deep ones ends the process."""
    if not all(type(key) is str or isinstance(key, _MetadataIndex) for key in items[::2]):
        raise UserError("it has a key that PyTorch does not write there")


_LOADING = pickle._Unpickler.dispatch


# The one of Python, since that of C allocates what a description says and not what it has.
class _Unpickler(pickle._Unpickler):
    """Reads a description, and nothing that names other objects than `_NAMES`."""

    dispatch: ClassVar[dict[int, Any]] = {
        **{code: load for code, load in _LOADING.items() if bytes([code]) not in _OTHER_OPCODES},
        pickle.BUILD[0]: _build,
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
    }

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _NAMES:
            raise UserError(
                f"it names {module}.{name}, which PyTorch does not write there, and which could "
                "execute code; nothing was read"
            )
        return _NAMES[module, name]


def _read_description(described: Any) -> tuple[dict[str, _Tensor], tuple[str, ...]]:
    """The model's tensors of a description, and the names of all else."""
    if not isinstance(described, _Metadata):
        raise UserError("it is no description of a distributed checkpoint")
    storage = {}
    for index, found in described.storage_data.items():
        name = index.fqn
        _check_name(name)
        offset = () if index.offset is None else index.offset
        storage[name, _sizes(name, offset)] = found
    tensors = {}
    left_out = []
    for name, each in described.state_dict_metadata.items():
        _check_name(name)
        if isinstance(each, _TensorStorageMetadata) and not matches(name, TRAINING_STATE):
            tensors[name] = _tensor(name, each, storage)
        else:
            left_out.append(name)
    return tensors, tuple(left_out)


def _check_name(name: object) -> None:
    """Refuse what is no name of a tensor, or none that a safetensors file can have."""
    if not isinstance(name, str) or name == "__metadata__":
        raise UserError(f"{name!r} is no name of a tensor")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UserError(f"{name!r} is no name of a tensor: it is no text") from None


def _tensor(name: str, each: Any, storage: Mapping[tuple[str, tuple[int, ...]], Any]) -> _Tensor:
    """A tensor of a description, of which nothing is believed that was not compared."""
    shape = _sizes(name, each.size)
    if len(shape) > MAX_DIMENSIONS:
        raise UserError(f"{name!r} has more than {MAX_DIMENSIONS} dimensions")
    dtype = each.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"it does not say of which type {name!r} is")
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
        if getattr(found, "transform_descriptors", None):
            raise UserError(f"{name!r} is compressed, which this version does not read")
        file = found.relative_path
        if not isinstance(file, str) or PurePath(file).name != file or "\0" in file:
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
    if any(type(value) is not int or not 0 <= value <= MAX_NUMBER for value in found):
        raise UserError(f"{name!r} has a size that is no whole number of at most 63 bits")
    return found
