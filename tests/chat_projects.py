"""New projects for dialogues, with a decoder that was hardly trained."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from isthmus.projects.commands import new


def new_chat_project(folder: Path) -> None:
    """Write a project, and its `base` after three steps in place of 300.

    The project's own script makes the base, in this process, which has imported what it needs.
    """
    CliRunner().invoke(new, [str(folder), "--kind", "chat"], catch_exceptions=False)
    script = folder / "make_base.py"
    text = script.read_text()
    assert "STEPS = 300" in text
    script.write_text(text.replace("STEPS = 300", "STEPS = 3"))
    with pytest.MonkeyPatch.context() as patched, torch.random.fork_rng(devices=[]):
        patched.syspath_prepend(folder)
        runpy.run_path(str(script), run_name="__main__")
    # Those of another project have the same name.
    sys.modules.pop("dialogues")
    script.write_text(text)
