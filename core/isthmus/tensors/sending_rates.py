"""Which parameters of an update compression sends more often, or less, than others.

>>> shapes = {"blocks.0.norm": (4,), "blocks.1.norm": (4,), "scores": (9,), "table": (2, 3)}
>>> sending_rates(TensorLayout.from_shapes(shapes), {"*norm": 1, "table": 2})
((0, 8, 1), (17, 23, 2))
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from isthmus.errors import JobError
from isthmus.tensors.exchange_set import TensorLayout, about_brackets, matches

MAX_RANGES = 4096
"""Most ranges: they are sent to each device in each round, with 24 bytes each."""

_KEY = "federated.compression.one_in_of"


def sending_rates(
    exchanged: TensorLayout, one_in_of: Mapping[str, int]
) -> tuple[tuple[int, int, int], ...]:
    """Ranges of the vector in which one of another number of neighbours is sent in a round.

    Neighbouring parameters with the same number are one range. Running statistics may match, and
    are in none.

    Args:
        exchanged: the exchange set.
        one_in_of: the job's numbers by patterns of `fnmatch`, for names. If several match, the
            smallest number counts.

    Returns:
        The first element, the one after the last, and the number, of each range, ascending.

    Raises:
        JobError: a pattern matches nothing, or the tensors are too many ranges.
    """
    return _sending_rates(exchanged, tuple(one_in_of.items()))


def check_compression(exchanged: TensorLayout, one_in_of: Mapping[str, int], buffers: str) -> None:
    """Refuse to compress the updates of an exchange set in which running statistics are averaged.

    Devices move them to a target in each round, so that what was left of one round would be sent
    twice, and a variance could become negative.

    Args:
        exchanged: the exchange set.
        one_in_of: see `sending_rates`.
        buffers: the job's `exchange.buffers`.

    Raises:
        JobError: see above and `sending_rates`.
    """
    if exchanged.statistics and buffers == "average":
        raise JobError(
            "federated.compression cannot send the running statistics of normalisation layers, "
            f"such as {exchanged.statistics[0]!r}; set exchange.buffers to 'frozen', to 'local' "
            "(without a datacenter) or to 'recompute' (with one), or remove the compression"
        )
    sending_rates(exchanged, one_in_of)


@functools.lru_cache(maxsize=4)
def _sending_rates(
    exchanged: TensorLayout, one_in_of: tuple[tuple[str, int], ...]
) -> tuple[tuple[int, int, int], ...]:
    for pattern, _ in one_in_of:
        if not any(matches(name, [pattern]) for name in exchanged.names):
            names = exchanged.names
            shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            raise JobError(
                f"{_KEY}: {pattern!r} matches no exchanged tensor; correct or remove it"
                f"{about_brackets(pattern)}. These are exchanged: {shown}"
            )
    ranges: list[tuple[int, int, int]] = []
    for entry in exchanged.entries:
        numbers = [number for pattern, number in one_in_of if matches(entry.name, [pattern])]
        if entry.statistic or not entry.count or not numbers:
            continue
        start = entry.offset
        end = entry.offset + entry.count
        number = min(numbers)
        if ranges and ranges[-1][1:] == (start, number):
            start = ranges.pop()[0]
        ranges.append((start, end, number))
    if len(ranges) > MAX_RANGES:
        raise JobError(
            f"{_KEY} matches tensors in {len(ranges)} places of the update, and the maximum is "
            f"{MAX_RANGES}; use patterns of fewer tensors"
        )
    return tuple(ranges)
