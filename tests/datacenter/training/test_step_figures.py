"""Figures of every n-th step are those of plain PyTorch, in each layout, and change no result."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from isthmus.job.datacenter import DatacenterSection
from isthmus.task import Participant
from isthmus.task.definition import Parameters
from isthmus.task.scoring import build_model
from isthmus_datacenter.training.data import ExampleOrder
from isthmus_datacenter.training.step_figures import StepRecorder


def steps(first: int, until: int, **more: Any) -> dict[str, Any]:
    return {"op": "train_steps", "run_id": "run", "from_step": first, "until_step": until, **more}


def plain_figures(setup: Any, count: int, clip: float | None = None) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step, in one process."""
    model = build_model(setup.task, setup.job.seed)
    participant = Participant(name="test", regime="datacenter")
    data = setup.task.local_data(participant)
    optimizer = setup.task.optimizer(list(model.parameters()), participant)
    section = setup.job.datacenter
    size = section.replicas(section.ranks) * section.batch_size
    order = ExampleOrder(examples=len(data), replicas=1, batch_size=size, seed=setup.job.seed)
    figures = []
    for step in range(count):
        rows = [data[index] for index in order.indices(step, step + 1, 0)]
        inputs, target = (torch.stack(column) for column in zip(*rows, strict=True))
        optimizer.zero_grad()
        loss = setup.task.loss(setup.task.forward(model, inputs), target).mean()
        loss.backward()
        limit = math.inf if clip is None else clip
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
        figures.append((float(loss.detach()), float(norm)))
        optimizer.step()
    return figures


LAYOUTS = {
    "ddp": (2, {"zero_stage": 0}),
    "zero3": (2, {"zero_stage": 3}),
    "tensor": (2, {"tensor_parallel": 2}),
    "pipeline": (2, {"pipeline_parallel": 2}),
    "tensor and pipeline": (4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "accumulated and clipped": (2, {"accumulate": 2, "clip_norm": 0.05}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_figures_are_those_of_plain_pytorch(
    layout: str, make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    ranks, section = LAYOUTS[layout]
    section = {"batch_size": 4, "ranks": ranks, **section}
    options = {"optimizer": "SGD", "options": {"lr": 0.125}}
    setup = make_setup("Gpt", options, log_steps=3, **section)
    results = []
    for name, log_steps in (("with", 3), ("without", 0)):
        opening = make_setup("Gpt", options, log_steps=log_steps, **section).open_command()
        file = tmp_path / name
        file.write_bytes(setup.layout.header + bytes(4 * setup.layout.size))
        command = steps(0, 7, result=str(file))
        values = on_ranks(ranks, "train", [(opening, command, str(tmp_path / f"{name}-state"))])
        results.append((values, file.read_bytes()))
    (values, model), (without, same_model) = results
    assert model == same_model
    assert without[0][0]["step_figures"] == []
    figures = [each[0]["step_figures"] for each in values]
    assert all(len(each) == 2 for each in figures)
    recorded = [(each["step"], each["loss"], each["gradient_norm"]) for each in figures[0]]
    plain = plain_figures(setup, 7, section.get("clip_norm"))
    for (step, loss, norm), index in zip(recorded, (2, 5), strict=True):
        assert step == index + 1
        assert (loss, norm) == pytest.approx(plain[index], rel=1e-4)
    assert all(each["learning_rate"] == 0.125 for each in figures[0])
    assert all(each["units_per_second"] > 0 for each in figures[0])
    for other in figures[1:]:
        assert [each["loss"] for each in other] == [each["loss"] for each in figures[0]]


def test_an_interrupted_round_has_the_figures_from_before(
    make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    setup = make_setup("Table", {}, batch_size=2, log_steps=2)
    opening = setup.open_command()
    whole = on_ranks(2, "train", [(opening, steps(0, 9), str(tmp_path / "whole"))])[0][0]
    state = str(tmp_path / "state")
    resumed = on_ranks(2, "train_interrupted", (opening, steps(0, 9), state), 5)[0]
    assert resumed["resumed"] == 5
    listed = [
        [(each["step"], each["loss"], each["gradient_norm"]) for each in values["step_figures"]]
        for values in (whole, resumed)
    ]
    assert [step for step, *_ in listed[0]] == [2, 4, 6, 8]
    assert listed[0] == listed[1]


def test_several_optimizers_have_one_gradient(
    make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    """Its norm is that of both parts, each the gradient of the loss that it is trained with."""
    setup = make_setup("InTurns", {}, ranks=1, batch_size=4, zero_stage=0, log_steps=1)
    [[values]] = on_ranks(1, "train", [(setup.open_command(), steps(0, 1), str(tmp_path))])
    model = build_model(setup.task, setup.job.seed)
    data = setup.task.local_data(Participant(name="test", regime="datacenter"))
    order = ExampleOrder(examples=len(data), replicas=1, batch_size=4, seed=setup.job.seed)
    rows = [data[index] for index in order.indices(0, 1, 0)]
    batch = [torch.stack(column) for column in zip(*rows, strict=True)]
    optimizers = setup.task.optimizer(Parameters(model.named_parameters()), None)
    squares = 0.0
    for name, optimizer in optimizers.items():
        model.zero_grad()
        setup.task.training_step(model, batch, optimizer=name).backward()
        own = [each for group in optimizer.param_groups for each in group["params"]]
        squares += sum(float(each.grad.square().sum()) for each in own)
        optimizer.step()
    [figures] = values["step_figures"]
    assert figures["gradient_norm"] == pytest.approx(math.sqrt(squares), rel=1e-5)


def test_a_step_that_overflows_has_no_figures() -> None:
    recorder = StepRecorder(2, torch.device("cpu"), 1)
    assert [step for step in range(6) if recorder.is_due(step)] == [1, 3, 5]
    for step, norm in ((1, 2.0), (3, math.inf), (5, 4.0)):
        recorder.count(8)
        recorder.record(step, torch.tensor(16.0), 8, [torch.tensor(norm)], None)
    recorded = recorder.finish()
    assert [(each.step, each.loss, each.gradient_norm) for each in recorded] == [
        (2, 2.0, 2.0),
        (6, 2.0, 4.0),
    ]


def test_numbers_of_steps_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="log_steps=2 gives figures of 2500 steps in a round, and"):
        DatacenterSection(steps=5000, log_steps=2)
    assert DatacenterSection(steps=5000, log_steps=5).log_steps == 5
    for chosen in ([5, 4], [1, 101]):
        with pytest.raises(ValueError, match="first and the last step of a trace"):
            DatacenterSection(profile_steps=chosen)
    with pytest.raises(ValueError, match="log_steps=1 does not work with it, because nobody may"):
        DatacenterSection.model_validate(
            {
                "ranks": 1,
                "zero_stage": 0,
                "log_steps": 1,
                "privacy": {"epsilon": 1.0, "delta": 1e-6, "examples": 100, "clip": 1.0},
            }
        )


def test_each_rank_writes_a_trace_of_the_chosen_steps(
    make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    """Over two rounds; the model is that of a run without a trace."""
    models = []
    for name, section in (("traced", {"profile_steps": [3, 5]}), ("not", {})):
        setup = make_setup("Table", {}, batch_size=2, **section)
        file = tmp_path / f"{name}.model"
        file.write_bytes(setup.layout.header + bytes(4 * setup.layout.size))
        notes = []
        for first in (0, 4, 8):
            command = steps(first, first + 4, result=str(file))
            operation = (setup.open_command(), command, str(tmp_path / name / "run"))
            notes.append(on_ranks(2, "train", [operation])[0][0]["notes"])
        models.append(file.read_bytes())
        folder = tmp_path / name / "profiles" / "run"
        if name == "not":
            assert notes == [[], [], []]
            assert not folder.exists()
            continue
        assert notes == [
            [f"a trace of each rank is in {folder} (steps-3-4)"],
            [f"a trace of each rank is in {folder} (steps-5-5)"],
            [],
        ]
        assert sorted(each.name for each in folder.iterdir()) == [
            f"rank-{rank}.{part}.json.gz" for rank in (0, 1) for part in ("steps-3-4", "steps-5-5")
        ]
        for part, count in (("steps-3-4", 2), ("steps-5-5", 1)):
            trace = json.loads(gzip.decompress((folder / f"rank-1.{part}.json.gz").read_bytes()))
            names = [each.get("name", "") for each in trace["traceEvents"]]
            assert sum(each.startswith("Optimizer.step#") for each in names) == count
            assert any("aten::linear" in each for each in names)
            assert "[memory]" in names
    assert models[0] == models[1]


def test_a_trace_that_cannot_be_written_is_said_and_ends_nothing(
    make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    (tmp_path / "profiles").write_text("")
    setup = make_setup("Table", {}, batch_size=2, profile_steps=[1, 1])
    operation = (setup.open_command(), steps(0, 2), str(tmp_path / "run"))
    values = on_ranks(2, "train", [operation])[0][0]
    assert values["steps"] == 2
    [note] = values["notes"]
    assert note.startswith(
        f"the trace of rank 0 cannot be written to {tmp_path}/profiles/run/rank-0"
    )
