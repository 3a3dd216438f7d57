"""Generate the pages of the Python API and of the errors, and the fields of a receipt."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any, get_type_hints

import names
from generated import add_page, load, table
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

RECEIPT_MARK = "<!-- fields of a receipt -->"
"""Where the page of the report has the generated table."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the two pages."""
    add_page(config, files, "reference/api.md", api_page())
    add_page(config, files, "reference/errors.md", errors_page(load(names.ERRORS)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Put the fields of a receipt where the page of the report wants them."""
    if RECEIPT_MARK not in markdown:
        return markdown
    return markdown.replace(RECEIPT_MARK, "\n".join(fields(load(names.RECEIPT))))


def fields(kind: type) -> list[str]:
    """A table of a dataclass: each field with its type, default and docstring."""
    (definition,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)
    hints = get_type_hints(kind)
    rows = []
    following = [*definition.body[1:], None]
    for statement, after in zip(definition.body, following, strict=True):
        if not isinstance(statement, ast.AnnAssign):
            continue
        documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        name = ast.unparse(statement.target)
        rows.append(
            (
                f"`{name}`",
                f"`{type_name(hints[name])}`",
                ast.literal_eval(after.value) if documented else "",
            )
        )
    return table(("Key", "Type", "Meaning"), rows)


def type_name(hint: Any) -> str:
    """A type as a reader would write it."""
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def api_page() -> Iterator[str]:
    """The public names; mkdocstrings turns each directive into its documentation."""
    yield "# Python API\n"
    yield (
        "What programs may import. Other modules are internal: they are documented in the source, "
        "and [Where is it?](../where-is-it.md) leads to them.\n"
    )
    for title, (introduction, members) in names.API.items():
        yield f"## {title}\n\n{introduction}\n"
        for name in members:
            path, _, part = name.partition(":")
            yield f"::: {path}" + ("\n    options: {members: false}" if part else "") + "\n"


def errors_page(module: ModuleType) -> Iterator[str]:
    """The exception tree, and the codes of secure aggregation."""
    yield "# Errors\n"
    yield (
        f"Every error that Isthmus raises on purpose is in `{module.__name__}`. A `UserError` is "
        "shown to a person as its message, without a traceback: what was wrong, where, and what "
        "to do. The command then ends with exit code 1, or 75 if the cause may pass by itself, "
        "such as a full disk.\n"
    )
    classes = [
        each
        for _, each in inspect.getmembers(module, inspect.isclass)
        if each.__module__ == module.__name__
    ]
    roots = [each for each in classes if not set(each.__mro__[1:]) & set(classes)]
    yield "## The tree\n"
    for root in roots:
        yield from tree(root, classes, 0)
    yield ""
    yield "## Codes of secure aggregation\n"
    yield (
        "Each check of the protocol has a name, which the error carries as `code`. "
        "What the checks protect from is in the [threat model](../threat-model.md).\n"
    )
    refusals = load(names.REFUSALS)
    rows = [(f"`{code}`", f"`{error.__name__}`") for code, error in refusals.items()]
    yield from table(("Code", "Error"), rows)


def tree(error: type, classes: list[type], depth: int) -> Iterator[str]:
    """One class and those derived from it, as a nested list."""
    summary = inspect.getdoc(error) or ""
    also = [base.__name__ for base in error.__bases__ if base not in classes and depth]
    note = f" (also a `{also[0]}`)" if also else ""
    yield f"{'    ' * depth}- `{error.__name__}`{note}: {summary.partition(chr(10) * 2)[0]}"
    for each in classes:
        if error in each.__bases__:
            yield from tree(each, classes, depth + 1)
