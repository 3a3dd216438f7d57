"""Generate the command-line reference from the click commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import names
from generated import add_page, load, table
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page."""
    add_page(config, files, "reference/cli.md", page(load(names.COMMAND)))
    return files


def page(command: click.Command) -> Iterator[str]:
    """All commands, each with its arguments and options."""
    yield "# Command line\n"
    yield (
        "Generated from the commands themselves; `isthmus COMMAND --help` prints the same. "
        "Exit codes: 0 success, 1 an error that is reported in one sentence, 2 a command line "
        "that cannot be parsed, 130 interrupted.\n"
    )
    yield from commands(command, click.Context(command, info_name=command.name))


def commands(command: click.Command, context: click.Context) -> Iterator[str]:
    """One command, and those below it."""
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None, name
            yield from commands(inner, click.Context(inner, info_name=name, parent=context))
        return
    yield f"## `{context.command_path}`\n"
    yield f"{paragraphs(command.help or '')}\n"
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    yield f"```\n{usage}\n```\n"
    options = [each for each in command.params if isinstance(each, click.Option)]
    rows = [option(each, context) for each in options if not each.hidden]
    if rows:
        yield from table(("Option", "Meaning"), rows)


def option(parameter: click.Option, context: click.Context) -> tuple[str, str]:
    """How an option is written, and its help."""
    names_ = ", ".join([*parameter.opts, *parameter.secondary_opts])
    value = "" if parameter.is_flag else f" {parameter.make_metavar(context)}"
    notes = []
    if parameter.required:
        notes.append("Required.")
    if parameter.multiple and "may be repeated" not in (parameter.help or ""):
        notes.append("May be given several times.")
    default = parameter.default
    if isinstance(default, str | int | float | Path) and not parameter.is_flag:
        notes.append(f"Default: `{default}`.")
    return f"`{names_}{value}`", " ".join([parameter.help or "", *notes]).strip()


def paragraphs(text: str) -> str:
    """Help text as Markdown: paragraphs, without click's marks."""
    return text.replace("\b", "").strip()
