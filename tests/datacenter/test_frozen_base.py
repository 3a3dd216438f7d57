"""Ranks hold frozen parameters in bfloat16, as a plain loop over such a model would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.datacenter.conftest import HERE
from torch import nn

from isthmus.errors import JobError, TaskError
from isthmus.job import with_changes, write_job
from isthmus.start.files import StartFiles
from isthmus.start.names import plain
from isthmus.task import Participant
from isthmus.task.scoring import build_model
from isthmus.tensors.division import divide
from isthmus.wire import link_pb2
from isthmus_datacenter.training.data import ExampleOrder
from isthmus_datacenter.virtual import VirtualRun

STEPS = 4
START = "start.safetensors"
SETTINGS = {"optimizer": "SGD", "options": {"lr": 0.5}}


@pytest.fixture
def adapted(make_setup: Any, tmp_path: Path) -> Any:
    """A job whose frozen parameters are in a file, with keys of `[datacenter]`."""

    def adapted(name: str = "Adapted", **section: Any) -> Any:
        prepared = make_setup(name, SETTINGS, **section)
        path = tmp_path / START
        model = build_model(prepared.task, 99)
        frozen = {plain(key): each for key, each in model.state_dict().items() if "lora" not in key}
        save_file(frozen, path)
        changes = {
            "model.start": str(path),
            "model.sha256": StartFiles.find(path).digest(),
            "model.fresh": ["*lora_*"] if len(frozen) < len(model.state_dict()) else [],
            "datacenter.frozen_dtype": "bfloat16",
        }
        return type(prepared)(with_changes(prepared.job, changes))

    return adapted


def in_bfloat16(prepared: Any, folder: Path) -> nn.Module:
    """The model, by PyTorch alone: adapters of the seed over what the file has, rounded."""
    model = build_model(prepared.task, prepared.job.seed)
    stored = load_file(folder / START)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            parameter.data = stored[plain(name)].to(torch.bfloat16)
    return model


def movement(prepared: Any, model: nn.Module, replicas: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a plain loop makes of the model, and what it began with."""
    layout = prepared.layout
    start = layout.gather(model)
    participant = Participant(name="test", regime="datacenter")
    data = prepared.task.local_data(participant)
    size = replicas * prepared.job.datacenter.batch_size
    order = ExampleOrder(examples=len(data), replicas=1, batch_size=size, seed=prepared.job.seed)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = prepared.task.optimizer(trained, participant)
    for step in range(STEPS):
        rows = [data[index] for index in order.indices(step, step + 1, 0)]
        inputs, target = (torch.stack(column) for column in zip(*rows, strict=True))
        optimizer.zero_grad()
        prepared.task.loss(prepared.task.forward(model, inputs), target).mean().backward()
        optimizer.step()
    return layout.gather(model), start


@pytest.mark.parametrize(
    "layout",
    [
        {"zero_stage": 0},
        {"zero_stage": 2, "accumulate": 2},
        {"zero_stage": 3},
        {"zero_stage": 3, "checkpoint_activations": True},
        {"zero_stage": 3, "checkpoint_activations": "operators"},
    ],
    ids=str,
)
def test_steps_of_ranks_are_those_of_a_plain_loop(
    layout: dict[str, Any], adapted: Any, on_ranks: Any, tmp_path: Path
) -> None:
    prepared = adapted(**layout)
    target = tmp_path / "trained"
    target.write_bytes(prepared.layout.header + bytes(4 * prepared.layout.size))
    arguments = (prepared.open_command(), STEPS, str(target), False)
    results = on_ranks(2, "trained_from_start", *arguments)
    assert all(built for built, _ in results)
    found = prepared.layout.decode(bytearray(target.read_bytes()))
    expected, start = movement(prepared, in_bfloat16(prepared, tmp_path), 2)
    moved = (expected - start).norm()
    assert moved > 1e-2
    assert (found - expected).norm() < 1e-5 * moved


def test_steps_of_a_simulated_datacenter_are_those_of_a_plain_loop(
    adapted: Any, tmp_path: Path
) -> None:
    prepared = adapted()
    layout = prepared.layout
    work = link_pb2.OpenRun(run_id="run", job=write_job(prepared.job), base=str(HERE))
    work.layout = layout.header
    run = VirtualRun(work, "test", None)
    types = {each.requires_grad: each.dtype for each in run.model.parameters()}
    assert types == {True: torch.float32, False: torch.bfloat16}
    expected, start = movement(prepared, in_bfloat16(prepared, tmp_path), 1)
    asked = link_pb2.TrainSteps(run_id="run", from_step=0, until_step=STEPS, hand_back=True)
    _, payload = run.train(asked, layout.encode(start), 0.0)
    moved = (expected - start).norm()
    assert (layout.decode(payload) - expected).norm() < 1e-5 * moved


def test_personal_adapters_have_the_values_of_the_seed_on_ranks(
    adapted: Any, tmp_path: Path
) -> None:
    """Devices train them; on ranks nobody does, and no file has them."""
    prepared = adapted()
    prepared = type(prepared)(with_changes(prepared.job, {"exchange.personal": ["*.3.*lora_*"]}))
    division = divide(build_model(prepared.task, prepared.job.seed), prepared.job.exchange)
    assert division.personal.size
    work = link_pb2.OpenRun(run_id="run", job=write_job(prepared.job), base=str(HERE))
    work.layout = division.exchanged.header
    run = VirtualRun(work, "test", None)
    expected = in_bfloat16(prepared, tmp_path)
    own = {name: each for name, each in run.model.named_parameters() if ".3." in name}
    for name, each in expected.named_parameters():
        if name in own and "lora" in name:
            assert own[name].equal(each), name
            assert own[name].dtype == torch.float32


def test_ranks_with_other_weights_than_the_server_are_refused(adapted: Any, tmp_path: Path) -> None:
    prepared = adapted()
    stored = load_file(tmp_path / START)
    work = link_pb2.OpenRun(run_id="run", job=write_job(prepared.job), base=str(HERE))
    work.layout = prepared.layout.header
    save_file({name: each + 1 for name, each in stored.items()}, tmp_path / START)
    with pytest.raises(JobError, match=r"has the digest .* here, and the job is for"):
        VirtualRun(work, "test", None)


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"tensor_parallel": 2}, "needs tensor_parallel = 1, as ranks compare a partitioned model"),
        ({"pipeline_parallel": 2}, "needs pipeline_parallel = 1"),
        ({"precision": "bf16"}, 'needs precision = "fp32", which has layers compute in other'),
        ({"offload": "optimizer"}, 'needs offload = "none"'),
    ],
)
def test_layouts_in_which_it_would_be_another_model_are_refused(
    section: dict[str, Any], reason: str, make_setup: Any
) -> None:
    with pytest.raises(ValueError, match=reason):
        make_setup("Adapted", frozen_dtype="bfloat16", **section)


def test_a_job_without_files_or_a_model_without_frozen_parameters_is_refused(
    make_setup: Any, adapted: Any
) -> None:
    with pytest.raises(ValueError, match=r"datacenter\.frozen_dtype='bfloat16' is for frozen"):
        make_setup("Adapted", frozen_dtype="bfloat16")
    prepared = adapted("Table")
    work = link_pb2.OpenRun(run_id="run", job=write_job(prepared.job), base=str(HERE))
    work.layout = prepared.layout.header
    with pytest.raises(TaskError, match=r"datacenter\.frozen_dtype is for parameters that are not"):
        VirtualRun(work, "test", None)
