"""A job with a Flower app: the configuration of the app's project, and keys that do not fit."""

import pytest

from isthmus.errors import JobError
from isthmus.job import load_job, read_job, write_job

JOB = """
name = "quick"
[federated]
secure_aggregation = false
[federated.flower]
app = "pkg.client_app:app"
server_app = "pkg.server_app:app"
"""
PROJECT = """
[tool.flwr.app.components]
clientapp = "{app}"
[tool.flwr.app.config]
learning-rate = 0.1
rounds = 3
verbose = false
model = {{ name = "small", size = {{ layers = 2 }} }}
"""


@pytest.fixture
def load(tmp_path):
    def load(*overrides, job=JOB, project=PROJECT, app="pkg.client_app:app"):
        (tmp_path / "job.toml").write_text(job)
        (tmp_path / "pyproject.toml").write_text(project.format(app=app))
        return load_job(tmp_path / "job.toml", overrides)

    return load


def test_the_project_of_the_app_has_the_defaults_of_its_config(load):
    config = {
        "learning-rate": 0.1,
        "rounds": 3,
        "verbose": False,
        "model.name": "small",
        "model.size.layers": 2,
    }
    job = load()
    assert dict(job.federated.flower.config) == config
    assert job.federated.flower.config["verbose"] is False
    assert read_job(write_job(job)) == job
    changed = load("federated.flower.config={rounds=5, model={name='big'}}")
    assert dict(changed.federated.flower.config) == {**config, "rounds": 5, "model.name": "big"}


def test_a_project_of_another_app_is_not_read(load):
    assert dict(load(app="other:app").federated.flower.config) == {}
    by_path = load(job=JOB.replace("pkg.client_app", "pkg/client_app.py"))
    assert "rounds" in by_path.federated.flower.config


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["federated.secure_aggregation=true"], "server_app='pkg.server_app:app' reads the reply"),
        (["rounds=4"], "rounds has no effect on federated.flower.server_app='pkg.server_app:app'"),
        (["task.source=task.py:A"], "task has no effect on federated.flower.server_app="),
        (["federated.flower.strategy.name=FedAdam"], "strategy has no effect on server_app="),
        (["federated.flower.max_examples=9"], "max_examples has no effect on server_app="),
        (["federated.over_selection=2"], "over_selection has no effect on flower.server_app="),
        (["federated.flower.config.when=1979-05-27"], "config.when=datetime.date(1979, 5, 27): mu"),
    ],
)
def test_what_does_not_fit_a_server_app_is_refused(overrides, says, load):
    with pytest.raises(JobError) as refused:
        load(*overrides)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("flower", "says"),
    [
        ('server_app = "a.py:app"', "server_app='a.py:app' sends messages to a ClientApp; name it"),
        (
            "strategy = { name = 'FedAvg', options = { fraction_evaluate = 1.0 } }",
            "strategy.options.fraction_evaluate needs the devices' ClientApp",
        ),
    ],
)
def test_an_app_that_is_missing_is_named(flower, says, load):
    head, _, _ = JOB.partition("app =")
    with pytest.raises(JobError) as refused:
        load("task.source=task.py:A", job=f"{head}{flower}\n")
    assert says in str(refused.value)


def test_a_job_without_a_server_app_needs_a_task(load):
    with pytest.raises(JobError, match=r"job.toml: task.source is missing$"):
        load(job=JOB.replace("server_app", "# server_app"))


@pytest.mark.parametrize(
    ("project", "says"),
    [
        ("[tool", "pyproject.toml cannot be read: "),
        (PROJECT.replace("rounds = 3", "rounds = [3]"), "config.rounds=[3]: must be true, false,"),
    ],
)
def test_a_project_that_cannot_be_used_is_one_sentence(project, says, load):
    with pytest.raises(JobError) as refused:
        load(project=project)
    assert says in str(refused.value)
