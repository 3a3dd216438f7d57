"""Change one field of a transcript at a time, and write all chains anew, as its author could.

`python -m tests.server.read.transcript_fields FILE` prints the fields of which the verifier does
not notice it: they are the server's word.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isthmus_verify.chain import canonical
from isthmus_verify.check import check
from isthmus_verify.violation import Violation

Entries = list[tuple[str, dict[str, Any]]]
Place = tuple[str | int, ...]

_BEFORE_FIRST = "0" * 64
_NAMED = ("metrics", "norms", "models", "training", "groups", "datacenters", "gradients", "keep")
"""Objects whose keys are names, which say nothing about what is checked."""


def opened(data: bytes) -> Entries:
    """The entries, with the lines of the ledger as objects, and both without their chains."""
    entries = []
    for line in data.splitlines():
        table = json.loads(line)
        content = table["content"]
        if table["kind"] == "charge":
            content = json.loads(content["line"])
            del content["previous"]
        if table["kind"] == "round":
            content["ledger_head"] = content["ledger_head"].partition(":")[0]  # its number
        entries.append((table["kind"], content))
    return entries


def closed(entries: Entries) -> bytes:
    """The transcript of such entries, in which all hashes fit."""
    ledger = [_BEFORE_FIRST]
    before = _BEFORE_FIRST
    lines = []
    for number, (kind, opened_content) in enumerate(entries, 1):
        content = opened_content
        if kind == "charge":
            line = canonical({**content, "previous": ledger[-1]})
            ledger.append(hashlib.sha256(line).hexdigest())
            content = {"line": line.decode()}
        elif kind == "round" and str(content.get("ledger_head")).isdecimal():
            at = int(content["ledger_head"])
            digest = ledger[at] if at < len(ledger) else _BEFORE_FIRST
            content = {**content, "ledger_head": f"{at}:{digest}"}
        table = {"content": content, "kind": kind, "number": number}
        before = hashlib.sha256(bytes.fromhex(before) + canonical(table)).hexdigest()
        lines.append(canonical({**table, "hash": before}) + b"\n")
    return b"".join(lines)


def leaves(value: Any, at: Place = ()) -> Iterator[Place]:
    """The places of values in JSON data; also of objects and lists, which can have more or less."""
    yield at
    if isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(part, (*at, key))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from leaves(part, (*at, index))


def others(value: Any) -> list[Any]:
    """Values that could be there in its place."""
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, max(value - 1, 0)]
        case float():
            return [value * 2 + 1, value * 0.5]
        case str():
            digest = len(value) == 64 and not set(value) - set("0123456789abcdef")
            return [("0" if value[0] != "0" else "1") + value[1:]] if digest else [value + "x", ""]
        case list():
            return [value[:-1], [*value, *value[:1]]]
        case dict():
            fewer = [{key: each for key, each in value.items() if key != name} for name in value]
            return [{**value, "another": 1}, *fewer[:1]]
        case _:
            return [0.5]


def pattern(kind: str, at: Place) -> str:
    """The name of a field, the same for all entries of a kind and all items of a list."""
    parts = [kind]
    for before, part in zip(("", *at), at, strict=False):
        parts.append("*" if isinstance(part, int) or before in _NAMED else str(part))
    return ".".join(parts)


def servers_word(data: bytes) -> set[str]:
    """The fields that can be changed without that the verifier refuses, or says that less holds."""
    entries = opened(data)
    assert closed(entries) == data
    known = check(io.BytesIO(data)).holds
    tried = set[str]()
    found = set[str]()
    for number, (kind, content) in enumerate(entries):
        for at in leaves(content):
            name = pattern(kind, at)
            if not at or name in tried:
                continue
            tried.add(name)
            changed = copy.deepcopy(entries)
            inner = changed[number][1]
            for key in at[:-1]:
                inner = inner[key]
            for other in others(inner[at[-1]]):
                if other == inner[at[-1]] and type(other) is type(inner[at[-1]]):
                    continue
                before, inner[at[-1]] = inner[at[-1]], other
                if not _notices(closed(changed), known):
                    found.add(name)
                inner[at[-1]] = before
    return found


def _notices(data: bytes, known: list[str]) -> bool:
    try:
        return check(io.BytesIO(data)).holds != known
    except Violation:
        return True


if __name__ == "__main__":
    for name in sorted(servers_word(Path(sys.argv[1]).read_bytes())):
        print(name)
