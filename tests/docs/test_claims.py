"""Every claim of the threat model's first screen names tests that exist."""

import ast
import re
from pathlib import Path

import pytest

from isthmus.job.promises import CURIOUS, LYING, NOTHING

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")
FIRST_SCREEN = PAGE.split("\n## ")[0]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def rows(header):
    """The rows of the first table with that header, as lists of cells."""
    lines = iter(FIRST_SCREEN.splitlines())
    for line in lines:
        if line == header:
            break
    next(lines)
    found = []
    for line in lines:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return found


CLAIMS = rows("| claim | shown by |")


def test_there_is_a_table_of_claims():
    assert len(CLAIMS) >= 10


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda row: row[0][:40])
def test_a_claim_names_tests_that_pytest_collects(claim):
    _, shown = claim
    named = NAMED.findall(shown)
    assert named
    assert NAMED.sub("", shown).strip(", ") == ""  # nothing that only looks like a test
    for path, name in named:
        file = ROOT / path
        assert file.name.startswith("test_")
        module = ast.parse(file.read_text(encoding="utf-8"))
        functions = [
            node.name
            for node in module.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        assert functions.count(name) == 1, f"{path} has no {name}"


def test_the_levels_are_those_that_the_commands_name():
    named = [level.strip("*") for level, _, _ in rows("| level | which jobs | what is claimed |")]
    assert named == [CURIOUS, LYING, NOTHING]


def test_the_first_screen_says_what_sums_do_not_prevent():
    for cited in ("Fowl et al. 2022", "Pasquini et al. 2022", "Boenisch et al. 2023"):
        assert cited in FIRST_SCREEN
    assert "`noise` in the owner's policy" in FIRST_SCREEN
