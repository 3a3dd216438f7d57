"""Isthmus outside a checkout: the wheel that docs/getting-started.md builds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs/getting-started.md").read_text()
ENVIRONMENT = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def run(*command: str, folder: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=folder, env=ENVIRONMENT | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built by the command of the guide with the build tool of this environment."""
    (command,) = re.findall(r"^(pip wheel .*)$", GUIDE, re.MULTILINE)
    built = tmp_path_factory.mktemp("wheel")
    arguments = command.replace("--wheel-dir dist", f"--wheel-dir {built}").split()[1:]
    run(sys.executable, "-m", "pip", *arguments, "--no-build-isolation", "--quiet", folder=ROOT)
    (file,) = built.iterdir()
    return file


def test_the_guide_names_the_file_and_its_extras(wheel: Path) -> None:
    assert f"dist/{wheel.name}" in GUIDE
    commands = re.findall(r"`pip install \"?([^\[`]*\.whl)(?:\[(.*?)\])?\"?`", GUIDE)
    assert {file for file, _ in commands} == {wheel.name}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {extra for _, extras in commands for extra in extras.split(",") if extra}
    assert named
    assert named < project["optional-dependencies"].keys()


def test_an_installed_wheel_runs_a_job_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"),
        *("--target", str(packages), str(wheel)),
        folder=tmp_path,
    )
    place = run(
        sys.executable, "-c", "import isthmus; print(isthmus.__file__)",
        folder=tmp_path, PYTHONPATH=str(packages),
    )  # fmt: skip
    assert place.strip() == str(packages / "isthmus/__init__.py")
    job = ROOT / "examples/digits/job.toml"
    printed = run(
        *(str(packages / "bin/isthmus"), "run", str(job), "--run-dir", "run"),
        *("--set", "strategy.policy=federated", "--set", "rounds=1"),
        *("--set", "datacenter.ranks=0"),
        folder=tmp_path,
        PYTHONPATH=str(packages),
    )
    assert "done (all rounds are done)" in printed
