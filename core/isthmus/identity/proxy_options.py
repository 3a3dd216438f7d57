"""The options about the road to a server, of all commands that connect to one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from isthmus.identity.proxies import ProxyChoice

NAMES = "--proxy, --proxy-login and --balancer-ca"
"""The options, for messages."""

_FILE = click.Path(dir_okay=False, path_type=Path)


def proxy_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command, which is given what they say as `proxy`."""

    @functools.wraps(command)
    def with_choice(
        proxy: str | None, proxy_login: Path | None, balancer_ca: Path | None, **others: Any
    ) -> Any:
        return command(proxy=ProxyChoice.given(proxy, proxy_login, balancer_ca), **others)

    for option in (
        click.option(
            "--balancer-ca",
            metavar="FILE",
            type=_FILE,
            help="File with the certificates (PEM) of the authorities that a balancer's may be "
            "of, for an address with wss://. Default: the one given to join, else this machine's.",
        ),
        click.option(
            "--proxy-login",
            metavar="FILE",
            type=_FILE,
            help="File of mode 0600 with USER:PASSWORD for the proxy.",
        ),
        click.option(
            "--proxy",
            metavar="URL",
            help="HTTP proxy to connect through, such as http://proxy:3128, or none. Default: the "
            "one given to join, else HTTPS_PROXY and NO_PROXY.",
        ),
    ):
        with_choice = option(with_choice)
    return with_choice
