"""Durations in words."""

from __future__ import annotations

from isthmus.printable import below_a_second


def durations(*ends: float) -> tuple[list[str], str]:
    """Format durations in one unit, that of the longest.

    Returns:
        The numbers, and the unit.

    >>> durations(36.2, 25.0, 47.0), durations(3.0, 240.0), durations(60.0, 9000.0)
    ((['36', '25', '47'], 's'), (['0.05', '4'], 'min'), (['0.017', '2.5'], 'h'))
    >>> durations(1e-9, 240.0), durations(0.0004, 0.004)
    ((['0', '4'], 'min'), (['0.4', '4'], 'ms'))
    """
    longest = max(ends)
    if short := below_a_second(longest, digits=3):
        unit = short.rpartition(" ")[2]
    else:
        unit = "s" if longest < 120 else "min" if longest < 7200 else "h"
    size = {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}[unit]
    return [_two_digits(each / size) for each in ends], unit


def _two_digits(number: float) -> str:
    if number < 1e-3:
        return "0"
    return f"{number:.2g}" if number < 10 else f"{number:.0f}"


def duration(seconds: float) -> str:
    """Format a duration in words.

    >>> duration(0.25), duration(12), duration(3600 * 3 + 1200), duration(-1)
    ('0.25 s', '12 s', '3 h 20 min', '0 s')
    >>> duration(3.8e-05), duration(0.0042), duration(0.0999)
    ('38 µs', '4.2 ms', '99.9 ms')
    """
    if short := below_a_second(seconds, digits=3):
        return short
    minutes = seconds / 60
    hours = seconds / 3600
    if 0 < seconds < 10:
        return f"{seconds:.2g} s"
    if minutes < 2:
        return f"{max(seconds, 0):.0f} s"
    if hours < 2:
        return f"{minutes:.0f} min"
    whole, rest = divmod(round(minutes), 60)
    return f"{whole} h {rest} min" if rest else f"{whole} h"
