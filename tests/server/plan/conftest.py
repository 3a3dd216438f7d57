"""Runs of policies, for tests of what others would have reached."""

import functools

import pytest
from tests.server.plan.trained_runs import JOB, train


@pytest.fixture
def trained(write_task, tmp_path):
    """`trained("schedule", rounds=9)`: trains the job under a policy; the directory of its run."""
    write_task()
    (tmp_path / "job.toml").write_text(JOB)
    return functools.partial(train, tmp_path)
