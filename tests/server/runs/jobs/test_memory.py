"""A further job begins only where this machine has memory for it."""

import pytest
from tests.conftest import TABLE

from isthmus.errors import CannotContinue
from isthmus.job import parse_job
from isthmus_server.runs.jobs import running
from isthmus_server.runs.jobs.running import check_memory

JOB = parse_job('name = "table"\n[task]\nsource = "task.py:Learn"')
MODEL_BYTES = 4 * (3 * 4 + 3)


@pytest.fixture
def tasks(tmp_path):
    (tmp_path / "task.py").write_text(TABLE + "    pass\n")
    return tmp_path


@pytest.mark.parametrize("available", [8 * MODEL_BYTES, None])
def test_a_job_that_fits_begins(available, tasks, monkeypatch):
    monkeypatch.setattr(running, "_available_memory", lambda: available)
    check_memory(JOB, tasks)


def test_a_job_that_does_not_fit_is_tried_again_later(tasks, monkeypatch):
    monkeypatch.setattr(running, "_available_memory", lambda: 8 * MODEL_BYTES - 1)
    with pytest.raises(CannotContinue, match=r"^about 0\.0 GB of memory are needed, and 0\.0 GB"):
        check_memory(JOB, tasks)


def test_the_memory_of_this_machine_is_known():
    assert 10_000_000 < running._available_memory() < 1 << 50
