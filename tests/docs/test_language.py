"""Documentation, docstrings and comments avoid words that make sentences hard to read.

A docstring is read alone, by `help()`, in an editor or on a page: it names what it is about.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN = re.compile(
    r"\b(?:whoever|beside|reckon\w*|bears|of\s+ours|comes\s+to|hold\s+up)\b", re.IGNORECASE
)
PAGES = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/**/*.md",
    "examples/**/*.md",
    "Makefile",
    "pyproject.toml",
    ".ci/run",
]
CODE = ["core", "privacy", "server", "clients", "datacenter", "examples", "benchmarks"]
DOCUMENTED = [*CODE, "simulation", "flower", "chaos", "verifier"]
FRAGMENT = re.compile(
    r'\s*r?"""\s*(Of|Those|That|The\s+same|Likewise|Its|Their|Whose|They|Also)\b(?:\s+\S+){0,6}'
)
"""The beginning of a docstring whose subject is elsewhere, such as `Of the file.`."""


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Every string that is a statement, including those after attributes, with its first line."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                # The source and not the value, so that line numbers are exact.
                yield node.lineno, "\n".join(lines[node.lineno - 1 : node.end_lineno])


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Every comment of a Python file; comments on consecutive lines are one text."""
    start, lines = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if lines and token.start[0] != start + len(lines):
            yield start, "\n".join(lines)
            lines = []
        if not lines:
            start = token.start[0]
        lines.append(token.string.lstrip("#"))
    if lines:
        yield start, "\n".join(lines)


def line_comments(source: str, mark: str) -> Iterator[tuple[int, str]]:
    """Comments of a file without block comments; a mark within quotes does not begin one."""
    for number, line in enumerate(source.splitlines(), 1):
        _, found, comment = re.sub(r'"[^"]*"', "", line).partition(mark)
        if found:
            yield number, comment


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """What a file says to its readers: each text with its first line."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from docstrings(source)
        yield from comments(source)
    elif path.suffix == ".toml":
        yield from line_comments(source, "#")
    elif path.suffix == ".proto":
        yield from line_comments(source, "//")
    else:
        yield 1, source


def findings(path: Path, root: Path = ROOT) -> Iterator[str]:
    """Each forbidden word of a file, as `file:line: word`."""
    for start, text in texts(path):
        for match in FORBIDDEN.finditer(text):
            line = start + text.count("\n", 0, match.start())
            yield f"{path.relative_to(root)}:{line}: {' '.join(match[0].split())}"


def fragments(path: Path, root: Path = ROOT) -> Iterator[str]:
    """Each docstring of a Python file that names no subject, as `file:line: how it begins`."""
    for line, text in docstrings(path.read_text(encoding="utf-8")):
        if found := FRAGMENT.match(text):
            yield f"{path.relative_to(root)}:{line}: {' '.join(found[0].split())}"


def report(files: Iterable[Path]) -> None:
    """Fail with one line for each forbidden word."""
    found = [finding for path in files for finding in findings(path)]
    if found:
        pytest.fail("words to replace:\n" + "\n".join(found), pytrace=False)


def test_pages_avoid_forbidden_words() -> None:
    pages = sorted({path for pattern in PAGES for path in ROOT.glob(pattern)})
    assert len(pages) > len(PAGES)
    assert {ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / ".ci/run"} <= set(pages)
    report(pages)


@pytest.mark.parametrize("folder", CODE)
def test_docstrings_and_comments_avoid_forbidden_words(folder: str) -> None:
    files = sorted(
        path
        for suffix in ("py", "toml", "proto")
        for path in (ROOT / folder).rglob(f"*.{suffix}")
        if "_pb2" not in path.name
    )
    assert files
    report(files)


@pytest.mark.parametrize("folder", DOCUMENTED)
def test_docstrings_name_their_subject(folder: str) -> None:
    files = sorted(
        path for path in (ROOT / folder).rglob("*.py") if not path.stem.endswith(("_pb2", "_grpc"))
    )
    assert files
    found = [fragment for path in files for fragment in fragments(path)]
    if found:
        pytest.fail(
            "docstrings to begin with what they are about:\n" + "\n".join(found), pytrace=False
        )


@pytest.mark.parametrize(
    "docstring",
    [
        '"""Of the file, in bytes."""',
        '"""Those of a job; None if its updates are sent as they are."""',
        '"""The same\nwith a codec."""',
        '"""\nIts digest.\n"""',
        'r"""Likewise."""',
    ],
)
def test_a_docstring_without_a_subject_is_found(docstring: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(f"class Kept:\n    size: int\n    {docstring}\n")
    (fragment,) = fragments(path, tmp_path)
    assert fragment.startswith("module.py:3: ")


@pytest.mark.parametrize(
    "docstring",
    ['"""Size of the file, in bytes."""', '"""Offers of a job."""', '"""These bytes are text."""'],
)
def test_a_docstring_with_a_subject_is_allowed(docstring: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(f"SIZE = 1\n{docstring}\n")
    assert list(fragments(path, tmp_path)) == []


@pytest.mark.parametrize(
    ("name", "source", "line"),
    [
        ("page.md", "One line.\nThe sum comes\nto four.\n", 2),
        ("module.py", '"""Good.\n\nBeside the point.\n"""\n', 3),
        ("attribute.py", 'A = 1\n"""Whoever reads it."""\n', 2),
        ("comment.py", "A = 1\n# It will hold\n# up.\n", 2),
        ("job.toml", 'name = "a # b"  # it bears a name\n', 1),
        ("link.proto", "int32 a = 1; // reckoned\n", 1),
    ],
)
def test_a_forbidden_word_is_found_with_its_line(
    name: str, source: str, line: int, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(source)
    (finding,) = findings(path, tmp_path)
    assert finding.startswith(f"{name}:{line}: ")


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("words.md", "Besides, it can bear what is reached; holding up; come to.\n"),
        ("values.py", 'NAME = "whoever"\nprint("beside")\n'),
        ("job.toml", 'name = "beside"\n'),
    ],
)
def test_values_and_other_words_are_allowed(name: str, source: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(source)
    assert list(findings(path, tmp_path)) == []
