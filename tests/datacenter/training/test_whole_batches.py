"""Masks, losses of whole batches, orders and several optimizers on ranks, as in one process."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from isthmus.errors import TaskError, UserError
from isthmus.task import Participant
from isthmus.task.definition import Parameters
from isthmus.task.optimizers import TaskOptimizers
from isthmus.task.scoring import build_model, losses, training_batches
from isthmus.task.scoring.steps import training_step
from isthmus_datacenter.parallel.parallel_dims import ParallelDims
from isthmus_datacenter.training.data import ExampleOrder
from isthmus_datacenter.training.whole_batches import check_layout

STEPS = 4
CPU = torch.device("cpu")


def step_loss(task: Any, model: nn.Module, batches: list[Any], name: str) -> torch.Tensor:
    """The loss of one step of several replicas."""
    if type(task).__name__ in ("Masked", "Weighted"):
        units = [losses(task, model, inputs, target)[1] for inputs, target in batches]
        return sum(each.total() for each in units) / sum(each.count() for each in units)  # type: ignore[no-any-return]  # at least one
    return torch.stack([training_step(task, model, batch, name).loss for batch in batches]).mean()


def by_hand(setup: Any, replicas: int) -> torch.Tensor:
    """The parameters after the same training in one process."""
    task, job = setup.task, setup.job
    model = build_model(task, job.seed)
    data = task.local_data(None)
    order = ExampleOrder.of(task, data, len(data), replicas, job)
    parameters = Parameters(model.named_parameters())
    participant = Participant(name="test", regime="datacenter")
    optimizers = TaskOptimizers(task.optimizer(parameters, participant), parameters)
    for step in range(STEPS):
        batches = []
        for replica in range(replicas):
            rows = order.indices(step, step + 1, replica)
            batches += training_batches(task, data, list(rows), len(rows), CPU)
        for name in optimizers.named:
            optimizers.zero_grad()
            with optimizers.alone(name) if name else contextlib.nullcontext():
                step_loss(task, model, batches, name).backward()  # type: ignore[no-untyped-call]
            optimizers.step(only=name)
    vector: torch.Tensor = setup.layout.gather(model)
    return vector


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("Masked", {"zero_stage": 1}),
        ("ByBatch", {"zero_stage": 3, "batch_size": 5}),
        ("InTurns", {"zero_stage": 0}),
    ],
)
def test_ranks_train_as_one_process_and_continue_exactly(
    make_setup: Any, warm_datacenter: Any, decode: Any, name: str, section: dict[str, Any]
) -> None:
    setup = make_setup(name, **section)
    ends = []
    for run, stops in ((name, [0, STEPS]), (f"{name}-in-two", [0, 3, STEPS])):
        warm_datacenter.open(run, setup)
        for first, until in itertools.pairwise(stops):
            trained, _ = warm_datacenter.train(run, first, until)
        ends.append(decode(warm_datacenter.export(run, STEPS), setup.layout))
    assert torch.equal(*ends)
    torch.testing.assert_close(ends[0], by_hand(setup, replicas=2), rtol=1e-4, atol=1e-5)
    figures = {"ByBatch": {"loss", "spread"}, "InTurns": {"loss", "lower_loss", "upper_loss"}}
    assert set(trained.training) >= figures.get(name, {"loss"})


def test_epochs_have_whole_batches_of_the_task_s_order(make_setup: Any) -> None:
    setup = make_setup("ByBatch", batch_size=5)
    data = setup.task.local_data(None)
    order = ExampleOrder.of(setup.task, data, len(data), 2, setup.job)
    batches = [list(order.indices(step, step + 1, 0)) for step in range(7)]
    assert all(batch == list(range(batch[0], batch[0] + 5)) for batch in batches)
    small = make_setup("ByBatch", batch_size=51)
    with pytest.raises(TaskError, match=r"order\(\) returned 50 indices, fewer than a batch"):
        ExampleOrder.of(small.task, data, len(data), 2, small.job)


@pytest.mark.parametrize(
    ("name", "section", "sentence"),
    [
        ("ByBatch", {"pipeline_parallel": 2}, r"training_step\(\) calls the whole model"),
        ("InTurns", {"zero_stage": 3}, r"set datacenter\.zero_stage = 0"),
    ],
)
def test_layouts_without_whole_models_are_refused(
    make_setup: Any, warm_datacenter: Any, name: str, section: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        warm_datacenter.open(f"refused-{name}", make_setup(name, **section))


def test_weighted_means_of_ranks_are_those_of_all_rows(
    make_setup: Any, warm_datacenter: Any, decode: Any
) -> None:
    setup = make_setup("Weighted", zero_stage=1)
    warm_datacenter.open("weighted", setup)
    trained, _ = warm_datacenter.train("weighted", 0, STEPS, evaluate=True)
    end = decode(warm_datacenter.export("weighted", STEPS), setup.layout)
    torch.testing.assert_close(end, by_hand(setup, replicas=2), rtol=1e-4, atol=1e-5)
    model = build_model(setup.task, setup.job.seed)
    setup.layout.scatter(end, model)
    inputs, target = setup.task.eval_data().tensors
    with torch.no_grad():
        output = model(inputs)
    words = torch.tensor([0.0, 7.0, 200.0])[target]
    right = (output.argmax(-1) == target).float()
    loss = nn.functional.cross_entropy(output, target, reduction="none")
    assert trained.evaluation["accuracy"] == pytest.approx(
        float((right * words).sum() / words.sum())
    )
    weights = target + 0.25
    assert trained.evaluation["loss"] == pytest.approx(
        float((loss * weights).sum() / weights.sum())
    )


def test_a_negative_weight_on_a_rank_is_refused(make_setup: Any, warm_datacenter: Any) -> None:
    setup = make_setup("Weighted", {"weight": -1.0}, zero_stage=1)
    warm_datacenter.open("negative", setup)
    with pytest.raises(
        UserError, match=r"metrics\(\)\['accuracy'\] returned a weight that is negat"
    ):
        warm_datacenter.train("negative", 0, 1, evaluate=True)


@pytest.mark.parametrize("name", ["training_step", "evaluation_step"])
def test_a_task_that_calls_the_model_itself_does_not_share_positions(
    name: str, make_setup: Any
) -> None:
    """It could read hidden states between blocks, which nothing compares."""
    task = make_setup("Table").task
    dims = ParallelDims(ranks=2, zero_stage=0, tensor=2)
    shares = dataclasses.replace(dims, sequence=True)
    check_layout(task, shares)
    setattr(task, name, lambda *_: None)
    check_layout(task, dims)
    with pytest.raises(TaskError, match=rf"^{name}\(\) calls the model itself, .* remove it$"):
        check_layout(task, shares)
