"""Durations in words."""

from __future__ import annotations

from isthmus.printable import below_a_second


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
