import doctest
import json

import pytest
from harness import figures


def test_table_aligns_its_columns():
    text = figures.table(("a round of", "ours"), [("25M parameters", "1.8 s"), ("0", "0.01 s")])
    assert text.splitlines() == [
        "a round of        ours",
        "25M parameters   1.8 s",
        "0               0.01 s",
    ]


def test_table_refuses_an_incomplete_row():
    with pytest.raises((ValueError, IndexError)):
        figures.table(("what", "ours"), [("a round",)])


@pytest.mark.parametrize(
    ("value", "text"),
    [(612.4, "612x"), (4.316, "4.32x"), (100.0, "100x"), (10.0, "10.0x"), (0.0123, "0.0123x")],
)
def test_ratios_have_three_digits(value, text):
    assert figures.times(value) == text


def test_spread_is_the_median_and_the_range():
    assert figures.spread([6.15, 3.06, 6.07]) == "6.07 s [3.06..6.15]"


def test_file_of_figures(tmp_path):
    path = tmp_path / "figures.json"
    figures.write(path, "round_overhead", {"cores": 2}, {"speedup/1M/2": 81.5})
    assert json.loads(path.read_text()) == {
        "benchmark": "round_overhead",
        "machine": {"cores": 2},
        "figures": {"speedup/1M/2": 81.5},
        "targets": {},
    }


def test_the_file_has_the_targets_of_its_figures(tmp_path):
    path = tmp_path / "figures.json"
    targets = {"speedup/*": figures.Target(at_least=20), "other": figures.Target(at_most=1)}
    figures.write(path, "round_overhead", {}, {"speedup/1M/2": 81.5, "seconds": 2}, targets)
    assert json.loads(path.read_text())["targets"] == {
        "speedup/1M/2": {"at_least": 20, "at_most": None, "full_size": False}
    }


def test_nan_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        figures.write(tmp_path / "figures.json", "broken", {}, {"ratio": float("nan")})


def test_machine_lists_package_versions():
    description = figures.machine("no-such-package-anywhere")
    assert description["cores"] >= 1
    assert description["no-such-package-anywhere"] == "not installed"
    assert description["torch"] != "not installed"


def test_the_docstring_example():
    assert doctest.testmod(figures).failed == 0
