r"""Escape text from elsewhere before it reaches a terminal, a log or a record.

Control characters could move the cursor or forge lines of a log, and bidirectional overrides change
the order in which a line is read. Names, reasons and notes of another machine, and gRPC's details
of an error, pass through `in_a_line`.

>>> print(in_a_line("no\nbattery \x1b[2J \u202egnp"))
no\nbattery \x1b[2J \u202egnp
"""

from __future__ import annotations

import logging

MAX_LINE = 1000
"""Characters of a text that are kept."""


def in_a_line(text: str) -> str:
    """The text in one bounded line: whatever is not printable is escaped as in Python."""
    line = "".join(map(_escaped, text[:MAX_LINE])).strip()
    return line if len(text) <= MAX_LINE else f"{line}..."


def counted(number: int, noun: str) -> str:
    """A number with its noun, which ends with s unless there is one.

    >>> counted(1, "device"), counted(2, "device")
    ('1 device', '2 devices')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def below_a_second(seconds: float, digits: int) -> str:
    """Less than a tenth of a second in ms or µs, with so many digits; empty for any other time.

    >>> below_a_second(3.8e-05, 3), below_a_second(0.0999, 3), below_a_second(0.1, 3)
    ('38 µs', '99.9 ms', '')
    """
    for unit, factor in (("µs", 1e6), ("ms", 1e3)):
        if 0 < seconds < 100 / factor:
            return f"{seconds * factor:.{digits}g} {unit}"
    return ""


def in_lines(text: str) -> str:
    """The text with its line ends, and whatever else is not printable escaped."""
    return "".join(char if char == "\n" else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    return char if char.isprintable() else char.encode("unicode_escape").decode()


class PrintableFormatter(logging.Formatter):
    """Formats log records of which no message has more than one line; tracebacks keep theirs."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - of logging
        """The line of a record."""
        return in_lines(super().formatMessage(record).replace("\n", "\\n"))

    def format(self, record: logging.LogRecord) -> str:
        """The line, and the traceback of an exception."""
        return in_lines(super().format(record))
