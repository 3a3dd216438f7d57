"""The mean gradient equals that of one process in every layout, and does not disturb training."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.errors import TaskError
from isthmus.task.scoring import losses
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.wire import link_pb2
from isthmus_datacenter.messages import ControlSignal
from isthmus_datacenter.parallel.model_shard import ModelShard
from isthmus_datacenter.parallel.optimizer import ShardedOptimizer
from isthmus_datacenter.parallel.parallel_dims import ParallelDims
from isthmus_datacenter.training.data import ExampleOrder
from isthmus_datacenter.training.forward_backward import ForwardBackward
from isthmus_datacenter.virtual import VirtualDatacenter

FIRST, UNTIL = 2, 5
BATCH = 8
"""Examples in a step of all replicas."""


def seeded(layout: TensorLayout) -> bytes:
    generator = torch.Generator().manual_seed(3)
    return bytes(layout.encode(0.3 * torch.randn(layout.size, generator=generator)))


def by_hand(prepared: Any, model: bytes) -> tuple[torch.Tensor, float]:
    """Mean over the batches of the gradient of each one's mean loss, and the mean loss."""
    task, module = prepared.task, prepared.task.model()
    prepared.layout.scatter(prepared.layout.decode(bytearray(model)), module)
    data = task.local_data(None)
    order = ExampleOrder(examples=len(data), replicas=1, batch_size=BATCH, seed=prepared.job.seed)
    total, units = 0.0, 0
    for step in range(FIRST, UNTIL):
        rows = [data[i] for i in order.indices(step, step + 1, 0)]
        inputs, target = (torch.stack(column) for column in zip(*rows, strict=True))
        _, values = losses(task, module, inputs, target)
        values.mean().backward()  # type: ignore[no-untyped-call]
        total += float(values.total64())
        units += int(values.count())
    vector = torch.zeros(prepared.layout.size)
    parameters = dict(module.named_parameters())
    for name, part in prepared.layout.parts(vector):
        part.copy_(parameters[name].grad)
    return vector / (UNTIL - FIRST), total / units


CASES: dict[int, list[tuple[str, dict[str, Any]]]] = {
    2: [
        ("Language", {"batch_size": 4, "zero_stage": 3}),
        ("Gpt", {"batch_size": 4, "zero_stage": 1, "accumulate": 2}),
        ("Language", {"batch_size": 8, "tensor_parallel": 2}),
        ("Gpt", {"batch_size": 8, "pipeline_parallel": 2}),
        ("Gpt", {"batch_size": 4, "precision": "fp16"}),
        ("Mixture", {"batch_size": 4, "expert_parallel": 2}),
    ],
    4: [("Gpt", {"batch_size": 4, "tensor_parallel": 2, "zero_stage": 3})],
}


@pytest.mark.parametrize("ranks", CASES)
def test_the_gradient_equals_that_of_one_process(
    ranks: int, make_setup: Any, on_ranks: Any, decode: Any, tmp_path: Path
) -> None:
    operations, setups = [], []
    for number, (task, section) in enumerate(CASES[ranks]):
        prepared = make_setup(task, **{**section, "ranks": ranks})
        source, result = tmp_path / f"{number}.model", tmp_path / f"{number}.gradient"
        source.write_bytes(seeded(prepared.layout))
        result.write_bytes(prepared.layout.header + bytes(4 * prepared.layout.size))
        command = {
            "op": "mean_gradient",
            "run_id": "run",
            "from_step": FIRST,
            "until_step": UNTIL,
            "model": str(source),
            "result": str(result),
        }
        operations.append((prepared.open_command(), command, str(tmp_path / f"{number}.state")))
        setups.append((prepared, result))
    values = on_ranks(ranks, "gradients", operations)
    for number, (prepared, result) in enumerate(setups):
        expected, loss = by_hand(prepared, seeded(prepared.layout))
        rounded = prepared.job.datacenter.precision != "fp32"
        gradient = decode(result.read_bytes(), prepared.layout)
        assert (gradient - expected).abs().max() <= (5e-3 if rounded else 2e-6), CASES[ranks][
            number
        ]
        for value in values:
            near = pytest.approx(loss, abs=1e-2 if rounded else 1e-5)
            assert value[number]["training"]["loss"] == near
        assert values[0][number]["examples"] == (UNTIL - FIRST) * BATCH


def gradient_of(run_id: str) -> link_pb2.MeanGradient:
    return link_pb2.MeanGradient(run_id=run_id, from_step=FIRST, until_step=UNTIL)


def test_a_gradient_does_not_change_training(
    warm_datacenter: Any, make_setup: Any, decode: Any
) -> None:
    prepared = make_setup("Table", {"dropout": 0.0})
    sent = seeded(prepared.layout)
    ends = []
    for run_id in ("with-gradient", "without"):
        warm_datacenter.open(run_id, prepared)
        warm_datacenter.train(run_id, 0, 4)
        if run_id == "with-gradient":
            reply, blob = warm_datacenter.ask(sent, mean_gradient=gradient_of(run_id))
            expected, loss = by_hand(prepared, sent)
            torch.testing.assert_close(
                decode(blob, prepared.layout), expected, atol=1e-6, rtol=1e-5
            )
            assert reply.trained.training["loss"] == pytest.approx(loss, abs=1e-6)
            assert (reply.trained.steps, reply.trained.examples) == (UNTIL - FIRST, 24)
        ends.append(warm_datacenter.train(run_id, 4, 8, hand_back=True)[1])
    assert ends[0] == ends[1]
    assert not list((warm_datacenter.service.state / "exchange").iterdir())


def test_a_virtual_datacenter_computes_the_same_gradient(make_setup: Any, decode: Any) -> None:
    prepared = make_setup("Table", ranks=0, batch_size=BATCH)
    sent = seeded(prepared.layout)
    ends = []

    async def ask(datacenter: VirtualDatacenter, model: Any = None, **work: Any) -> Any:
        return await datacenter.work(link_pb2.Request(id="r", **work), model, lambda progress: None)

    async def both() -> None:
        for with_gradient in (True, False):
            datacenter = VirtualDatacenter()
            await ask(datacenter, open=prepared.open_request("run"))
            train = link_pb2.TrainSteps(run_id="run", from_step=0, until_step=4)
            await ask(datacenter, train_steps=train)
            if with_gradient:
                work = gradient_of("run")
                reply, blob = await ask(datacenter, bytearray(sent), mean_gradient=work)
                expected, loss = by_hand(prepared, sent)
                gradient = decode(blob, prepared.layout)
                torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-5)
                assert reply.trained.training["loss"] == pytest.approx(loss, abs=1e-6)
            train = link_pb2.TrainSteps(run_id="run", from_step=4, until_step=8, hand_back=True)
            ends.append(bytes((await ask(datacenter, train_steps=train))[1]))

    asyncio.run(both())
    assert ends[0] == ends[1]


def test_a_loss_independent_of_the_parameters_is_refused(make_setup: Any) -> None:
    task = make_setup("Table").task
    task.forward = lambda model, inputs: model(inputs).detach()
    shard = ModelShard(ParallelDims(ranks=1, zero_stage=0), {0: task.model()}, {0: {}})
    forward_backward = ForwardBackward(task, shard, 0, torch.device("cpu"), 4)
    batch = torch.ones(4, 6), torch.zeros(4, dtype=torch.long)
    with pytest.raises(TaskError, match=r"^loss\(\) does not depend on what is trained; is some"):
        forward_backward.run(batch, 1.0, lambda: ControlSignal.CONTINUE)


def test_an_optimizer_with_a_closure_is_refused(make_setup: Any) -> None:
    model = make_setup("Table").task.model()
    shard = ModelShard(
        ParallelDims(ranks=1, zero_stage=0),
        {0: model},
        {0: {name: name for name, _ in model.named_parameters()}},
    )
    with pytest.raises(TaskError, match=r"^optimizer\(\) returned LBFGS, whose step\(\) computes"):
        ShardedOptimizer(shard, torch.optim.LBFGS, None, fp16=False)
