"""The template engine of all pages: the console's, reports and comparisons.

Text of other machines is escaped everywhere, and becomes one line. `charts.html` is the only
template that draws.
"""

from __future__ import annotations

import functools
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from isthmus import __version__
from isthmus.printable import in_a_line
from isthmus_server.read.report.report import format_metrics

_PACKAGE = "isthmus_server.read.pages"


@functools.cache
def templates(package: str = _PACKAGE) -> Environment:
    """The templates of a package and those that all pages share, made once.

    Filters: `digits` (a figure with at most four) and `metrics`.
    """
    packages = dict.fromkeys((package, _PACKAGE))
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(each) for each in packages]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_in_a_line,
    )
    environment.filters.update(digits=digits, metrics=format_metrics)
    environment.globals.update(version=__version__)
    return environment


def digits(value: float) -> str:
    """A figure with at most four digits.

    >>> digits(1234567.0), digits(0.25), digits(float("nan"))
    ('1.235e+06', '0.25', 'nan')
    """
    return f"{value:.4g}"


def _in_a_line(value: Any) -> Any:
    return in_a_line(value) if isinstance(value, str) and not isinstance(value, Markup) else value
