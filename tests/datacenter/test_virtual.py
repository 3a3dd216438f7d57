"""A simulated datacenter trains exactly as one rank does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from isthmus.errors import TaskError
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import describe
from isthmus.wire import link_pb2
from isthmus_datacenter.virtual import VirtualDatacenter


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


def test_a_simulated_datacenter_trains_as_one_rank_does(
    make_setup: Any, on_ranks: Any, decode: Any, tmp_path: Path
) -> None:
    setup = make_setup("Table", ranks=1, optimizer_on_load="keep")
    result = tmp_path / "result"
    result.write_bytes(setup.layout.header + bytes(4 * setup.layout.size))
    command = {"op": "train_steps", "run_id": "run", "until_step": 6, "result": str(result)}
    on_ranks(1, "train", [(setup.open_command(), command, str(tmp_path / "state"))])

    worker = VirtualDatacenter()
    send(worker, open=setup.open_request("run"))
    middle = train(worker, 0, 3)
    whole = train(worker, 3, 6)
    expected = decode(result.read_bytes(), setup.layout)
    assert (decode(whole, setup.layout) - expected).abs().max() < 1e-6
    # It keeps the state before its last command.
    assert train(worker, 3, 6) == whole
    # After an absence, training from a model uses the current optimizer state.
    assert train(worker, 10, 13, middle) != train(worker, 10, 13, whole)
    late = VirtualDatacenter()
    send(late, open=setup.open_request("run"))
    assert train(late, 10, 13, middle) != middle


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_simulated_datacenter_refuses_an_optimizer_that_freezes_or_unfreezes_a_parameter(
    write_task: Any, make_job: Any, tmp_path: Path, is_trained: bool
) -> None:
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
    done = "froze" if is_trained else "unfroze"
    with pytest.raises(TaskError, match=rf"^optimizer\(\) {done} 'weight', "):
        send(VirtualDatacenter(), open=work)
