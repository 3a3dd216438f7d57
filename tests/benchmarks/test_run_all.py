"""The program that runs all benchmarks and prints one table."""

import json

import pytest
import run_all

GOOD = """
import sys
from harness import figures
from harness.figures import Target
targets = {"a/*": Target(at_least=2), "b": Target(at_most=1, full_size=True)}
path = __import__("pathlib").Path(sys.argv[sys.argv.index("--json") + 1])
if __name__ == "__main__":
    figures.write(path, "good", {}, {"a/1": 3.0, "a/2": 1.0, "b": 9.0, "c": 0.5}, targets)
"""
BAD = """
if __name__ == "__main__":
    import sys
    sys.exit("bad.py: there is no data; give some")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two scripts, a module and a program that measures nothing."""
    monkeypatch.setenv("PYTHONPATH", str(run_all.HERE))
    monkeypatch.setattr(run_all, "HERE", tmp_path)
    texts = {"good": GOOD, "bad": BAD, "module": "A = 1\n", "console_screenshots": BAD}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def test_a_script_that_fails_is_named_and_the_others_run(folder, capsys):
    file = folder / "build" / "all.json"
    assert run_all.main(["--json", str(file)]) == 1
    out, err = capsys.readouterr()
    assert [line.split() for line in out.splitlines()[:5]] == [
        ["script", "figure", "measured", "target", "met"],
        ["good", "a/1", "3.00", ">=", "2", "yes"],
        ["good", "a/2", "1.00", ">=", "2", "no"],
        ["good", "b", "9.00", "<=", "1,", "full", "size", "-"],
        ["good", "c", "0.500"],
    ]
    assert err.splitlines()[-1] == "bad.py failed: there is no data; give some"
    document = json.loads(file.read_text())
    assert document["failures"] == {"bad": "there is no data; give some"}
    assert run_all.main(["--only", "good"]) == 0


def test_an_unknown_script_is_one_sentence(folder, capsys):
    assert run_all.main(["--only", "module"]) == 1
    assert "there is no module; there are bad, good" in capsys.readouterr().err


def test_a_script_without_end_is_stopped(folder, monkeypatch):
    (folder / "bad.py").write_text("import threading\nthreading.Event().wait()\n__main__ = 0\n")
    monkeypatch.setattr(run_all, "LIMIT_SECONDS", 1.0)
    assert run_all.run(["bad"])["failures"] == {"bad": "it took more than 1 s"}


def test_figures_are_recorded_between_two_lines_of_a_page(folder, capsys):
    file = folder / "all.json"
    page = folder / "page.md"
    run_all.main(["--json", str(file)])
    page.write_text(f"before\n{run_all.BEGIN}old\n{run_all.END}after\n")
    run_all.record(file, page)
    run_all.record(file, page)
    text = page.read_text()
    assert text.startswith(f"before\n{run_all.BEGIN}\n20")
    assert text.endswith(f"\n{run_all.END}after\n")
    assert "| `good.py` | `a/1` | 3.00 | >= 2 | yes |\n|  | `a/2` | 1.00 | >= 2 | no |" in text
    assert "`bad.py`: there is no data; give some" in text
    assert "old" not in text
    page.write_text("nothing")
    with pytest.raises(run_all.UserError, match="has no lines"):
        run_all.record(file, page)


def test_the_documentation_has_a_place_for_the_table():
    text = run_all.PAGE.read_text()
    assert text.index(run_all.BEGIN) < text.index(run_all.END)
