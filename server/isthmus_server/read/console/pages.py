"""Render the console's pages from templates; text of other machines is escaped everywhere."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from isthmus.printable import counted
from isthmus.system.clocks import utc
from isthmus_server.read.pages.templates import templates

PAGE_ROWS = 25
"""Rows of a table on one page."""


@dataclasses.dataclass(frozen=True)
class Paging:
    """The rows of a table that are shown."""

    page: int
    """From 1."""
    total: int
    """Rows of all pages."""
    key: str
    """Parameter of an address that has the page."""
    size: int = PAGE_ROWS

    @property
    def pages(self) -> int:
        """Number of pages; at least 1."""
        return max(1, -(-self.total // self.size))

    @property
    def first(self) -> int:
        """Number of the first row, from 0."""
        return (min(self.page, self.pages) - 1) * self.size

    @property
    def last(self) -> int:
        """Number after that of the last row."""
        return min(self.first + self.size, self.total)


class Pages:
    """Renders templates."""

    def __init__(self) -> None:
        self._environment = templates("isthmus_server.read.console")
        self._environment.filters.update(
            figure=figure,
            when=_when,
            ago=_ago,
            span=_span,
            quoted=lambda text: quote(text, safe=""),
        )
        self._environment.globals.update(href=href, counted=counted)

    def render(self, name: str, **values: Any) -> str:
        """A page from the template with that name."""
        return self._environment.get_template(f"{name}.html").render(values)


def href(path: str, query: Mapping[str, str], **changes: str | int) -> str:
    """An address with changed parameters; those that are empty are left out."""
    merged = {**query, **{name: str(value) for name, value in changes.items()}}
    kept = {name: value for name, value in merged.items() if value and value != "1"}
    return f"{path}?{urlencode(kept)}" if kept else path


def figure(value: float | None) -> str:
    """A figure with at most four digits.

    >>> figure(12345.6), figure(0.25), figure(None)
    ('12,346', '0.25', '-')
    """
    if value is None:
        return "-"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def _when(timestamp: float | None) -> str:
    return utc(timestamp) if timestamp else "-"


def _ago(timestamp: float | None) -> str:
    return f"{_span(max(0.0, time.time() - timestamp))} ago" if timestamp else "never"


def _span(seconds: float) -> str:
    """A duration in its largest two units.

    >>> _span(5.25), _span(125), _span(7300), _span(200000)
    ('5.2 s', '2 min 5 s', '2 h 1 min', '2 d 7 h')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    for size, unit, smaller, name in (
        (60, "min", 1, "s"),
        (3600, "h", 60, "min"),
        (86400, "d", 3600, "h"),
    ):
        if seconds < size * (60 if size < 3600 else 24) or unit == "d":
            return f"{int(seconds // size)} {unit} {int(seconds % size // smaller)} {name}"
    raise AssertionError("days have no end")
