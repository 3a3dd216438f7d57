"""Whether opened sums combine to something about few devices, exactly, over a large prime field.

A row is what one element of an opened sum says: for each unknown, by how much it is multiplied. An
unknown is a pair of a device and what names its value; vectors that are equal because devices
compute them in the same way have one name. Values that a server knows are no unknowns: it
subtracts them.

>>> def row(*devices):
...     return {(device, "update"): Fraction(1) for device in devices}
>>> sorted(fewest_devices([row("a", "b", "c"), row("a", "b", "d")]))  # of their difference
['c', 'd']
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from fractions import Fraction

PRIME = 2**61 - 1

Unknown = tuple[str, Hashable]
"""A device, and the name of a value of it."""

Row = Mapping[Unknown, Fraction]


@dataclasses.dataclass(frozen=True)
class OpenedSum:
    """A sum that the server can unmask, without its corrupt devices."""

    about: str
    """What was asked, for a person."""
    devices: tuple[str, ...]
    rows: tuple[Row, ...]
    bound: int
    """Fewest honest devices that ADR 29 promises for a combination that begins with this sum."""

    def __str__(self) -> str:
        return f"{self.about} of {', '.join(self.devices)} (at least {self.bound} together)"


@dataclasses.dataclass(frozen=True)
class Finding:
    """Sums that combine to something about fewer honest devices than each promises."""

    devices: frozenset[str]
    sums: tuple[OpenedSum, ...]

    def __str__(self) -> str:
        sums = "\n".join(f"  {each}" for each in self.sums)
        return f"about {', '.join(sorted(self.devices))} alone:\n{sums}"


def findings(sums: Sequence[OpenedSum]) -> list[Finding]:
    """What the sums reveal together about too few devices, one finding for related sums."""
    found = []
    for related in _related(sums):
        rows = [row for each in related for row in each.rows]
        bound = min(each.bound for each in related)
        if (devices := fewest_devices(rows, bound)) is not None:
            found.append(Finding(devices, tuple(related)))
    return found


def _related(sums: Sequence[OpenedSum]) -> list[list[OpenedSum]]:
    """The sums in groups that have no unknown in common: nothing can be subtracted between them."""
    groups: list[tuple[set[Unknown], list[OpenedSum]]] = []
    for each in sums:
        unknowns = {unknown for row in each.rows for unknown in row}
        together = [each]
        others = []
        for known, members in groups:
            if known & unknowns:
                unknowns |= known
                together += members
            else:
                others.append((known, members))
        groups = [*others, (unknowns, together)]
    return [members for _, members in groups]


def fewest_devices(rows: Iterable[Row], bound: int | None = None) -> frozenset[str] | None:
    """The fewest devices that a linear combination of rows is about, which is not zero.

    None if these are at least `bound`.
    """
    distinct = [dict(row) for row in {frozenset(row.items()) for row in rows if row}]
    devices = sorted({device for row in distinct for device, _ in row})
    most = len(devices) if bound is None else min(bound - 1, len(devices))
    if not distinct or most < 1:
        return None
    if len(distinct) == 1:
        return frozenset(devices) if len(devices) <= most else None
    # What is about a set of devices is about any larger set: one look at the largest ones decides.
    if not any(_isolates(distinct, subset) for subset in itertools.combinations(devices, most)):
        return None
    return next(
        frozenset(subset)
        for count in range(1, most + 1)
        for subset in itertools.combinations(devices, count)
        if _isolates(distinct, subset)
    )


def _isolates(rows: Sequence[Row], subset: Iterable[str]) -> bool:
    """Whether a combination of rows is about devices of the subset alone, and is not zero."""
    inside = set(subset)
    others = [{u: x for u, x in row.items() if u[0] not in inside} for row in rows]
    return rank(others) < rank(rows)


def rank(rows: Iterable[Row]) -> int:
    """Rank of a matrix over the field of `PRIME` elements."""
    found: list[tuple[Unknown, dict[Unknown, int]]] = []
    for row in rows:
        left = {unknown: _in_field(value) for unknown, value in row.items()}
        for pivot, other in found:
            if factor := left.get(pivot, 0):
                for unknown, value in other.items():
                    left[unknown] = (left.get(unknown, 0) - factor * value) % PRIME
        pivot = next((unknown for unknown, value in left.items() if value), None)
        if pivot is not None:
            inverse = pow(left[pivot], -1, PRIME)
            found.append((pivot, {u: x * inverse % PRIME for u, x in left.items() if x}))
    return len(found)


def _in_field(value: Fraction) -> int:
    return value.numerator * pow(value.denominator, -1, PRIME) % PRIME
