"""A fresh clone is set up alike by everybody: README, Makefile, constraints and both integrations.

Each of these says which Python, which PyTorch and which commands the project wants; where one is
changed, the others have to be.
"""

import re
import subprocess
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
JOBS = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
FIRST_SCREEN = (ROOT / "README.md").read_text().partition("\n## ")[0]
MINORS = [
    name.rpartition(" ")[2]
    for name in PROJECT["classifiers"]
    if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", name)
]
"""The releases of Python that the project says it supports."""


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def requirements() -> list[Requirement]:
    """What the project and its extras ask for, without references to itself."""
    extras = PROJECT["optional-dependencies"].values()
    found = [Requirement(line) for group in [PROJECT["dependencies"], *extras] for line in group]
    return [each for each in found if each.name != PROJECT["name"]]


def recipe(target: str) -> tuple[list[str], str]:
    """The prerequisites of a target of the Makefile, and its commands."""
    found = re.search(rf"^{re.escape(target)}:(.*)\n((?:\t.*\n)*)", MAKEFILE, re.MULTILINE)
    assert found is not None, target
    return found[1].split(), found[2]


def steps(job: str) -> list[str]:
    return [step["run"] for step in JOBS[job]["steps"] if "run" in step]


def test_every_requirement_has_a_version_that_satisfies_it():
    pinned = pins()
    wrong = [
        f"{each}: constraints.txt has {pinned.get(canonicalize_name(each.name))}"
        for each in requirements()
        if pinned.get(canonicalize_name(each.name)) not in each.specifier
    ]
    assert wrong == []


def test_the_installation_uses_the_constraints():
    assert re.findall(r"pip install.*", MAKEFILE)
    (install,) = re.findall(r"^INSTALL = (.*)$", MAKEFILE, re.MULTILINE)
    assert install.endswith("-c constraints.txt")
    for target in ("$(VENV)/ready", "$(VENV)/ready-dev"):
        assert "$(INSTALL)" in recipe(target)[1]
    checked = recipe("constraints-check")[1]
    assert "constraints.txt | $(BARE_PIP) $(BIN)/pip install" in checked
    assert "-e '.[server,datacenter,examples]'" in recipe("$(VENV)/ready")[1]
    assert "-e '.[dev]'" in recipe("$(VENV)/ready-dev")[1]


def test_python_is_the_same_everywhere():
    lowest = PROJECT["requires-python"].removeprefix(">=")
    assert MINORS[0] == lowest
    assert f"Python {lowest} or newer" in FIRST_SCREEN
    assert f"needs Python {lowest} or newer" in MAKEFILE
    major, minor = map(int, lowest.split("."))
    newest = int(MINORS[-1].partition(".")[2])
    limits = re.findall(r"sys\.exit\((.*?)\)'", MAKEFILE)
    assert limits == [
        f"sys.version_info < ({major}, {minor})",
        f"not ({major}, {minor}) <= sys.version_info < ({major}, {newest + 1})",
    ]
    assert re.search(r"^PYTHON \?= python3$", MAKEFILE, re.MULTILINE)
    guide = (ROOT / "docs/getting-started.md").read_text()
    assert f"Python {lowest} or newer" in guide


def test_the_hosted_integration_has_the_oldest_and_the_newest_release_of_each_python():
    tested = JOBS["ci"]["strategy"]["matrix"]["python"]
    for minor in MINORS:
        patches = [each for each in tested if each.startswith(f"{minor}.")]
        assert minor in tested, f"the newest {minor} is not tested"
        assert patches, f"no old {minor} is tested"
        assert all(Version(each) <= Version(f"{minor}.2") for each in patches)
    assert {".".join(each.split(".")[:2]) for each in tested} == set(MINORS)


def test_the_hosted_integration_has_both_ends_of_the_range_of_pytorch():
    (torch,) = (each for each in requirements() if each.name == "torch")
    lowest, highest = (Version(each) for each in JOBS["pytorch"]["strategy"]["matrix"]["torch"])
    assert SpecifierSet(f">={lowest.major}.{lowest.minor}") & torch.specifier == torch.specifier
    assert highest in torch.specifier
    assert Version(f"{highest.major}.{highest.minor + 1}") not in torch.specifier
    assert lowest <= pins()["torch"] <= highest


def test_hosted_and_local_integration_run_the_same_target():
    code = [
        line
        for line in (ROOT / ".ci/run").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert code == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "exec make ci"]
    assert steps("ci")[-1] == "make ci"
    assert "sudo make packages" in steps("ci")
    for job, key, uses in (("ci", "python-version", "python"), ("pytorch", "torch", "torch")):
        assert f"${{{{ matrix.{uses} }}}}" in str(JOBS[job]["steps"]), key
        assert not any("continue-on-error" in step for step in JOBS[job]["steps"])
    assert recipe("ci")[0] == ["constraints-check", "test", "docs", "oldest"]
    assert {"lint", "packages"} <= set(recipe("test")[0])
    assert recipe("test")[1] == "\t@$(BIN)/pytest -q $(TOGETHER)\n"
    assert "$(BIN)/isthmus run examples/digits/job.toml" in recipe("demo")[1]


def test_the_packages_that_tests_ask_for_are_those_that_are_installed():
    installed = {pair.partition(":")[2] for pair in words("PACKAGES")}
    asked = set()
    for file in ("machine.py", "end_to_end/network.py", "end_to_end/systemd_machines.py"):
        text = (ROOT / "tests" / file).read_text()
        asked |= set(re.findall(r"; install ([a-z0-9-]+)\"", text))
        asked |= set(re.findall(r'"[a-z]+": "([a-z0-9-]+)"', text))
    assert asked - {"helm"} == installed  # of a package of the dev extra


def test_all_sources_of_bases_are_tried_by_a_target_of_their_own():
    needed, commands = recipe("bases")
    assert needed == ["$(VENV)/ready-dev"]
    [file] = re.findall(r"ISTHMUS_TEST_BASES=all \$\(BIN\)/pytest -q -s (\S+)", commands)
    assert 'os.environ.get("ISTHMUS_TEST_BASES") == "all"' in (ROOT / file).read_text()


def test_all_networks_are_tried_by_a_target_of_their_own():
    needed, commands = recipe("networks")
    assert needed == ["$(VENV)/ready-dev", "packages"]
    assert "ISTHMUS_TEST_NETWORKS=all $(BIN)/pytest -q -s $(NETWORKS)" in commands
    assert "ISTHMUS_TEST_NETWORKS" in (ROOT / words("NETWORKS")[0]).read_text()
    (roads,) = re.findall(r"^ROADS := ((?:.*\\\n)*.*)$", MAKEFILE, re.MULTILINE)
    files = [
        f"{prefix}{file}"
        for prefix, names in re.findall(r"addprefix ([^,]+),([^)]+)\)", roads)
        for file in names.split()
    ]
    assert len(files) == 8
    assert [file for file in files if not (ROOT / file).is_file()] == []
    installed = {pair.partition(":")[2] for pair in words("NETWORK_PACKAGES")}
    helpers = [ROOT / "tests/server/real_nginx.py", ROOT / "tests/end_to_end/real_proxies.py"]
    asked = {
        package
        for file in helpers
        for package in re.findall(r"; install ([a-z0-9-]+)\"\)", file.read_text())
    }
    assert asked | {"squid", "tinyproxy"} == installed


def words(variable: str) -> list[str]:
    """The words of a variable of the Makefile."""
    (value,) = re.findall(rf"^{variable} := (.*)$", MAKEFILE, re.MULTILINE)
    return value.split()


def test_the_first_screen_names_the_commands_that_set_everything_up():
    named = set(re.findall(r"\bmake ([a-z-]+)", FIRST_SCREEN))
    assert named == {"demo", "check", "test"}
    for target in named:
        assert recipe(target)[0][0].startswith("$(VENV)/ready")


def test_help_names_every_target():
    said = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    targets = set(re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[0].split())
    named = set(re.findall(r"^make ([a-z-]+)  ", said.stdout, re.MULTILINE))
    inner = {"help", "packages", "oldest", "test-jobs", "constraints-check"}
    assert named == targets - inner - {"lint", "format", "proto", "clean"}
