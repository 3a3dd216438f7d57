"""Which files a model starts from, and their digest.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     StartFiles.find(Path(folder))
Traceback (most recent call last):
    ...
isthmus.errors.UserError: /.../... has no weights: neither model.safetensors nor ...
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from isthmus.errors import UserError
from isthmus.start.safetensors_file import SafetensorsFile, StoredTensor

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
_RUN = "job.json"
"""A file that a run directory has."""
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

MAX_CONFIG_BYTES = 1 << 20
"""Largest `config.json` that is read."""
_MAX_INDEX_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class StartFiles:
    """The files with the tensors of a start, whose headers fit together."""

    path: Path
    """The file or the folder, as it was given."""
    files: tuple[SafetensorsFile, ...]
    """Sorted by name."""

    @classmethod
    def find(cls, path: Path) -> StartFiles:
        """Find the weights in a file or a folder.

        Raises:
            UserError: there are none, they cannot be read, or it is not clear which.
        """
        if path.is_file():
            if path.suffix != ".safetensors":
                raise UserError(
                    f"{path} is no .safetensors file; name such a file, or a folder with one"
                )
            if path.name == ADAPTER_WEIGHTS:
                raise UserError(
                    f"{path} is an adapter of PEFT; name its folder, where {ADAPTER_CONFIG} is"
                )
            return cls(path, (SafetensorsFile.open(path),))
        if not path.is_dir():
            raise UserError(f"there is neither a file nor a folder {path}")
        return cls(path, tuple(SafetensorsFile.open(path / name) for name in _names(path)))._fit()

    @classmethod
    def find_all(cls, path: Path, base: Path | None = None) -> list[StartFiles]:
        """The files of a model; or of the model under an adapter, and those of the adapter.

        Args:
            path: of the model or the adapter.
            base: of the model under the adapter.

        Raises:
            UserError: they cannot be used.
        """
        found = cls.find(path)
        if not found.is_adapter:
            if base is not None:
                raise UserError(f"{path} is no adapter of PEFT; remove model.base")
            return [found]
        if base is None:
            raise UserError(
                f"{path} is an adapter of PEFT; set model.base to the folder of the model that it "
                "adapts"
            )
        under = cls.find(base)
        if under.is_adapter:
            raise UserError(f"{base} is an adapter too; name the model under it in model.base")
        return [under, found]

    @property
    def is_adapter(self) -> bool:
        """Whether these are the weights of an adapter of PEFT."""
        return self.files[0].path.name == ADAPTER_WEIGHTS

    @property
    def tensors(self) -> dict[str, tuple[SafetensorsFile, StoredTensor]]:
        """The tensors by name, with the file of each, in the order of files and positions."""
        return {name: (file, each) for file in self.files for name, each in file.tensors.items()}

    def config(self, name: str = CONFIG) -> dict[str, Any] | None:
        """The configuration in the folder; None if it has none, or the path is a file.

        Raises:
            UserError: it cannot be read, or is too large.
        """
        path = self.path / name
        if not self.path.is_dir() or not path.is_file():
            return None
        data = self._adapter_config if name == ADAPTER_CONFIG else _read(path, MAX_CONFIG_BYTES)
        config = _json(path, data)
        if not isinstance(config, dict):
            raise UserError(f"{path} is no JSON object")
        return config

    def digests(self) -> dict[str, str]:
        """SHA-256 of each file by its name, in hexadecimal, with an adapter's configuration.

        Raises:
            UserError: a file cannot be read.
        """
        digests = {}
        for file in self.files:
            hashed = hashlib.sha256()
            for piece in file.read_pieces(0, file.size):
                hashed.update(piece)
            digests[file.path.name] = hashed.hexdigest()
        if self.is_adapter:
            digests[ADAPTER_CONFIG] = self.config_digest()
        return digests

    def digest(self) -> str:
        """SHA-256, in hexadecimal: see `digest_of`.

        Raises:
            UserError: a file cannot be read.
        """
        return digest_of(self.digests())

    def check_unchanged(self) -> None:
        """Refuse files that have changed since they were found.

        Raises:
            UserError: so they have.
        """
        for file in self.files:
            file.check_unchanged()

    def config_digest(self) -> str:
        """SHA-256 of an adapter's configuration, by which its weights are scaled."""
        return hashlib.sha256(self._adapter_config).hexdigest()

    @property
    def config_bytes(self) -> int:
        """Size of an adapter's configuration; 0 for a model."""
        return len(self._adapter_config) if self.is_adapter else 0

    @functools.cached_property
    def _adapter_config(self) -> bytes:
        """Read once: what is used is what has the digest."""
        return _read(self.path / ADAPTER_CONFIG, MAX_CONFIG_BYTES)

    def _fit(self) -> StartFiles:
        """Refuse a tensor in two files, and files that do not have what the index says."""
        seen: dict[str, Path] = {}
        for file in self.files:
            for name in file.tensors:
                if name in seen:
                    raise UserError(
                        f"{seen[name]} and {file.path} both have the tensor {name!r}; remove the "
                        "file that does not belong to the model"
                    )
                seen[name] = file.path
        if (self.path / INDEX).is_file():
            expected = {name: self.path / file for name, file in _weight_map(self.path).items()}
            for name in sorted(expected.keys() | seen.keys()):
                if expected.get(name) != seen.get(name):
                    has = f"has {name!r} in {getattr(seen.get(name), 'name', 'no file')}"
                    said = getattr(expected.get(name), "name", "no file")
                    raise UserError(
                        f"{self.path} {has}, and {INDEX} says in {said}; copy the folder again"
                    )
        return self


def digest_of(digests: Mapping[str, str]) -> str:
    """The digest of files by their digests: of one file its own.

    Of several it is the SHA-256 of what `sha256sum` prints for them, sorted by name.

    >>> digest_of({"b": "1" * 64, "a": "0" * 64})[:8]
    'c9d26cfb'
    """
    if len(digests) == 1:
        return next(iter(digests.values()))
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def digest_of_all(found: Sequence[StartFiles]) -> str:
    """The digest of what `StartFiles.find_all` has found.

    Raises:
        UserError: a file cannot be read.
    """
    return joined([files.digest() for files in found])


def joined(digests: Sequence[str]) -> str:
    """One digest: that of a model, or for the model under an adapter and the adapter."""
    if len(digests) == 1:
        return digests[0]
    base, adapter = digests
    return digest_of({"adapter": adapter, "base": base})


def _names(folder: Path) -> list[str]:
    """The names of the files with the weights of a folder, sorted."""
    single = (folder / WEIGHTS).is_file()
    index = (folder / INDEX).is_file()
    adapter = (folder / ADAPTER_CONFIG).is_file()
    if single and index:
        raise UserError(
            f"{folder} has both {WEIGHTS} and {INDEX}, and they may be two models; remove one, or "
            "name the file"
        )
    if adapter and (single or index):
        raise UserError(
            f"{folder} has the weights of a model and an adapter of PEFT; name the file, or move "
            f"{ADAPTER_CONFIG} into a folder of its own"
        )
    if adapter:
        return [ADAPTER_WEIGHTS]
    if single:
        return [WEIGHTS]
    if index:
        return sorted(set(_weight_map(folder).values()))
    if (folder / _RUN).is_file():
        raise UserError(
            f"the run in {folder} has no final model yet; `isthmus report {folder}` says what it "
            "does"
        )
    raise UserError(f"{folder} has no weights: {_instead(folder)}")


def _instead(folder: Path) -> str:
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if others:
        return (
            f"neither {WEIGHTS} nor {INDEX}, which would say whether {', '.join(others[:3])} "
            "belong to one model; name one file"
        )
    pickled = sorted(path.name for kind in _PICKLED for path in folder.glob(kind))
    if pickled:
        return (
            f"{pickled[0]} is pickled, and reading it could execute code; convert it, for example "
            "with save_pretrained() of transformers"
        )
    return f"neither {WEIGHTS} nor {INDEX} nor {ADAPTER_CONFIG}"


def _weight_map(folder: Path) -> dict[str, str]:
    """The file of each tensor, by the index of a folder."""
    path = folder / INDEX
    table = _json(path, _read(path, _MAX_INDEX_BYTES))
    found = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(found, dict) or not found:
        raise UserError(f"{path} has no weight_map, which names the file of each tensor")
    for name, file in found.items():
        if not isinstance(file, str) or PurePosixPath(file).name != file:
            raise UserError(f"{path} says that {name!r} is in {file!r}, which is no file's name")
        if not file.isprintable():  # it is shown, and part of the lines that the digest is of
            raise UserError(f"{path} says that {name!r} is in {file!r}; rename that file")
    return found


def _json(path: Path, data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON: {error}") from None


def _read(path: Path, largest: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(largest + 1)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    if len(data) > largest:
        raise UserError(f"{path} is larger than {largest} bytes")
    return data
