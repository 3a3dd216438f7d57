"""Every benchmark runs with its smallest sizes and writes the figures of its docstring."""

import importlib
import importlib.util
import json
import re
import runpy
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest
import run_all
import simulation
from harness import processes
from tests import forked
from tests.benchmarks import forked_programs
from tests.privacy import mutation

# As in a process of its own, warnings of PyTorch and of Flower about themselves end no script.
pytestmark = pytest.mark.filterwarnings("default")

BENCHMARKS = Path(run_all.__file__).parent
ELSEWHERE = {
    "audit": {  # with --datasets
        "data/<digits|mnist|letters>/<device|example>/<claimed|measured|guesses|seconds>",
        "membership/<digits|mnist|letters>/<device|example>",
    },
    "datacenter": {"<mfu|peak_gib>/<device>/<model>"},  # of a GPU
    "regimes": {"regret/<data set>/<problem>/<policy>"},  # with --datasets
    "robust": {
        "flower/<rule>/<data>/<attack>/<share>",  # with --flower
        "knowing/<rule>/<data>/<devices>/<share>",  # with --knowing
        "any/<rule>/<devices>/<share>",
        "long/<rule>/<devices>/<share>",
    },
    "round_overhead": {
        "observed/<params>/<clients>",  # with --observed
        "signed/<params>/<clients>",  # with --signed
    },
    "simulation": {"speedup/<flower|pfl>/<mlp|cnn>", "accuracy_gap/<flower|pfl>/<mlp|cnn>"},
}
"""Figures that `--smoke` does not measure."""
READS_DATA = (
    "adapters",
    "compression",
    "privacy_utility",
    "regimes",
    "robust",
    "simulation",
    "what_if",
)
NEEDS = (
    ("ghost_clipping", "opacus", "opacus"),
    ("personal", "sklearn", "scikit-learn"),
    ("round_overhead", "flwr", "flwr"),
)
"""Script, module, package."""


@pytest.fixture
def run(monkeypatch, data, tmp_path):
    """Runs a script with the smallest sizes; returns its figures."""

    def run_script(name, *arguments):
        file = tmp_path / f"{name}.json"
        script = importlib.import_module(name)
        assert script.main(["--smoke", "--json", str(file), *arguments]) == 0
        return json.loads(file.read_text())

    monkeypatch.setenv("ISTHMUS_TEST_DATA", str(data))
    monkeypatch.setattr(processes, "start", forked_programs.start)
    forked.context()
    forkserver.ensure_running()  # before a script starts one that has imported less
    return run_script


CODE_OF_TESTS = """
from harness import code_of_tests
code_of_tests.make_importable()
import tests.parity.comparison, tests.privacy.mutation, tests.simulation.audit_faults
import tests.server.read.console.filled_runs
"""


def test_scripts_find_the_code_of_tests_without_pytest(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", CODE_OF_TESTS],
        cwd=tmp_path,
        env={"PATH": "", "PYTHONPATH": str(BENCHMARKS)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def promised(name):
    """The keys that a docstring lists, as it writes them."""
    text = importlib.import_module(name).__doc__
    paragraph = text.partition("Figures:")[2].partition("\n\n")[0]
    keys = [" ".join(key.split()) for key in re.findall(r"`([^`]+)`", paragraph)]
    return {key for key in keys if not key.startswith("--")}


def pattern(key):
    """A regular expression for the figures that a promised key stands for."""

    def part(found):
        return f"(?:{found[1]})" if "|" in found[1] else "[^/]+"

    return re.compile(re.sub(r"<([^>]+)>", part, key.replace(".", r"\.")))


@pytest.mark.parametrize("name", run_all.scripts())
def test_a_script_works_and_writes_the_figures_that_it_promises(name, run, monkeypatch):
    # A test of its own removes each refusal, which takes some seconds.
    monkeypatch.setattr(mutation, "check", lambda: mutation.Report(1, 1, (), ()))
    document = run(name)
    keys = promised(name)
    assert document["benchmark"] == name
    found = {
        figure: {key for key in keys if pattern(key).fullmatch(figure)}
        for figure in document["figures"]
    }
    assert [figure for figure, by in found.items() if not by] == []
    assert keys - set().union(*found.values()) == ELSEWHERE.get(name, set())
    # The CPU time of a short round may be less than a tick of the kernel.
    for figure, value in document["figures"].items():
        assert value > 0 or (value == 0 and "cpu" in figure) or "seconds" not in figure, figure
    assert document["targets"].keys() <= document["figures"].keys()


def test_observed_rounds_are_compared_with_others(run):
    figures = run("round_overhead", "--observed")["figures"]
    assert figures.keys() == {"observed/0/2", "observed/1M/2"}


def test_rounds_that_can_be_proved_are_compared_with_others(run):
    figures = run("round_overhead", "--signed")["figures"]
    assert figures.keys() == {"signed/0/3", "signed/1M/3"}


def test_liars_that_know_the_rule_are_measured_by_their_share_and_the_size_of_groups(run):
    figures = run("robust", "--knowing")["figures"]
    assert figures.keys() == {
        f"{figure}/12/10"
        for rule in ("median", "trimmed-mean")
        for figure in (f"knowing/{rule}/letters", f"any/{rule}", f"long/{rule}")
    }


def one_sentence(capsys, script):
    """What a script printed as its only line of errors."""
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{script}.py: ")
    return line


@pytest.mark.parametrize("name", READS_DATA)
def test_missing_data_are_one_sentence(name, monkeypatch, capsys, tmp_path):
    script = importlib.import_module(name)
    monkeypatch.delenv("ISTHMUS_TEST_DATA", raising=False)
    assert script.main(["--smoke"]) == 1
    assert "needs data sets" in one_sentence(capsys, name)
    assert script.main(["--smoke", "--data", str(tmp_path / "no")]) == 1
    assert f"there is no folder {tmp_path}/no; give" in one_sentence(capsys, name)
    assert script.main(["--smoke", "--data", str(tmp_path)]) == 1
    assert f"in {tmp_path}; give" in one_sentence(capsys, name)


@pytest.mark.parametrize(("name", "module", "package"), NEEDS)
def test_a_missing_package_is_one_sentence(name, module, package, monkeypatch, capsys):
    find = importlib.util.find_spec
    script = importlib.import_module(name)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == module else find(name)
    )
    assert script.main(["--smoke"]) == 1
    assert f"{package} is not installed; run `pip install" in one_sentence(capsys, name)


def test_secure_aggregation_is_not_compared_without_flower(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr.common.secure_aggregation.crypto.shamir", None)
    with pytest.raises(SystemExit, match=r"^secagg\.py: flwr is not installed; run `pip install"):
        runpy.run_path(str(BENCHMARKS / "secagg.py"), run_name="__main__")


def test_missing_contenders_of_a_simulation_are_named_after_the_figures(
    monkeypatch, capsys, data, tmp_path
):
    file = tmp_path / "figures.json"
    measured = []
    monkeypatch.setattr(simulation, "SMOKE", simulation.Sizes(models=("mlp",)))
    monkeypatch.setattr(simulation, "is_installed", lambda module, python: module == "pfl")
    monkeypatch.setattr(
        simulation, "contender", lambda name, *_: measured.append(name) or (2.0, 0.5)
    )
    monkeypatch.setattr(
        simulation,
        "population",
        lambda sizes: {"population/seconds": 1.0, "population/peak_mib": 1.0},
    )
    arguments = ["--smoke", "--data", str(data), "--peers", "PYTHON", "--json", str(file)]
    assert simulation.main(arguments) == 1
    assert measured == ["isthmus", "pfl"]
    assert json.loads(file.read_text())["figures"]["speedup/pfl/mlp"] == 1.0
    sentence = one_sentence(capsys, "simulation")
    assert "PYTHON has no ray, so that flower were not measured" in sentence


def test_a_module_is_looked_for_in_another_interpreter(capsys):
    assert simulation.is_installed("json", sys.executable)
    assert not simulation.is_installed("no_such_module", sys.executable)
    assert simulation.main(["--quick", "--peers", "/no/python", "--data", str(BENCHMARKS)]) == 1
    assert "there is no mnist" in one_sentence(capsys, "simulation")


def test_the_peers_have_the_versions_of_the_project():
    def pins(file):
        lines = (BENCHMARKS.parent / file).read_text().replace("[simulation]", "").splitlines()
        return dict(line.split("==") for line in lines if "==" in line)

    ours, theirs = pins("constraints.txt"), pins("benchmarks/peers.txt")
    assert {"torch", "flwr", "ray", "pfl"} <= theirs.keys()
    for name in ("torch", "flwr", "numpy"):
        assert theirs[name] == ours[name]
