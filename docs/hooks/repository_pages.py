"""Bring files from outside docs/ into the site, and point links at them.

Pages are written for readers of the repository too, so their links are paths in it. A link to a
file that is part of the site becomes a link to its page; any other link out of docs/ is an error
of the strict build.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PROJECT = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
SOURCES = {".py": "python", ".toml": "toml"}
"""Files of the examples that become pages, and the language they are shown in."""

_LINK = re.compile(r"(\]\()([^)#\s]+)([^)]*\))")


def pages() -> dict[str, str]:
    """Paths in the repository of the files that are brought in, and of their pages."""
    found = {name: f"project/{name.lower()}" for name in PROJECT if (ROOT / name).is_file()}
    for path in sorted(ROOT.glob("examples/*/*")):
        name = path.relative_to(ROOT).as_posix()
        if path.name == "README.md":
            # Not README: the theme would use the first one as the page of the whole section.
            found[name] = f"examples/{path.parent.name}.md"
        elif path.suffix in SOURCES:
            found[name] = f"{name}.md"
    return found


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the sections of the navigation that follow from which files there are."""
    brought = pages()
    readmes = [page for name, page in brought.items() if name.endswith("/README.md")]
    decisions = sorted(path.name for path in (ROOT / "docs/decisions").glob("0*.md"))
    examples = [{Path(page).stem.capitalize(): page} for page in readmes]
    sections: dict[str, list[Any]] = {
        "Decisions": ["decisions/README.md", *(f"decisions/{name}" for name in decisions)],
        "Examples": examples,
        "Project": [
            {name.removesuffix(".md").capitalize(): brought[name]}
            for name in PROJECT
            if name in brought
        ],
    }
    assert config.nav is not None
    for entry in config.nav:
        if isinstance(entry, dict):
            (title,) = entry
            entry[title] = sections.get(title, entry[title])
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files' pages."""
    for name, page in pages().items():
        path = ROOT / name
        if path.suffix == ".md":
            files.append(File.generated(config, page, content=path.read_text()))
        else:
            text = f"# {path.name}\n\n```{SOURCES[path.suffix]}\n{path.read_text()}```\n"
            files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Point links out of docs/, and those of files from outside, at pages of the site."""
    return rewrite(markdown, page.file.src_uri)


def rewrite(markdown: str, here: str) -> str:
    """The text of a page with its links as they must be in the site."""
    brought = pages()
    original = {page: name for name, page in brought.items()}.get(here, f"docs/{here}")

    def replaced(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        if ":" in target:
            return match.group(0)
        path = posixpath.normpath(posixpath.join(posixpath.dirname(original), target))
        page = brought.get(path, path.removeprefix("docs/") if path.startswith("docs/") else "")
        if not page:
            return match.group(0)  # MkDocs reports it
        return before + posixpath.relpath(page, posixpath.dirname(here) or ".") + after

    return _LINK.sub(replaced, markdown)
