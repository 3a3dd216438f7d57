"""`isthmus export`: the final model as tensors or as a program, with a model card."""

import contextlib
import hashlib
import importlib.util
import shutil

import pytest
import torch
from click.testing import CliRunner

from isthmus.errors import UserError
from isthmus.task import load_task
from isthmus_server.cli.export import export
from isthmus_server.python.saved_model import load_model
from isthmus_server.read.export.program import export_program
from isthmus_server.storage.store import Store


@pytest.fixture
def run_dir(deployment):
    """The directory of a finished run, with another task each time."""

    async def run_dir(methods="pass", *overrides):
        await deployment.start(methods)
        await deployment.run("run", "rounds=2", *overrides)
        return deployment._folder / "run"

    return run_dir


def invoke(*arguments):
    result = CliRunner().invoke(export, [str(argument) for argument in arguments])
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


async def test_the_program_computes_what_the_model_does_and_has_a_card(run_dir, tmp_path):
    directory = await run_dir()
    invoke(directory, "--format", "torch-export", "--output", tmp_path / "out")
    model = load_model(directory)
    program = torch.export.load(tmp_path / "out/model.pt2").module()
    for count in (1, 7):
        inputs = torch.randn(count, 4)
        torch.testing.assert_close(program(inputs), model(inputs))

    invoke(directory)  # the tensors, next to the run
    data = (directory / "export/model.safetensors").read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    card = (directory / "export/MODEL_CARD.md").read_text()
    for line in (
        "# table",
        f"| SHA-256 | `{digest}` |",
        "| task | `task.py:Learn` |",
        "| rounds | 2 (2 federated) |",
        "| model of round | 2 |",
        "3 devices trained on data that stayed on them. The server received only sums of their "
        "updates over at least 3 devices (secure aggregation).",
    ):
        assert line in card.splitlines(), card
    assert "| `accuracy` | " in card
    assert data == (directory / "model.safetensors").read_bytes()


def test_a_run_without_a_final_model_is_not_exported(make_job, tmp_path):
    with contextlib.closing(Store.create(tmp_path / "run", make_job(), tmp_path)) as store:
        with pytest.raises(UserError, match="has no final model yet, it is running; `isthmus run"):
            invoke(store.directory)
        copy = shutil.copytree(store.directory, tmp_path / "copy")
        with pytest.raises(UserError, match=f"it is a copy of the run in {store.directory}: only"):
            invoke(copy)
        store.finish("finished", "its ServerApp has ended", None)
        with pytest.raises(UserError, match="was directed by a ServerApp, which keeps its own"):
            invoke(store.directory)


@pytest.mark.parametrize(
    ("methods", "sentence"),
    [
        (
            "def forward(self, model, inputs):\n"
            "    return model(inputs) if inputs.sum() > 0 else inputs",
            r"^torch.export cannot trace the model \(.*\); its forward\(\) may depend on values",
        ),
        ("def eval_data(self):\n    return None", r"has neither eval_data\(\) nor public_eval\(\)"),
    ],
)
def test_a_task_that_cannot_be_traced_is_refused(write_task, tmp_path, methods, sentence):
    task = load_task(f"{write_task(methods)}:Learn", {}, base=tmp_path)
    with pytest.raises(UserError, match=sentence):
        export_program(task, task.model().eval(), tmp_path / "model.pt2")


@pytest.mark.filterwarnings("ignore")
async def test_a_program_of_executorch_computes_what_the_model_does(run_dir, tmp_path):
    """Where ExecuTorch is installed; elsewhere one sentence says what to install."""
    directory = await run_dir()
    arguments = (directory, "--format", "executorch", "--output", tmp_path / "out")
    if importlib.util.find_spec("executorch") is None:
        with pytest.raises(UserError, match="pip install executorch"):
            invoke(*arguments)
        return
    from executorch.runtime import Runtime

    assert "for one example at a time" in invoke(*arguments)
    method = Runtime.get().load_program(tmp_path / "out/model.pte").load_method("forward")
    inputs = torch.randn(1, 4)
    torch.testing.assert_close(method.execute([inputs])[0], load_model(directory)(inputs))
