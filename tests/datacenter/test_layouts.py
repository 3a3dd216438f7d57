"""Every composition of data, tensor and pipeline parallelism trains as one process does."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.scoring import build_model, evaluate, losses
from isthmus.task import Participant
from isthmus_datacenter.data import Order
from isthmus_datacenter.testing import on_ranks

RANKS_PY = Path(__file__).parent / "ranks.py"
STEPS = 5
BATCH = 8
"""Examples in a step of all replicas, in every layout: so that one reference serves all."""

SGD = {"optimizer": "SGD", "options": {"lr": 0.2}}
ADAMW = {"optimizer": "AdamW", "options": {"lr": 0.01, "eps": 1e-3}}
PLAN = {**SGD, "plan": "right"}


def layout(dp: int = 1, tp: int = 1, pp: int = 1, stage: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "ranks": dp * tp * pp,
        "data_parallel": dp,
        "tensor_parallel": tp,
        "pipeline_parallel": pp,
        "zero_stage": stage,
        "batch_size": BATCH // dp,
        **more,
    }


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dp2-zero0-accumulate": ("Gpt", SGD, layout(2, stage=0, accumulate=2)),
    "dp2-zero1-accumulate": ("Gpt", SGD, layout(2, stage=1, accumulate=2)),
    "dp2-zero2-accumulate": ("Gpt", ADAMW, layout(2, accumulate=4)),
    "dp2-zero3-accumulate": ("Gpt", SGD, layout(2, stage=3, accumulate=2)),
    "dp2-zero3-recompute": ("Gpt", SGD, layout(2, stage=3, checkpoint_activations=True)),
    "dp2-zero1-cnn": ("Pictures", SGD, layout(2, stage=1)),
    "tp2": ("Gpt", SGD, layout(tp=2)),
    "tp2-adamw": ("Gpt", ADAMW, layout(tp=2)),
    "tp2-plan": ("Gpt", PLAN, layout(tp=2)),
    "tp2-uneven": ("Language", SGD, layout(tp=2)),
    "tp2-cnn": ("Pictures", SGD, layout(tp=2)),
    "tp2-accumulate-recompute": (
        "Gpt",
        PLAN,
        layout(tp=2, accumulate=2, checkpoint_activations=True),
    ),
    "pp2-gpipe": ("Gpt", SGD, layout(pp=2, schedule="gpipe")),
    "pp2-1f1b": ("Gpt", ADAMW, layout(pp=2)),
    "pp2-interleaved": ("Gpt", SGD, layout(pp=2, schedule="interleaved")),
    "pp2-zero-bubble": ("Gpt", SGD, layout(pp=2, schedule="zero_bubble")),
    "pp2-plan": ("Gpt", PLAN, layout(pp=2)),
    "pp2-encoder": ("Language", SGD, layout(pp=2)),
    "pp2-cnn": ("Pictures", SGD, layout(pp=2)),
    "pp2-accumulate-recompute": (
        "Gpt",
        SGD,
        layout(pp=2, accumulate=2, microbatches=2, checkpoint_activations=True),
    ),
    "dp2-tp2-zero0": ("Gpt", SGD, layout(2, 2, stage=0)),
    "dp2-tp2-zero1": ("Gpt", PLAN, layout(2, 2, stage=1, accumulate=2)),
    "dp2-tp2-zero2": ("Gpt", ADAMW, layout(2, 2)),
    "dp2-tp2-zero3": ("Gpt", PLAN, layout(2, 2, stage=3)),
    "dp2-tp2-zero3-uneven": ("Language", SGD, layout(2, 2, stage=3)),
    "dp2-pp2-zero0": ("Gpt", SGD, layout(2, pp=2, stage=0)),
    "dp2-pp2-zero1": ("Gpt", SGD, layout(2, pp=2, stage=1)),
    "dp2-pp2-zero2-zero-bubble": ("Gpt", SGD, layout(2, pp=2, schedule="zero_bubble")),
    "dp2-pp2-zero3": ("Gpt", ADAMW, layout(2, pp=2, stage=3)),
    "dp2-pp2-zero3-interleaved": ("Gpt", SGD, layout(2, pp=2, stage=3, schedule="interleaved")),
    "dp2-pp2-zero3-cnn": ("Pictures", SGD, layout(2, pp=2, stage=3)),
    "tp2-pp2": ("Gpt", SGD, layout(1, 2, 2)),
    "tp2-pp2-plan": ("Gpt", PLAN, layout(1, 2, 2, schedule="gpipe")),
    "pp4": ("Gpt", SGD, layout(pp=4, microbatches=4)),
    "dp2-tp2-pp2-zero0": ("Gpt", SGD, layout(2, 2, 2, stage=0)),
    "dp2-tp2-pp2-zero1": ("Gpt", PLAN, layout(2, 2, 2, stage=1)),
    "dp2-tp2-pp2-zero2": ("Gpt", SGD, layout(2, 2, 2, schedule="interleaved", microbatches=2)),
    "dp2-tp2-pp2-zero3": ("Gpt", ADAMW, layout(2, 2, 2, stage=3)),
}


@functools.cache
def _reference(make: Any, name: str, kind: str) -> tuple[torch.Tensor, float, Any]:
    """Parameters and mean loss after the same global batches in one process, by hand."""
    made = make(name, {"SGD": SGD, "AdamW": ADAMW}[kind])
    task = made.task
    model = build_model(task, made.job.seed)
    optimizer = task.optimizer(model.parameters(), Participant(name="test", regime="datacenter"))
    data = task.local_data(Participant(name="test", regime="datacenter"))
    order = Order(examples=len(data), ranks=1, batch_size=BATCH, seed=made.job.seed)
    total, units = 0.0, 0
    for step in range(STEPS):
        rows = [data[i] for i in order.steps(step, step + 1, 0)]
        inputs, target = (torch.stack(column) for column in zip(*rows, strict=True))
        _, values = losses(task, model, inputs, target)
        values.mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        total += float(values.detach().sum(dtype=torch.float64))
        units += values.numel()
    return made.layout.gather(model), total / units, model


@pytest.fixture(scope="module")
def trained(setup: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What became of a case; all cases of one number of ranks are trained in one group."""
    directory = tmp_path_factory.mktemp("layouts")

    @functools.cache
    def group(ranks: int) -> dict[str, tuple[Any, list[dict[str, Any]], bytes]]:
        cases = {name: case for name, case in CASES.items() if case[2]["ranks"] == ranks}
        setups = {
            name: setup(task, extra, **section) for name, (task, extra, section) in cases.items()
        }
        works = []
        for name, made in setups.items():
            result = directory / name
            result.write_bytes(made.layout.header + bytes(4 * made.layout.size))
            command = {
                "op": "train",
                "run_id": "run",
                "until_step": STEPS,
                "evaluate": True,
                "result": str(result),
            }
            works.append((made.command(), command, str(directory / f"{name}.state")))
        by_rank = on_ranks(ranks, RANKS_PY, "train", works)
        return {
            name: (setups[name], list(values), (directory / name).read_bytes())
            for name, values in zip(cases, zip(*by_rank, strict=True), strict=True)
        }

    return lambda name: group(CASES[name][2]["ranks"])[name]


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_one_process(name: str, trained: Any, setup: Any, vector: Any) -> None:
    made, values, content = trained(name)
    task, extra, _ = CASES[name]
    expected, loss, _ = _reference(setup, task, extra["optimizer"])
    parameters = vector(content, made.layout)
    assert (parameters - expected).abs().max() <= (1e-6 if extra["optimizer"] == "SGD" else 2e-5)
    assert all(value == {**values[0], "seconds": value["seconds"]} for value in values)
    assert values[0]["training"]["loss"] == pytest.approx(loss, abs=1e-6)
    assert values[0]["examples"] == STEPS * BATCH
    # 23 held-out examples: no batch, no replica and no micro-batch divides them.
    model = build_model(made.task, 5)
    made.layout.scatter(parameters, model)
    held_out = made.task.eval_data()
    alone = evaluate(made.task, model, held_out, range(23), 8, torch.device("cpu")).result()
    assert values[0]["evaluation"] == pytest.approx(alone, abs=2e-6)
