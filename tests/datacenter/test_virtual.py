"""A simulated datacenter trains exactly as one rank does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.errors import TaskError
from isthmus.task import Participant
from isthmus.task.definition import Parameters
from isthmus.task.scoring import build_model
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import describe
from isthmus.wire import link_pb2
from isthmus_datacenter.training.data import ExampleOrder
from isthmus_datacenter.virtual import VirtualDatacenter

PARTICIPANT = Participant(name="datacenter-0", regime="datacenter")


def send(worker: VirtualDatacenter, model: bytes | None = None, **work: Any) -> bytes:
    request = link_pb2.Request(id="request", **work)
    buffer = None if model is None else bytearray(model)
    _, payload = asyncio.run(worker.work(request, buffer, lambda progress: None))
    return b"" if payload is None else bytes(payload)


def train(worker: VirtualDatacenter, first: int, until: int, model: bytes | None = None) -> bytes:
    work = link_pb2.TrainSteps(run_id="run", from_step=first, until_step=until, hand_back=True)
    if model is not None:
        work.model.CopyFrom(describe(model))
    return send(worker, model, train_steps=work)


KINDS = [
    ("Table", {}),
    ("Table", {"settings": {"dropout": 0.5}}),
    ("InTurns", {}),
    ("ByBatch", {"accumulate": 2}),
    ("Normalised", {"accumulate": 2}),
]
"""Tasks with datacenter keys, with which one process rounds as a rank does."""


def test_a_simulated_datacenter_trains_as_one_rank_does(
    make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    setups = [make_setup(name, ranks=1, **keys) for name, keys in KINDS]
    results = [tmp_path / f"result-{number}" for number in range(len(KINDS))]
    works = []
    for setup, result in zip(setups, results, strict=True):
        result.write_bytes(setup.layout.header + bytes(4 * setup.layout.size))
        command = {"op": "train_steps", "run_id": "run", "until_step": 6, "result": str(result)}
        works.append((setup.open_command(), command, str(result.with_suffix(".state"))))
    on_ranks(1, "train", works)
    for setup, result, kind in zip(setups, results, KINDS, strict=True):
        worker = VirtualDatacenter()
        send(worker, open=setup.open_request("run"))
        assert train(worker, 0, 6) == result.read_bytes(), kind


def test_a_simulated_datacenter_keeps_the_state_before_its_last_command(make_setup: Any) -> None:
    setup = make_setup("Table", ranks=1, optimizer_on_load="keep")
    worker = VirtualDatacenter()
    send(worker, open=setup.open_request("run"))
    middle = train(worker, 0, 3)
    whole = train(worker, 3, 6)
    assert train(worker, 3, 6) == whole
    # After an absence, training from a model uses the current optimizer state.
    assert train(worker, 10, 13, middle) != train(worker, 10, 13, whole)
    late = VirtualDatacenter()
    send(late, open=setup.open_request("run"))
    assert train(late, 10, 13, middle) != middle


def test_a_simulated_datacenter_trains_in_float32_only(make_setup: Any) -> None:
    setup = make_setup("Table", ranks=1, precision="bf16")
    with pytest.raises(TaskError, match=r"in float32, .* has datacenter.precision = 'bf16'; use"):
        send(VirtualDatacenter(), open=setup.open_request("run"))


@pytest.mark.parametrize("task", ["Table", "Masked", "ByBatch"])
@pytest.mark.parametrize("clip_norm", [None, 0.3])
def test_a_simulated_datacenter_trains_as_plain_pytorch_does(
    make_setup: Any, task: str, clip_norm: float | None
) -> None:
    setup = make_setup(task, ranks=0, clip_norm=clip_norm)
    worker = VirtualDatacenter()
    send(worker, open=setup.open_request("run"))
    trained = train(worker, 0, 6)

    model = build_model(setup.task, setup.job.seed)
    optimizer = setup.task.optimizer(Parameters(model.named_parameters()), PARTICIPANT)
    data = setup.task.local_data(PARTICIPANT)
    order = ExampleOrder.of(setup.task, data, len(data), 1, setup.job)
    size = setup.job.datacenter.batch_size
    for step in range(6):
        batch = data[order.examples_between(step * size, (step + 1) * size)]
        if task == "ByBatch":
            loss = setup.task.training_step(model, batch).loss
        else:
            given = setup.task.loss(model(batch[0]), batch[1])
            values, mask = given if task == "Masked" else (given, torch.ones(size))
            loss = (values * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    assert trained == setup.layout.encode(setup.layout.gather(model))


def test_a_simulated_datacenter_refuses_a_frozen_parameter_that_training_changes(
    make_job: Any, write_task: Any, tmp_path: Path
) -> None:
    write_task("""
        def model(self):
            model = nn.Linear(4, 3)
            model.weight.requires_grad_(False)
            return model

        def forward(self, model, inputs):
            model.weight.data.mul_(0.5)
            return model(inputs)
        """)
    worker = VirtualDatacenter()
    job = make_job("datacenter.ranks=1").model_dump_json()
    layout = TensorLayout.from_shapes({"bias": (3,)}).header
    work = link_pb2.OpenRun(run_id="run", job=job, base=str(tmp_path), layout=layout)
    send(worker, open=work)
    with pytest.raises(TaskError, match=r"^training changed 'weight', which is frozen"):
        train(worker, 0, 2)


@pytest.mark.parametrize(
    ("is_trained", "refusal"),
    [
        (True, "froze 'weight', "),
        (False, "failed .*KeyError: 'weight'"),
    ],
)
def test_a_simulated_datacenter_refuses_an_optimizer_that_freezes_or_unfreezes_a_parameter(
    write_task: Any, make_job: Any, tmp_path: Path, is_trained: bool, refusal: str
) -> None:
    """As on a rank, `optimizer()` gets only what is trained."""
    write_task(f"""
        def model(self):
            model = nn.Linear(4, 3)
            model.weight.requires_grad_({is_trained})
            return model

        def optimizer(self, parameters, participant):
            parameters.named["weight"].requires_grad_({not is_trained})
            return super().optimizer(parameters, participant)
        """)
    shapes = {"bias": (3,), "weight": (3, 4)} if is_trained else {"bias": (3,)}
    work = link_pb2.OpenRun(
        run_id="run",
        job=make_job("datacenter.ranks=1").model_dump_json(),
        base=str(tmp_path),
        layout=TensorLayout.from_shapes(shapes).header,
    )
    with pytest.raises(TaskError, match=rf"^optimizer\(\) {refusal}"):
        send(VirtualDatacenter(), open=work)
