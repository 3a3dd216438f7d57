"""A new chat project with a small decoder."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from isthmus.projects.commands import new


@pytest.fixture(scope="session")
def chat_project(tmp_path_factory):
    """The project, whose base was hardly trained. Tests copy it before they change it."""
    folder = tmp_path_factory.mktemp("projects") / "my_chat"
    CliRunner().invoke(new, [str(folder), "--kind", "chat"], catch_exceptions=False)
    script = folder / "make_base.py"
    text = script.read_text()
    script.write_text(text.replace("STEPS = 300", "STEPS = 3"))
    made = subprocess.run(
        [sys.executable, script], check=False, capture_output=True, text=True, timeout=800
    )
    assert made.returncode == 0, made.stderr
    assert "parameters, " in made.stdout
    script.write_text(text)
    return folder
