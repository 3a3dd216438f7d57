"""The elements of an update that compression sends in every round.

>>> shapes = {"blocks.0.norm": (4,), "blocks.1.norm": (4,), "scores": (9,), "table": (2, 3)}
>>> always_sent(TensorLayout.from_shapes(shapes), ["*norm", "table"])
((0, 8), (17, 23))
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from isthmus.errors import JobError
from isthmus.tensors.exchange_set import TensorLayout, matches

MAX_RANGES = 4096
"""Most ranges: they are sent to each device in each round, with 16 bytes each."""

_KEY = "federated.compression.always"


def always_sent(exchanged: TensorLayout, patterns: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """First elements of the matching parameters in the vector, and those after their last ones.

    Neighbouring parameters are one range. Running statistics may match, and are in none.

    Args:
        exchanged: the exchange set.
        patterns: of `fnmatch`, for names.

    Raises:
        JobError: a pattern matches nothing, or the tensors are too many ranges.
    """
    return _always_sent(exchanged, tuple(patterns))


def check_compression(exchanged: TensorLayout, patterns: Sequence[str], buffers: str) -> None:
    """Refuse to compress the updates of an exchange set in which running statistics are averaged.

    Devices move them to a target in each round, so that what was left of one round would be sent
    twice, and a variance could become negative.

    Args:
        exchanged: the exchange set.
        patterns: see `always_sent`.
        buffers: the job's `exchange.buffers`.

    Raises:
        JobError: see above and `always_sent`.
    """
    if exchanged.statistics and buffers == "average":
        raise JobError(
            "federated.compression cannot send the running statistics of normalisation layers, "
            f"such as {exchanged.statistics[0]!r}; set exchange.buffers to 'local', 'recompute' or "
            "'frozen', or remove the compression"
        )
    always_sent(exchanged, patterns)


@functools.lru_cache(maxsize=4)
def _always_sent(exchanged: TensorLayout, patterns: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in exchanged.names):
            names = exchanged.names
            shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            raise JobError(
                f"{_KEY}: {pattern!r} matches no exchanged tensor; correct or remove it. These are "
                f"exchanged: {shown}"
            )
    ranges: list[tuple[int, int]] = []
    for entry in exchanged.entries:
        if entry.statistic or not entry.count or not matches(entry.name, patterns):
            continue
        start, end = entry.offset, entry.offset + entry.count
        if ranges and ranges[-1][1] == start:
            start = ranges.pop()[0]
        ranges.append((start, end))
    if len(ranges) > MAX_RANGES:
        raise JobError(
            f"{_KEY} matches tensors in {len(ranges)} places of the update, and the maximum is "
            f"{MAX_RANGES}; use patterns of fewer tensors"
        )
    return tuple(ranges)
