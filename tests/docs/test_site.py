"""The documentation site is complete: pages, links, and what is generated from the code.

`make docs` builds the site, in which a broken link is an error; this is what can be known without.
"""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
import yaml

from isthmus import cli
from isthmus.job import job_schema

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
WRITTEN = [
    *ROOT.glob("*.md"),
    *ROOT.glob("examples/*/*.md"),
    *(path for path in DOCS.rglob("*.md")),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILLED_BY_A_HOOK = {"Decisions", "Examples", "Project"}


def generated() -> set[str]:
    """Pages that the hooks add."""
    text = "".join(path.read_text() for path in DOCS.glob("hooks/*.py"))
    return set(re.findall(r'add_page\(config, files, "(.*?)"', text))


def pages(entries: list[Any]) -> Iterator[str]:
    """All pages in a part of the navigation."""
    for entry in entries:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        yield from pages(value) if isinstance(value, list) else [value]


def anchors(path: Path) -> set[str]:
    """The names by which the headings of a page can be linked to."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of docs/hooks as MkDocs does."""
    monkeypatch.syspath_prepend(str(DOCS / "hooks"))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def test_every_page_is_in_the_navigation() -> None:
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    listed = list(pages(SITE["nav"]))
    assert len(listed) == len(set(listed))
    decisions = {name for name in written if name.startswith("decisions/")}
    assert set(listed) == (written - decisions) | generated()
    empty = {title for entry in SITE["nav"] for title, value in entry.items() if not value}
    assert empty == FILLED_BY_A_HOOK


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_internal_link_of_a_page_resolves(path: Path) -> None:
    broken = []
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in LINK.findall(text):
        file, _, anchor = target.partition("#")
        if ":" in file:
            continue
        place = (path.parent / file).resolve() if file else path
        inside = place.is_relative_to(DOCS) and place.relative_to(DOCS).as_posix() in generated()
        if inside:
            continue
        if not place.exists() or (anchor and anchor not in anchors(place)):
            broken.append(target)
    assert broken == []


def test_the_site_fetches_nothing() -> None:
    assert SITE["theme"]["font"] is False
    assert not {"extra_css", "extra_javascript", "extra"} & SITE.keys()
    plugins = {next(iter(each)) if isinstance(each, dict) else each for each in SITE["plugins"]}
    assert plugins == {"search", "mkdocstrings"}
    for diagram in DOCS.rglob("*.svg"):
        assert not re.search(r"<script|href=|url\(['\"]?http", diagram.read_text()), diagram.name


def test_the_job_page_has_every_key(hook: Any) -> None:
    schema = job_schema()
    page = "\n".join(hook("job_keys").job_page(schema))
    found = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    tables = set(re.findall(r"^## `\[([\w.]+)\]`", page, re.MULTILINE))
    found |= {name.rpartition(".")[2] for name in tables}
    models = [schema, *(each for each in schema["$defs"].values() if "properties" in each)]
    assert {key for model in models for key in model["properties"]} == found
    assert "| `lease_seconds` | number, above 0 | `10.0` |" in page


def test_the_command_line_page_has_every_command_and_option(hook: Any) -> None:
    page = "\n".join(hook("command_line").page(cli.isthmus))

    def check(command: click.Command, path: str) -> None:
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                inner = command.get_command(context, name)
                assert inner is not None
                check(inner, f"{path} {name}")
            return
        section = page.partition(f"## `{path}`")[2].partition("\n## ")[0]
        assert section, path
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.opts[-1] in section, (path, parameter.name)

    check(cli.isthmus, "isthmus")


def test_the_page_of_policies_has_the_settings_of_each(hook: Any) -> None:
    page = "\n".join(hook("job_keys").policies_page())
    assert page.count("\n## ") == 11
    for policy, setting in (("plateau", "patience"), ("adaptive", "transfer_part")):
        assert f"`{setting}`" in page.partition(f"## `{policy}`")[2].partition("\n## ")[0]
    assert page.count("No settings.") == 6


def test_links_out_of_the_site_are_pointed_into_it(hook: Any) -> None:
    rewrite = hook("repository_pages").rewrite
    assert rewrite("[task](../examples/digits/task.py)", "tasks.md") == (
        "[task](examples/digits/task.py.md)"
    )
    assert rewrite("[words](docs/words.md#x)", "project/contributing.md") == (
        "[words](../words.md#x)"
    )
    assert rewrite("[here](edge.md) [there](https://a.b/c)", "tasks.md") == (
        "[here](edge.md) [there](https://a.b/c)"
    )
