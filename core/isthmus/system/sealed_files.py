"""Small JSON files with a digest of their own contents, so that damage is noticed."""

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
        data = file.read(_MAX_BYTES)
    try:
        values = json.loads(data.decode())
        del values[_DIGEST]
        intact = sealed_json(values) == data
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        intact = False
    if not intact:
        raise DamagedError(f"{path} is damaged: it is not what was written")
    assert isinstance(values, dict)
    return values


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
