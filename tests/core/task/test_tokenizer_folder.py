"""A task finds the tokenizer of the model that it starts from, or one sentence says why not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from isthmus.errors import TaskError
from isthmus.job import load_job
from isthmus.task import load_task

FILE = b'6\0\0\0\0\0\0\0{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}' + bytes(8)
JOB = """
name = "a"
[task]
source = "task.py:Learn"
[model]
start = "models/small"
"""
TASK = """
import isthmus

class Learn(isthmus.Task):
    def __init__(self, settings, data=None):
        super().__init__(settings, data)
        self.text = (self.tokenizer_folder / "tokenizer.json").read_text()

    def model(self): ...
    def loss(self, output, target): ...
    def local_data(self, participant): ...
    def optimizer(self, parameters, participant): ...
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small = tmp_path / "here/models/small"
    small.mkdir(parents=True)
    (small / "model.safetensors").write_bytes(FILE)
    (small / "config.json").write_text("{}")
    (small / "tokenizer.json").write_text("one")
    (tmp_path / "here/job.toml").write_text(JOB)
    (tmp_path / "here/task.py").write_text(TASK)
    return tmp_path / "here"


def load(folder: Path, there: Path) -> Any:
    """The task of the job in a folder, on a machine with another directory of tasks."""
    job = load_job(folder / "job.toml")
    return load_task(job.task.source, job.task.settings, base=there)


def test_a_participant_needs_only_the_tokenizer_in_its_directory_of_tasks(folder: Path) -> None:
    assert load(folder, folder).text == "one"
    there = folder.parent / "there"
    (there / "models/small").mkdir(parents=True)
    shutil.copy(folder / "task.py", there)
    with pytest.raises(TaskError, match=r"there/models/small has no tokenizer; copy the tokenizer"):
        load(folder, there)
    (there / "models/small/tokenizer.json").write_text("one")
    assert load(folder, there).text == "one"


def test_another_tokenizer_is_refused(folder: Path) -> None:
    there = folder.parent / "there"
    shutil.copytree(folder, there)
    (there / "models/small/tokenizer.json").write_text("two")
    with pytest.raises(TaskError, match=r"is not that of the job, so that texts would be other"):
        load(folder, there)
    shutil.copy(folder / "models/small/tokenizer.json", there / "models/small")
    (there / "models/small/chat_template.jinja").write_text("another")
    with pytest.raises(TaskError, match=r"small is not that of the job"):
        load(folder, there)


def test_a_start_without_a_tokenizer_is_refused(folder: Path) -> None:
    (folder / "models/small/tokenizer.json").unlink()
    with pytest.raises(TaskError, match=r"and there is none where the job was loaded; set model"):
        load(folder, folder)
