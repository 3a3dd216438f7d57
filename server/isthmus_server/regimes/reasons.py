"""Reasons that several participants give, each said once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from isthmus_server.storage.records import Receipt

UNREACHABLE = "the quorum could not be reached any more"
"""Reason in the receipts of participants that were stopped because too many others had failed."""

_NAMED = 3
"""Participants that are named for one reason."""


def anonymous(reason: str, name: str) -> str:
    """A reason without the name of the participant that gave it."""
    return re.sub(rf"\b{re.escape(name)}\b", "", reason)


def group_reasons(reasons: Mapping[str, str]) -> list[tuple[str, str]]:
    """Each reason once, after the names of up to three participants that gave it.

    Reasons that differ only by the participant's own name, as in the path of its log, are one.

    >>> group_reasons({"a": "a.log says why", "b": "b.log says why", "c": "no data"})
    [('a, b', 'a.log says why'), ('c', 'no data')]
    """
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in sorted(reasons.items()):
        names_by_reason.setdefault(anonymous(reason, name), []).append(name)
    return [
        (
            ", ".join(names[:_NAMED])
            + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""),
            reasons[names[0]],
        )
        for names in names_by_reason.values()
    ]


def summarize_failures(receipts: Iterable[Receipt]) -> str:
    """The reasons of up to three participants; those stopped because of others come last."""
    failed = [receipt for receipt in receipts if receipt.reason]
    stopped = {
        f"{receipt.participant}: {receipt.reason}": receipt.reason == UNREACHABLE
        for receipt in failed
    }
    return "; ".join(sorted(stopped, key=lambda line: (stopped[line], line))[:3])
