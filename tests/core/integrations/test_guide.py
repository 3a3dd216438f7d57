"""What the guide shows is a task, with the names of the users' scripts here."""

from __future__ import annotations

import dataclasses
import importlib
import shutil
from pathlib import Path

import pytest
from tests.core.integrations.conftest import SCRIPTS

from isthmus.task.definition import defines

pytest.importorskip("lightning", reason="lightning is not installed; install lightning")
pytest.importorskip("transformers", reason="transformers is not installed; install transformers")
pytest.importorskip("accelerate", reason="accelerate is not installed; install accelerate")

GUIDE = Path(__file__).parents[3] / "docs/tasks.md"


def test_the_lines_of_the_guide_make_tasks(tmp_path, monkeypatch):
    section = GUIDE.read_text().partition("## From Lightning and transformers\n")[2]
    one_line, functions = (part.partition("```")[0] for part in section.split("```python\n")[1:3])
    for script in SCRIPTS.glob("*.py"):
        shutil.copy(script, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names = {**vars(importlib.import_module("lit_rows"))}
    names |= vars(importlib.import_module("reviews"))
    names["ARGUMENTS"] = dataclasses.replace(names["ARGUMENTS"], max_grad_norm=0)
    exec(one_line, names)
    rows, reviews = names["Rows"]({}), names["Reviews"]({})
    assert len(rows.local_data(None)) == 48
    assert len(reviews.local_data(None)) == 48
    assert len(reviews.eval_data()) == 20
    assert defines(rows, "training_step")
    exec(functions, names)
    assert names["Rows"]({"rate": 0.5}).model().hparams.rate == 0.5
    names["load_from_disk"] = lambda path: [str(path)]
    assert names["Reviews"]({}, Path("folder")).local_data(None) == ["folder"]
