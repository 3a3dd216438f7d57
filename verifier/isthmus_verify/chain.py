"""The chain of hashes of a transcript.

A transcript has one entry in each line: a JSON object with `number`, `kind`, `content` and `hash`,
in its canonical form (keys sorted, no spaces, ASCII), so that no entry has two forms. The hash is
the SHA-256 of the hash of the entry before, 32 bytes, and of the canonical form of the other three.
That of the last entry is the *head*.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from isthmus_verify.fields import Fields
from isthmus_verify.violation import Violation

MAX_LINE = 16 << 20
"""Bytes of an entry: a signed sum of the largest cohort has half of them."""

BEFORE_FIRST = "0" * 64


@dataclasses.dataclass(frozen=True)
class Entry:
    """One entry, which follows the one before."""

    number: int
    """From 1."""
    kind: str
    content: Fields
    hash: str


def canonical(value: Any) -> bytes:
    """The canonical form of JSON data.

    Raises:
        ValueError: it has a number that is not finite.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode()


def entries(file: BinaryIO) -> Iterator[Entry]:
    """The entries of a transcript, each with its place in the chain checked; one is in memory.

    Raises:
        Violation: one of them was changed, moved or cut short.
    """
    before = BEFORE_FIRST
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise Violation(f"entry {number} has more than {MAX_LINE} bytes")
        if not line.endswith(b"\n"):
            raise Violation(f"the transcript was cut short within entry {number}")
        entry = _entry(line[:-1], number, before)
        before = entry.hash
        yield entry


def _entry(line: bytes, number: int, before: str) -> Entry:
    where = f"entry {number}"
    table = parsed(line, where)
    fields = Fields(table, where)
    fields.only("content", "hash", "kind", "number")
    if fields.count("number") != number:
        raise Violation(
            f"{where} says that it is entry {fields.count('number')}: an entry was removed, "
            "repeated "
            "or moved"
        )
    stated = fields.digest("hash")
    del table["hash"]
    found = hashlib.sha256(bytes.fromhex(before) + canonical(table)).hexdigest()
    if found != stated:
        raise Violation(f"{where}, or one before it, was changed: its hash does not fit the chain")
    kind = fields.text("kind")
    return Entry(number, kind, Fields(fields.get("content"), f"the {kind!a} of {where}"), stated)


def parsed(line: bytes, where: str) -> dict[str, Any]:
    """The object that a line has in its canonical form.

    Raises:
        Violation: it has none.
    """
    try:
        value = json.loads(line)
        same = canonical(value) == line
    # In this order of likelihood: text that is no JSON, numbers of too many digits or not finite;
    # objects that are nested too deeply for the parser.
    except (ValueError, RecursionError):
        same = False
    if not same or not isinstance(value, dict):
        raise Violation(f"{where} is not a JSON object in its canonical form")
    return value
