"""Typed access to JSON data that may be anything."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from isthmus_verify.violation import Violation, shown

LARGEST = 1 << 63
"""Counts, sizes and numbers of rounds are below it."""


class Fields:
    """One JSON object, and where it is, for sentences."""

    def __init__(self, value: Any, where: str) -> None:
        """Take a value.

        Raises:
            Violation: it is no object.
        """
        if not isinstance(value, dict):
            raise Violation(f"{where} is not an object")
        self.where = where
        self.values: dict[str, Any] = value

    def get(self, key: str) -> Any:
        """Any value.

        Raises:
            Violation: there is none.
        """
        if key not in self.values:
            raise Violation(f"{self.where} has no {key!r}")
        return self.values[key]

    def only(self, *keys: str) -> None:
        """Refuse other keys than these, which would be facts that nothing checks.

        Raises:
            Violation: there is another one, or one is missing.
        """
        for key in keys:
            self.get(key)
        if more := self.values.keys() - set(keys):
            raise Violation(f"{self.where} has {shown(min(more))}, which is not known")

    def text(self, key: str) -> str:
        """A text."""
        value = self.get(key)
        if not isinstance(value, str):
            raise self._wrong(key, "a text")
        return value

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self.get(key)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def count(self, key: str) -> int:
        """A whole number from 0."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < LARGEST:
            raise self._wrong(key, "a count")
        return value

    def number(self, key: str) -> float:
        """A finite number."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number")
        if isinstance(value, int) and abs(value) >= LARGEST:
            raise self._wrong(key, "a number of this size")
        if not math.isfinite(value):
            raise self._wrong(key, "a finite number")
        return float(value)

    def digest(self, key: str) -> str:
        """A SHA-256 in hexadecimal."""
        return as_digest(self.text(key), f"{key!r} of {self.where}")

    def table(self, key: str) -> Fields:
        """An object."""
        return Fields(self.get(key), f"{key!r} of {self.where}")

    def optional(self, key: str) -> Fields | None:
        """An object, or nothing."""
        return None if self.get(key) is None else self.table(key)

    def texts(self, key: str) -> list[str]:
        """A list of different texts."""
        value = self.get(key)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._wrong(key, "a list of texts")
        if len(set(value)) != len(value):
            raise Violation(f"{key!r} of {self.where} has a text twice")
        return list(value)

    def tables(self, key: str) -> Iterator[Fields]:
        """A list of objects."""
        value = self.get(key)
        if not isinstance(value, list):
            raise self._wrong(key, "a list")
        for number, each in enumerate(value, 1):
            yield Fields(each, f"{key!r} {number} of {self.where}")

    def digests(self, key: str) -> dict[str, str]:
        """An object with digests."""
        table = self.table(key)
        return {name: table.digest(name) for name in table.values}

    def has(self, key: str) -> bool:
        """Whether there is a value other than null."""
        return self.values.get(key) is not None

    def _wrong(self, key: str, what: str) -> Violation:
        return Violation(f"{key!r} of {self.where} is {shown(self.values[key])}, not {what}")


def as_digest(text: str, what: str) -> str:
    """The text, if it is a SHA-256 in lower-case hexadecimal.

    Raises:
        Violation: it is none.
    """
    if len(text) != 64 or set(text) - set("0123456789abcdef"):
        raise Violation(f"{what} is {shown(text)}, not a SHA-256 in hexadecimal")
    return text
