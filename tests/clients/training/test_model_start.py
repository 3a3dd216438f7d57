"""What a device does with `model.start`: it reads it only for what is not exchanged."""

import pytest
import torch
from safetensors.torch import save_file
from tests.clients.training.conftest import train
from tests.clients.training.started_runs import opening_of
from torch import nn

from isthmus.errors import JobError, TaskError
from isthmus.task import Participant
from isthmus_clients.training.local_run import DeviceRun

JOB = """
name = "table"
[task]
source = "task.py:Learn"
[model]
start = "weights.safetensors"
[federated]
secure_aggregation = false
"""


@pytest.fixture
def server(write_task, tmp_path):
    """The request of a server to open a run, the server's model, and its folder."""

    def server(*overrides):
        write_task()
        torch.manual_seed(9)
        save_file(nn.Linear(4, 3).state_dict(), tmp_path / "weights.safetensors")
        (tmp_path / "job.toml").write_text(JOB)
        opening, model, _ = opening_of(tmp_path, *overrides)
        return opening, model

    return server


def opened(opening, tasks=None):
    return DeviceRun(opening, Participant(name="a", regime="federated"), None, tasks)


def test_the_start_is_not_needed_if_all_is_exchanged(server, tmp_path):
    opening, _ = server()
    (tmp_path / "weights.safetensors").unlink()
    assert opened(opening).layout.size == 15


@pytest.mark.parametrize("key", ["exclude", "personal"])
def test_what_is_not_exchanged_comes_from_the_start(server, tmp_path, key):
    opening, model = server(f"exchange.{key}=['bias']")
    for tasks in (None, tmp_path):
        run = opened(opening, tasks)
        assert run.model.bias.equal(model.bias)
    update, _, _ = train(run, start=run.layout.gather(model))
    assert update.abs().max() > 0


def test_a_start_that_is_missing_or_another_is_refused(server, tmp_path):
    """Its bias differs by less than what fingerprints of frozen parameters are compared by."""
    opening, model = server("exchange.exclude=['bias']")
    other = {"weight": model.weight.detach(), "bias": model.bias.detach() + 1e-7}
    save_file(other, tmp_path / "weights.safetensors")
    with pytest.raises(JobError, match=r"has the digest \w+ here, and the job is for \w+"):
        opened(opening, tmp_path)
    (tmp_path / "weights.safetensors").unlink()
    with pytest.raises(JobError, match=f"neither a file nor a folder {tmp_path}/weights.safeten"):
        opened(opening, tmp_path)


def test_a_server_cannot_name_files_outside_of_the_owners_folder(server, tmp_path):
    opening, _ = server("exchange.exclude=['bias']", f"model.start={tmp_path}/weights.safetensors")
    assert opened(opening).examples == 20
    with pytest.raises(JobError, match=r"is not below .*, where this machine keeps what its owner"):
        opened(opening, tmp_path)


def test_a_model_of_another_shape_is_the_servers_problem_first(server, write_task):
    opening, _ = server("exchange.exclude=['bias']")
    write_task("def model(self):\n    return nn.Linear(4, 5)")
    with pytest.raises(TaskError, match="this device's model is not the server's: parameter 'wei"):
        opened(opening)
