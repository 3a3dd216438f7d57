"""Small JSON files, and files of any bytes, with a digest by which damage is noticed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isthmus.errors import DamagedError
from isthmus.system.private_files import write_private_file

_DIGEST = "sha256"
_MAX_BYTES = 1 << 20


def sealed_json(values: Mapping[str, Any]) -> bytes:
    """A JSON object with the SHA-256 of its other keys under `sha256`."""
    return json.dumps({**values, _DIGEST: _digest(values)}, indent=1).encode() + b"\n"


def write_sealed(path: Path, values: Mapping[str, Any]) -> None:
    """Write `sealed_json` atomically and durably, readable by the owner only (mode 0600)."""
    write_private_file(path, sealed_json(values))


def read_sealed(path: Path) -> dict[str, Any]:
    """The values of a file that `write_sealed` wrote, without the digest.

    Raises:
        DamagedError: its contents are not those that were written.
        OSError: it cannot be read; `FileNotFoundError` if there is none.
    """
    with path.open("rb") as file:
        values = unsealed_json(file.read(_MAX_BYTES))
    if values is None:
        raise _damaged(path)
    return values


def unsealed_json(data: bytes) -> dict[str, Any] | None:
    """The values of `sealed_json`, without the digest; None if it is not what was written."""
    try:
        values = json.loads(data.decode())
        del values[_DIGEST]
        intact = sealed_json(values) == data
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if not intact:
        return None
    assert isinstance(values, dict)
    return values


def write_sealed_bytes(path: Path, data: bytes) -> None:
    """Write the SHA-256 of `data` and then `data`, atomically, durably and with mode 0600."""
    write_private_file(path, hashlib.sha256(data).digest() + data)


def read_sealed_bytes(path: Path) -> bytes:
    """The contents of a file that `write_sealed_bytes` wrote; of any size.

    Raises:
        DamagedError: they are not those that were written.
        OSError: it cannot be read; `FileNotFoundError` if there is none.
    """
    written = path.read_bytes()
    size = hashlib.sha256().digest_size
    digest = written[:size]
    data = written[size:]
    if hashlib.sha256(data).digest() != digest:
        raise _damaged(path)
    return data


def _damaged(path: Path) -> DamagedError:
    return DamagedError(f"{path} is damaged: it is not what was written")


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
