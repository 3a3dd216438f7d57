"""The options `--proxy` and `--proxy-login` of all commands that connect to a server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


def proxy_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add both options to a command."""
    for option in (
        click.option(
            "--proxy-login",
            metavar="FILE",
            type=click.Path(dir_okay=False, path_type=Path),
            help="File of mode 0600 with USER:PASSWORD for the proxy.",
        ),
        click.option(
            "--proxy",
            metavar="URL",
            help="HTTP proxy to connect through, such as http://proxy:3128, or none. Default: the "
            "one given to join, else HTTPS_PROXY and NO_PROXY.",
        ),
    ):
        command = option(command)
    return command
