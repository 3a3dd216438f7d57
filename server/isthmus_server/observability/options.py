"""The command line options of observability, without importing what they turn on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar, get_args

import click

_F = TypeVar("_F", bound=Callable[..., Any])

LogFormat = Literal["text", "json"]
"""What is written on standard output: text for people, or JSON lines."""


def observed(command: _F) -> _F:
    """Add the options `--log-format`, `--quiet`, `--metrics` and `--track` to a command."""
    options: Iterable[Callable[[_F], _F]] = (
        click.option(
            "--log-format",
            type=click.Choice(get_args(LogFormat)),
            default="text",
            show_default=True,
            help="json: one JSON object per event and log record, on standard output.",
        ),
        click.option("--quiet", is_flag=True, help="Print only warnings and errors."),
        click.option(
            "--metrics",
            metavar="HOST:PORT",
            help="Where to serve /metrics (Prometheus), /healthz and /readyz. Default: nowhere.",
        ),
        click.option(
            "--track",
            multiple=True,
            metavar="NAME[=TARGET]",
            help="Log rounds to tensorboard, mlflow[=URI], wandb[=PROJECT], otel[=URL] or another "
            "tracker that is installed.",
        ),
    )
    for option in options:
        command = option(command)
    return command
