"""Write tensors that were not trained in the type that they had in the files of the start."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from isthmus.start.files import CONFIG, INDEX, StartFiles
from isthmus.start.safetensors_file import SafetensorsFile, StoredTensor, write_file
from isthmus.tensors.fingerprint import same_values

_TYPE = "dtype"
"""The key of a configuration with the type in which transformers loads weights."""


def restore_types(folder: Path, start: StartFiles) -> None:
    """Give the tensors in a folder that have the start's values the start's type too.

    If all have it, the configuration says so as well; else it says the type of the others, which is
    the wider one and has all values.

    Args:
        folder: as transformers has written it.
        start: the files of the start, of whose tensors some have the same names.
    """
    written = StartFiles.find(folder)
    known = start.tensors
    restored: set[str] = set()
    for file in written.files:
        same = {
            name: known[name]
            for name, stored in file.tensors.items()
            if name in known and _is_narrower(known[name][1], stored) and _equal(file, name, start)
        }
        restored.update(same)
        if same:
            _rewrite(file, same)
    if not restored:
        return
    _write_total(folder)
    types = {name: stored.dtype for name, (_, stored) in StartFiles.find(folder).tensors.items()}
    config = start.config()
    if config is not None and all(
        name in known and known[name][1].dtype == kind for name, kind in types.items()
    ):
        own = json.loads((folder / CONFIG).read_bytes())
        for key in (_TYPE, "torch_dtype"):
            if key in config:
                own[_TYPE] = config[key]
                break
        _replace(folder / CONFIG, own)


def _is_narrower(stored: StoredTensor, written: StoredTensor) -> bool:
    return stored.shape == written.shape and stored.item_bytes < written.item_bytes


def _equal(file: SafetensorsFile, name: str, start: StartFiles) -> bool:
    """Whether a tensor was written with the values of the start."""
    origin, stored = start.tensors[name]
    values = file.read(file.tensors[name])
    return same_values(values, origin.read(stored).to(values.dtype))


def _rewrite(
    file: SafetensorsFile, replaced: Mapping[str, tuple[SafetensorsFile, StoredTensor]]
) -> None:
    """Replace tensors of a file by those of other files."""
    sources = {name: replaced.get(name, (file, each)) for name, each in file.tensors.items()}
    rows = {name: (stored.dtype, stored.shape) for name, (_, stored) in sources.items()}

    def pieces(name: str) -> Iterator[bytearray]:
        origin, stored = sources[name]
        yield from origin.pieces(stored)

    part = file.path.with_name(f"{file.path.name}.part")
    write_file(part, rows, pieces, file.metadata)
    part.replace(file.path)


def _write_total(folder: Path) -> None:
    """Correct the number of bytes in the index of several files."""
    path = folder / INDEX
    if not path.is_file():
        return
    index = json.loads(path.read_bytes())
    rows = [stored for _, stored in StartFiles.find(folder).tensors.values()]
    total = sum(stored.end - stored.begin for stored in rows)
    index["metadata"] = {**index.get("metadata", {}), "total_size": total}
    _replace(path, index)


def _replace(path: Path, table: object) -> None:
    path.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n", encoding="utf-8")
