"""Where a chaos run puts a job's task and its data."""

from __future__ import annotations

import pytest

from isthmus.errors import UserError
from isthmus_chaos.deployment import ChaosDeployment
from isthmus_chaos.network_plan import KINDS, of_kind, rounds_with_aggregators
from isthmus_clients.device import owner_limits


@pytest.fixture
def project(tmp_path):
    """A folder of a task."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "task.py").write_text("")
    return folder


def write_rows(folder):
    (folder / "private").mkdir(parents=True)
    (folder / "private" / "rows.csv").write_text("1,0\n")


def deployed(make_job, project, data):
    job = make_job("task.source=task.py:Rows", f"task.data={data}", "federated.clients=2")
    return ChaosDeployment(job, project, project.parent / "state", None, 0)


@pytest.mark.parametrize("data", ["../data", "data"])
def test_participants_and_the_server_have_the_data_of_the_job(data, make_job, project):
    """A server takes no data from above its tasks, and participants no path from a server."""
    write_rows(project / data)
    deployment = deployed(make_job, project, data)
    deployment.copy_task()
    of_server = (deployment.tasks / deployment.job.task.data).resolve()
    assert of_server.is_relative_to(deployment.tasks.resolve())
    assert (of_server / "private" / "rows.csv").read_text() == "1,0\n"
    assert deployment.data_options == ["--data", str(of_server)]


def test_data_may_be_one_file(make_job, project):
    (project.parent / "rows.csv").write_text("1,0\n")
    deployment = deployed(make_job, project, "../rows.csv")
    deployment.copy_task()
    assert (deployment.tasks / deployment.job.task.data).read_text() == "1,0\n"


def test_data_that_are_not_there_are_named(make_job, project):
    with pytest.raises(UserError, match=r"task.data='../data' is not there"):
        deployed(make_job, project, "../data")


@pytest.mark.parametrize("kind", KINDS)
def test_owners_allow_rounds_of_every_kind_with_aggregators(kind, make_job, project, tmp_path):
    job = rounds_with_aggregators(make_job("task.source=task.py:Rows", "federated.clients=4"))
    deployment = ChaosDeployment(job, project, tmp_path / "state", None, 0, aggregators=2)
    limits = owner_limits.parse(deployment._owner_policy(), "policy.toml")
    owner_limits.LimitsGuard(limits, tmp_path / "usage.json").check_job(of_kind(job, kind))
