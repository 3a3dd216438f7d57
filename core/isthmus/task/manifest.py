"""The manifest of a task package: its name, version, author, and the digest of each file.

>>> Manifest.parse(b'{"format": 2, "format": 2}')
Traceback (most recent call last):
    ...
ValueError: its manifest has the key 'format' twice
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAX_VERSION = 1 << 53

_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class PackedFile(BaseModel):
    """One file of a package."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    size: Annotated[int, Field(ge=0)]
    sha256: _Digest


class Manifest(BaseModel):
    """The signed content of a package."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    format: Literal[2] = 2
    """Version of the manifest's own format."""
    version: Annotated[int, Field(ge=1, le=MAX_VERSION)]
    """Only increases, for each author and name."""
    name: str
    author: _Digest
    """Ed25519 public key."""
    files: dict[str, PackedFile]
    """By path, with / as the separator."""

    def to_bytes(self) -> bytes:
        """The bytes that are signed."""
        return json.dumps(self.model_dump(), indent=1, sort_keys=True).encode()

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Read a manifest.

        Raises:
            ValueError: it is malformed; the message is one line.
        """
        try:
            return cls.model_validate(json.loads(data, object_pairs_hook=_without_repetition))
        except RecursionError:
            raise ValueError("its manifest is nested too deeply") from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(repr(part)[1:-1][:100] for part in map(str, first["loc"]))
            raise ValueError(f"its manifest has an invalid {where or 'form'}") from None
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise ValueError("its manifest is not JSON") from None


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"its manifest has the key {twice[:100]!r} twice")
    return table
