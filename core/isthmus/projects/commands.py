"""The command ``isthmus new``."""

from __future__ import annotations

import keyword
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import click

from isthmus.errors import UserError

KINDS = ("tabular", "image", "language", "chat", "flower")
_BEFORE = {"chat": "make_base.py"}
"""Scripts of projects that make what their first run needs."""


@click.command()
@click.argument("folder", metavar="NAME", type=click.Path(path_type=Path))
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    default="tabular",
    show_default=True,
    help="What the model learns from; chat: dialogues, by adapters of a language model; flower: a "
    "ClientApp of Flower trains.",
)
def new(folder: Path, kind: str) -> None:
    """Write a project in the new folder NAME: a task, a job that runs, and what to change next."""
    # A task is installed by the name of its folder, as a package of Python, which has no hyphens.
    name = folder.name.replace("-", "_")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UserError(
            f"{folder.name!r} cannot be the name of a project, which its task is installed by on "
            "devices; use letters, digits, _ and -, and begin with a letter"
        )
    if name != folder.name:
        click.echo(f"the project is named {name}: a package of Python has no hyphen in its name")
        folder = folder.with_name(name)
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise UserError(f"{folder} exists already; choose another name") from None
    for path in _write(files("isthmus.projects") / "templates" / kind, folder, name):
        click.echo(path)
    if kind in _BEFORE:
        click.echo(f"first: python {folder / _BEFORE[kind]}")
    click.echo(f"next: isthmus run {folder / 'job.toml'}")


def _write(template: Traversable, folder: Path, name: str) -> list[Path]:
    """Write the files of a template into a folder that is there; returns their paths."""
    written: list[Path] = []
    for source in sorted(template.iterdir(), key=lambda each: each.name):
        path = folder / source.name.removesuffix(".txt")
        if source.is_dir():
            path.mkdir()
            written += _write(source, path, name)
            continue
        text = source.read_text(encoding="utf-8").replace("PROJECT", name)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written
