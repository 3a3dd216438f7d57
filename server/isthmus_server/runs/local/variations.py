"""Variations of a job: keys with several values each.

>>> lr = parse_variation("strategy.server_optimizer.options.lr=0.5,1.0")
>>> combinations([lr, parse_variation("strategy.merge=weighted,projected")])[1]
{'strategy.server_optimizer.options.lr': 0.5, 'strategy.merge': 'projected'}
"""

from __future__ import annotations

import datetime
import itertools
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from isthmus.errors import JobError

Variation = tuple[str, Sequence[Any]]
"""A key of the job, such as `federated.local_epochs`, and its values."""

MAX_COMBINATIONS = 1000
"""More than anyone waits for: a mistake."""


def parse_variation(text: str) -> Variation:
    """Read `key.sub=value,value`: TOML values, or bare words.

    >>> parse_variation("federated.local_epochs=1,2")
    ('federated.local_epochs', [1, 2])
    >>> parse_variation('task.settings.text="a,b",c')
    ('task.settings.text', ['a,b', 'c'])

    Raises:
        JobError: it is not of this form, or has a value twice.
    """
    key, separator, listed = text.partition("=")
    key = key.strip()
    if not separator or not all(key.split(".")) or not listed.strip():
        raise JobError(f"--vary {text!r} is not of the form key.sub=value,value")
    try:
        values = [_value(word) for word in _words(listed)]
    except ValueError as error:
        raise JobError(f"--vary {text!r} has {error}") from None
    if len(set(map(value_text, values))) < len(values):
        raise JobError(f"--vary {text!r} has a value twice")
    return key, values


def _words(listed: str) -> list[str]:
    """Split at the commas that are outside quotes and brackets.

    Raises:
        ValueError: what is wrong, as a noun.
    """
    words = [""]
    quote = ""
    depth = 0
    escaped = False
    for character in listed:
        if quote:
            if character == quote and not escaped:
                quote = ""
            escaped = character == "\\" and quote == '"' and not escaped
        elif character in "\"'" and (depth or not words[-1].strip()):
            quote = character  # within a bare word it is an apostrophe
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        elif character == "," and depth <= 0:
            words.append("")
            continue
        words[-1] += character
    if quote or depth > 0:
        raise ValueError("a quote or a bracket that is not closed")
    return [word.strip() for word in words]


def _value(word: str) -> Any:
    """A TOML value, or a bare word.

    Raises:
        ValueError: what is wrong, as a noun.
    """
    if not word:
        raise ValueError('an empty value; an empty text is ""')
    try:
        return tomllib.loads(f"value = {word}")["value"]
    except tomllib.TOMLDecodeError:
        if word[0].isdigit() or word[0] in ".+-\"'[{":
            raise ValueError(f"{word!r}, which is no TOML value; put a text in quotes") from None
        return word


def combinations(variations: Iterable[Variation]) -> list[dict[str, Any]]:
    """All combinations of the values, as changes for `with_changes`; the last key varies fastest.

    Raises:
        JobError: a key is varied twice or with the table that has it, or combinations are too many.
    """
    keys, values = zip(*variations, strict=True) if (variations := list(variations)) else ((), ())
    if len(set(keys)) < len(keys):
        raise JobError(f"--vary has a key twice: {', '.join(keys)}")
    for table, key in itertools.permutations(keys, 2):
        if key.startswith(f"{table}."):
            raise JobError(f"--vary {table} replaces all of the table that has {key}; vary one")
    chosen = list(itertools.islice(itertools.product(*values), MAX_COMBINATIONS + 1))
    if len(chosen) > MAX_COMBINATIONS:
        raise JobError(f"--vary has more than {MAX_COMBINATIONS} combinations; vary fewer keys")
    return [dict(zip(keys, each, strict=True)) for each in chosen]


def in_words(changes: Mapping[str, Any]) -> str:
    """Changes on one line: the policy by its name alone, other keys with their values."""
    return " ".join(
        str(value) if key == "strategy.policy" else f"{key}={value_text(value)}"
        for key, value in changes.items()
    )


def value_text(value: Any) -> str:
    """A value as it is shown, and as `--vary` takes it: text in quotes only where it has to be.

    >>> [value_text(value) for value in (1, "1", "word", True, "a,b")]
    ['1', '"1"', 'word', 'true', '"a,b"']
    """
    if not isinstance(value, str):
        is_time = isinstance(value, datetime.date | datetime.time)  # TOML has no quotes there
        return str(value) if is_time else json.dumps(value, default=str)
    try:
        is_bare = [_value(word) for word in _words(value)] == [value]
    except ValueError:
        is_bare = False
    return value if is_bare else json.dumps(value, ensure_ascii=False)
