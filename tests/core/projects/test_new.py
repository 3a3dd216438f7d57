"""`isthmus new` writes projects that run, on made-up data and on the user's."""

from __future__ import annotations

import shutil
import tomllib

import pytest
import torch
from click.testing import CliRunner

from isthmus.errors import TaskError
from isthmus.job.commands import check
from isthmus.job.promises import needs_of
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
    text = (folder / "README.md").read_text()
    assert f"task.source=my_{kind}/{name}" in text
    needs = needs_of(load_job(folder / "job.toml", ["federated.clients=0"]))
    for need in needs:  # beyond what a device does by default
        assert f"`privacy.{need}`" in text or need.startswith(("counts", "weights"))


def write_data(folder, kind, count):
    """A file of `count` examples."""
    folder.mkdir(parents=True)
    if kind == "tabular":
        (folder / "a.csv").write_text("".join(f"{n / 2}, {n}, {n % 3}\n" for n in range(count)))
    elif kind == "image":
        images = torch.zeros(count, 3, 8, 8, dtype=torch.uint8)
        torch.save({"images": images, "labels": torch.arange(count) % 3}, folder / "a.pt")
    else:
        (folder / "a.txt").write_text("x" * (32 * count + 1))


def task_of(folder, kind, data):
    settings = {"tabular": ["inputs=2"], "image": ["channels=3"], "language": []}[kind]
    changes = [f"task.settings.{each}" for each in ["made_up=false", *settings]]
    job = load_job(folder / "job.toml", changes)
    return load_task(job.task.source, job.task.settings, base=folder, data=data)


@pytest.mark.parametrize(
    ("kind", "shape"), [("tabular", (2,)), ("image", (3, 8, 8)), ("language", (32,))]
)
def test_simulated_devices_share_the_private_data_of_the_user(tmp_path, kind, shape):
    data = tmp_path / "data"
    write_data(data / "private", kind, 10)
    task = task_of(made(tmp_path, kind), kind, data)
    shards = [(number, 4) for number in range(4)]
    parts = (task.local_data, task.validation_data)
    simulated = [len(part(device(shard))) for part in parts for shard in shards]
    assert sum(simulated) == sum(len(part(device(None))) for part in parts) == 10
    inputs, target = task.local_data(device((1, 4)))[0]
    assert tuple(inputs.shape) == shape
    values = task.loss(task.forward(task.model(), inputs[None]), target[None])
    assert torch.isfinite(values).all()


@pytest.mark.parametrize("kind", ["tabular", "image", "language"])
@pytest.mark.parametrize("read", ["private", "public", "held_out"])
def test_each_side_reads_only_its_own_data(tmp_path, kind, read):
    """With data of one side only, that side reads them, and the others say what they lack."""
    data = tmp_path / "data"
    write_data(data / read, kind, 5)
    task = task_of(made(tmp_path, kind), kind, data)
    rank = Participant(name="rank", regime="datacenter")
    sides = {
        "private": lambda: [*task.local_data(device(None)), *task.validation_data(device(None))],
        "public": lambda: task.local_data(rank),
        "held_out": task.eval_data,
    }
    assert len(sides.pop(read)()) == 5
    for name, side in sides.items():
        with pytest.raises(TaskError, match=f"^there is no folder {data / name}; make it, and put"):
            side()


def test_made_up_data_differ_between_the_sides(tmp_path):
    folder = made(tmp_path, "tabular")
    job = load_job(folder / "job.toml")
    task = load_task(job.task.source, job.task.settings, base=folder)
    sides = [
        task.local_data(Participant(name="rank", regime="datacenter")),
        task.local_data(device((0, 2))),
        task.local_data(device((1, 2))),
        task.eval_data(),
    ]
    assert len({tuple(side[1][0].tolist()) for side in sides}) == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", " has no rows; write one in each line, or remove the file"),
        ("\n", " has no rows"),
        ("1,2,0\n1,b,0\n", ", line 2, column 2 is 'b', which is no finite number; replace it"),
        ("nan,2,0\n", ", line 1, column 1 is 'nan', which is no finite number"),
        ("1,2,0\n\n1,0\n", ", line 3 has 2 columns, and task.settings.inputs = 2 needs 3"),
        ("1,2,3\n", ", line 1, column 3 is '3', and with task.settings.classes = 3 a class is"),
        ("1,2,0.5\n", ", line 1, column 3 is '0.5', and with"),
        ("1,2,\udcff\n", " is no CSV file in UTF-8"),
    ],
)
def test_a_bad_table_is_one_sentence(tmp_path, text, said):
    file = tmp_path / "data/private/a.csv"
    file.parent.mkdir(parents=True)
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    task = task_of(made(tmp_path, "tabular"), "tabular", tmp_path / "data")
    with pytest.raises(TaskError) as raised:
        task.local_data(device(None))
    assert str(raised.value).startswith(f"{file}{said}")


def pictures(**changed):
    return {
        "images": torch.zeros(2, 3, 8, 8, dtype=torch.uint8),
        "labels": torch.arange(2),
    } | changed


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ({"images": torch.zeros(2)}, "{file} is no file of torch.save"),
        (pictures(images=torch.zeros(2, 3, 8, 8)), '"images" in {file} are torch.float32 of the'),
        (pictures(images=torch.zeros(2, 1, 8, 8, dtype=torch.uint8)), '"images" in {file} are'),
        (
            pictures(images=torch.zeros(0, 3, 8, 8, dtype=torch.uint8), labels=torch.arange(0)),
            "{file} has no images; save some in it",
        ),
        (pictures(labels=torch.arange(3)), '"labels" in {file} are torch.int64 of the shape (3,)'),
        (pictures(labels=torch.tensor([0, 3])), "the label of image 2 in {file} is 3, and with"),
    ],
)
def test_a_bad_file_of_images_is_one_sentence(tmp_path, saved, said):
    file = tmp_path / "data/private/a.pt"
    file.parent.mkdir(parents=True)
    torch.save(saved, file)
    task = task_of(made(tmp_path, "image"), "image", tmp_path / "data")
    with pytest.raises(TaskError) as raised:
        task.local_data(device(None))
    assert str(raised.value).startswith(said.format(file=file))


def test_images_of_two_sizes_and_other_files_are_one_sentence(tmp_path):
    folder = tmp_path / "data/private"
    write_data(folder, "image", 2)
    torch.save(pictures(images=torch.zeros(2, 3, 4, 9, dtype=torch.uint8)), folder / "b.pt")
    task = task_of(made(tmp_path, "image"), "image", tmp_path / "data")
    said = f"the images of {folder}/b.pt have 4 x 9 pixels, and those of {folder}/a.pt 8 x 8"
    with pytest.raises(TaskError, match=said):
        task.local_data(device(None))
    (folder / "b.pt").write_text("no tensors")
    with pytest.raises(TaskError, match=f"^{folder}/b.pt is no file of torch.save"):
        task.local_data(device(None))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            b"x" * 32,
            " has 32 characters, and a piece of task.settings.length = 32 needs 33; remove",
        ),
        (b"x\n\xff", ", line 2 is not in UTF-8; save the file so"),
    ],
)
def test_a_bad_text_is_one_sentence(tmp_path, text, said):
    file = tmp_path / "data/private/a.txt"
    file.parent.mkdir(parents=True)
    file.write_bytes(text)
    task = task_of(made(tmp_path, "language"), "language", tmp_path / "data")
    with pytest.raises(TaskError) as raised:
        task.local_data(device(None))
    assert str(raised.value).startswith(f"{file}{said}")


def test_a_folder_without_files_is_one_sentence(tmp_path):
    (tmp_path / "data/private").mkdir(parents=True)
    for kind, name in [("tabular", "csv"), ("image", "pt"), ("language", "txt")]:
        task = task_of(made(tmp_path, kind), kind, tmp_path / "data")
        with pytest.raises(TaskError, match=rf"private has no file \*\.{name}; put "):
            task.local_data(device(None))


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
