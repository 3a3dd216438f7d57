"""`isthmus model inspect` and `import`: what files have, and what would be loaded of them."""

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn

from isthmus.errors import JobError, UserError
from isthmus.start.files import StartFiles
from isthmus.task.model_commands import model

TIED = """
    def model(self):
        sizes = {"a": 4, "b": 4, "head": 3}
        layers = nn.ModuleDict({name: nn.Linear(4, size) for name, size in sizes.items()})
        layers["b"].weight = layers["a"].weight
        return layers
    """


@pytest.fixture
def folder(write_task, tmp_path):
    write_task(TIED)
    (tmp_path / "job.toml").write_text('name = "table"\n[task]\nsource = "task.py:Learn"\n')
    return tmp_path


def invoke(*arguments):
    """What the command printed; the error that it raised, if it did."""
    result = CliRunner().invoke(model, list(map(str, arguments)))
    if result.exception is not None:
        raise result.exception
    return result.output


def write(folder, **tensors):
    path = folder / "start.safetensors"
    save_file(tensors, path)
    return path


def test_the_tensors_of_a_file_are_listed_with_the_digest(tmp_path):
    path = write(
        tmp_path, weight=torch.zeros(3, 2), step=torch.tensor(1), bias=torch.zeros(3).half()
    )
    assert sorted(invoke("inspect", path).splitlines()) == [
        "bias    F16      (3)                  start.safetensors",
        f"path    {path}",
        f"sha256  {StartFiles.find(path).digest()}",
        "step    I64      ()                   start.safetensors",
        "tensors 1 in F16, 1 in F32, 1 in I64: 10 elements, 38 bytes",
        "weight  F32      (3, 2)               start.safetensors",
    ]
    with pytest.raises(UserError, match="has no weights"):
        invoke("inspect", tmp_path)


def test_what_would_be_loaded_is_shown_by_tensor(folder):
    linear = nn.Linear(4, 4)
    path = write(
        folder,
        **{
            "net.a.weight": linear.weight.detach().bfloat16(),
            "net.a.bias": linear.bias.detach(),
            "net.b.bias": linear.bias.detach().clone(),
            "net.old.weight": torch.zeros(2),
        },
    )
    settings = ["--set", "model.fresh=['head.*']", "--set", "model.unused=['*old*']"]
    lines = invoke("import", path, folder / "job.toml", *settings).splitlines()
    assert lines == [
        "a.weight = b.weight  float32 (4, 4)  <- net.a.weight BF16",
        "a.bias  float32 (4)  <- net.a.bias F32",
        "b.bias  float32 (4)  <- net.b.bias F32",
        "head.weight  float32 (3, 4)  <- the seed",
        "head.bias  float32 (3)  <- the seed",
        f"path    {path}",
        f"sha256  {StartFiles.find(path).digest()}",
    ]


def test_what_does_not_fit_is_marked_and_is_an_error(folder, capsys):
    path = write(folder, **{"a.weight": torch.zeros(4, 4), "c": torch.zeros(1)})
    result = CliRunner().invoke(model, ["import", str(path), str(folder / "job.toml")])
    assert isinstance(result.exception, JobError)
    assert "4 tensors of the model are not in it (a.bias, b.bias, head.weight and 1" in str(
        result.exception
    )
    assert result.output.splitlines() == [
        "a.weight = b.weight  float32 (4, 4)  <- a.weight F32",
        "a.bias  float32 (4)  <- MISSING",
        "b.bias  float32 (4)  <- MISSING",
        "head.weight  float32 (3, 4)  <- MISSING",
        "head.bias  float32 (3)  <- MISSING",
        "UNEXPECTED  <- c",
    ]


def test_paths_are_those_of_the_current_folder(folder, monkeypatch):
    (folder / 'in"ner').mkdir()
    write(folder / 'in"ner', **{"a.weight": torch.zeros(4, 4)})
    monkeypatch.chdir(folder / 'in"ner')
    settings = ["--set", "model.fresh=['head.*', '*bias']"]
    assert "a.weight F32" in invoke("import", "start.safetensors", "../job.toml", *settings)
