"""The one exception of the verifier."""

from __future__ import annotations

_SHOWN = 100


class Violation(Exception):
    """Something in a transcript does not hold; its text is one sentence for the user."""


def shown(value: object) -> str:
    """A value of a transcript in one short line: nothing in it reaches the terminal as it is."""
    text = ascii(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
