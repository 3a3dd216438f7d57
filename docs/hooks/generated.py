"""What the page generators share: loading a name, adding a page, cells of a Markdown table."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def load(name: str) -> Any:
    """The object that `module:attribute` names, or a module without an attribute."""
    module, _, attribute = name.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, attribute) if attribute else loaded


def add_page(config: MkDocsConfig, files: Files, path: str, lines: Iterable[str]) -> None:
    """Add a page that no file in docs/ holds."""
    files.append(File.generated(config, path, content="\n".join(lines) + "\n"))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table and the blank line after it."""
    lines = [_row(header), _row(["---"] * len(header))]
    return [*lines, *(_row(row) for row in rows), ""]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_escaped(' '.join(cell.split())) for cell in cells)} |"


def _escaped(text: str) -> str:
    """Text in which a bar does not end the cell; inside of code none does."""
    parts = text.split("`")
    return "`".join(
        part if number % 2 else part.replace("|", "\\|") for number, part in enumerate(parts)
    )
