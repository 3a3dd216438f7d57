"""`isthmus new` writes projects that run, on made-up data and on the user's."""

from __future__ import annotations

import shutil
import tomllib

import pytest
import torch
from click.testing import CliRunner

from isthmus.job.commands import check
from isthmus.job.schema import load_job
from isthmus.projects.commands import KINDS, new
from isthmus.task import Participant, load_task


def device(shard):
    return Participant(name="device", regime="federated", shard=shard)


def made(tmp_path, kind):
    folder = tmp_path / f"my_{kind}"
    done = CliRunner().invoke(new, [str(folder), "--kind", kind], catch_exceptions=False)
    assert done.output.splitlines()[-1] == f"next: isthmus run {folder / 'job.toml'}"
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_a_new_project_passes_the_check_of_jobs(tmp_path, kind, request):
    folder = made(tmp_path, kind)
    if kind == "chat":  # a script makes what its model starts from
        shutil.copytree(request.getfixturevalue("chat_project") / "base", folder / "base")
    done = CliRunner().invoke(check, [str(folder / "job.toml")], catch_exceptions=False)
    assert "is fine: 8 rounds" in done.output
    assert not any("PROJECT" in path.read_text() for path in folder.iterdir() if path.is_file())
    name = tomllib.loads((folder / "job.toml").read_text())["task"]["source"]
    assert f"task.source=my_{kind}/{name}" in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("kind", "shape", "settings"),
    [("tabular", (2,), "inputs=2"), ("image", (3, 8, 8), "channels=3"), ("language", (32,), "")],
)
def test_simulated_devices_share_a_file_of_the_user(tmp_path, kind, shape, settings):
    folder, file = made(tmp_path, kind), tmp_path / "data"
    if kind == "tabular":
        file.write_text("".join(f"{n / 2}, {n}, {n % 3}\n" for n in range(10)))
    elif kind == "image":
        images = torch.zeros(10, 3, 8, 8, dtype=torch.uint8)
        torch.save({"images": images, "labels": torch.arange(10) % 3}, file)
    else:
        file.write_text("It was a dark night. " * 16)
    changes = ["task.settings.made_up=false", *([f"task.settings.{settings}"] if settings else [])]
    job = load_job(folder / "job.toml", changes)
    task = load_task(job.task.source, job.task.settings, base=folder, data=file)
    shards = [(number, 4) for number in range(4)]
    parts = (task.local_data, task.validation_data)
    simulated = [len(part(device(shard))) for part in parts for shard in shards]
    assert sum(simulated) == sum(len(part(device(None))) for part in parts)
    inputs, target = task.local_data(device((1, 4)))[0]
    assert tuple(inputs.shape) == shape
    values = task.loss(task.forward(task.model(), inputs[None]), target[None])
    assert torch.isfinite(values).all()
    assert task.eval_data() is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a b", "'a b' cannot be the name of a project"),
        ("class", "cannot be"),
        ("1-a", "cannot be"),
    ],
)
def test_a_name_that_no_task_can_have_is_refused(tmp_path, name, said):
    done = CliRunner().invoke(new, [f"{tmp_path}/{name}"])
    assert said in str(done.exception)


def test_a_hyphen_becomes_an_underscore(tmp_path):
    done = CliRunner().invoke(new, [f"{tmp_path}/my-model"], catch_exceptions=False)
    assert done.output.startswith("the project is named my_model: ")
    assert done.output.endswith(f"next: isthmus run {tmp_path}/my_model/job.toml\n")
    assert 'name = "my_model"' in (tmp_path / "my_model/job.toml").read_text()


def test_files_in_folders_are_written_and_what_comes_first_is_said(tmp_path):
    folder = tmp_path / "talk"
    done = CliRunner().invoke(new, [str(folder), "--kind", "chat"], catch_exceptions=False)
    assert f"{folder}/data/private.jsonl\n" in done.output
    assert (folder / "data/private.jsonl").read_text().count("\n") == 72
    assert f"first: python {folder}/make_base.py\nnext: isthmus run" in done.output


def test_nothing_is_overwritten(tmp_path):
    folder = made(tmp_path, "tabular")
    assert "exists already" in str(CliRunner().invoke(new, [str(folder)]).exception)
