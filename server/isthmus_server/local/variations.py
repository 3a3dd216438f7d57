"""Variations of a job: keys with several values each.

>>> lr = parse_variation("strategy.server_optimizer.options.lr=0.5,1.0")
>>> combinations([lr, parse_variation("strategy.merge=weighted,projected")])[1]
{'strategy.server_optimizer.options.lr': 0.5, 'strategy.merge': 'projected'}
"""

from __future__ import annotations

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

    Raises:
        JobError: it is not of this form, or has a value twice.
    """
    key, separator, listed = text.partition("=")
    key = key.strip()
    if not separator or not all(key.split(".")) or not listed.strip():
        raise JobError(f"--vary {text!r} is not of the form key.sub=value,value")
    try:
        values: list[Any] = tomllib.loads(f"values = [{listed}]")["values"]
    except tomllib.TOMLDecodeError:
        values = [word.strip() for word in listed.split(",") if word.strip()]
    if len({json.dumps(value, default=str) for value in values}) < len(values):
        raise JobError(f"--vary {text!r} has a value twice")
    return key, values


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
    """A value as it is shown: text as it is, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
