"""The arguments of the commands that join a server with a token."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click


def token_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add them to a command, which is given the server's `url` and a checked `token`."""

    @functools.wraps(command)
    def with_token(token: str | None, token_file: str | None, **others: Any) -> Any:
        from isthmus.identity.joining import Token  # which only a command that joins needs

        return command(token=Token.given(token, token_file), **others)

    for option in (
        click.option(
            "--token-file",
            metavar="PATH",
            help="File with the token instead; - for standard input.",
        ),
        click.argument("token", required=False),
        click.argument("url", metavar="HOST:PORT"),
    ):
        with_token = option(with_token)
    return with_token
