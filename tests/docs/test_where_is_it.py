"""Every name of the code that the documentation points at exists."""

import importlib
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ["where-is-it.md", "architecture.md", "extend.md", "life-of-a-round.md"]
ENTRY_POINT_GROUPS = {
    "isthmus.aggregation_rules",
    "isthmus.app_checks",
    "isthmus.blob_sources",
    "isthmus.checks",
    "isthmus.commands",
    "isthmus.device_selections",
    "isthmus.device_work",
    "isthmus.federated_extensions",
    "isthmus.plans",
    "isthmus.policies",
    "isthmus.privacy_commands",
    "isthmus.launchers",
    "isthmus.run_loops",
    "isthmus.trackers",
    "isthmus.update_codecs",
}


def dotted_names(page: str) -> set[str]:
    """The dotted names in backticks that begin with one of the packages."""
    found = re.findall(r"`(isthmus\w*(?:\.\w+)+)`", (DOCS / page).read_text())
    return set(found) - ENTRY_POINT_GROUPS


def resolve(name: str) -> object:
    """The object with a dotted name: the longest part that is a module, then its attributes."""
    module, *rest = name.split(".")
    found: object = importlib.import_module(module)
    while rest:
        try:
            found = importlib.import_module(f"{module}.{rest[0]}")
        except ModuleNotFoundError as error:
            if error.name != f"{module}.{rest[0]}":
                raise
            break
        module = f"{module}.{rest.pop(0)}"
    for attribute in rest:
        found = getattr(found, attribute)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_name_on_the_page_exists(page: str) -> None:
    missing = []
    for name in sorted(dotted_names(page)):
        try:
            resolve(name)
        except (AttributeError, ModuleNotFoundError) as error:
            missing.append(f"{name}: {error}")
    assert not missing, "\n".join(missing)


def test_the_table_covers_the_code() -> None:
    rows = re.findall(r"^\| (?!behaviour|extension|---)", (DOCS / PAGES[0]).read_text(), re.M)
    assert len(rows) >= 30


def test_a_name_that_does_not_exist_is_noticed() -> None:
    with pytest.raises(AttributeError):
        resolve("isthmus.job.Jobs")
