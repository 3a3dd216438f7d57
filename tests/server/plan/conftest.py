"""Runs of policies, for tests of what others would have reached, and few timed rounds."""

import functools

import pytest
from tests.server.plan.trained_runs import JOB, train

from isthmus_server.plan import changed_durations, timed_rounds


@pytest.fixture(autouse=True)
def few_timed_rounds(monkeypatch):
    """All of them, also on a busy machine."""
    monkeypatch.setattr(timed_rounds, "ROUNDS", 6)
    monkeypatch.setattr(timed_rounds, "REAL_SECONDS", 600.0)
    monkeypatch.setattr(changed_durations, "_REAL_SECONDS", 600.0)


@pytest.fixture
def trained(write_task, tmp_path):
    """`trained("schedule", rounds=9)`: trains the job under a policy; the directory of its run."""
    write_task()
    (tmp_path / "job.toml").write_text(JOB)
    return functools.partial(train, tmp_path)
