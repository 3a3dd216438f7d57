"""Durations as options of commands give them."""

from __future__ import annotations

import re

from isthmus.errors import UserError

_UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds_of(text: str, option: str) -> float:
    """The seconds of a text such as 30m, 24h or 7d.

    >>> seconds_of("2h", "--expires")
    7200.0

    Raises:
        UserError: it is something else; `option` is named.
    """
    match = re.fullmatch(r"(\d{1,4})([mhd])", text)
    if match is None or int(match[1]) == 0:
        raise UserError(f"{option} {text!r} is not a time such as 30m, 24h or 7d")
    return int(match[1]) * _UNITS[match[2]]
