"""Every ZeRO stage trains as one process does, and state moves between any two of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isthmus.scoring import build_model, evaluate, losses
from isthmus.task import Participant
from isthmus_datacenter.data import Order
from isthmus_datacenter.testing import on_ranks

RANKS_PY = Path(__file__).parent / "ranks.py"
STEPS = 6


def single_process(setup: Any, ranks: int, steps: int) -> tuple[torch.Tensor, float]:
    """The reference: the same global batches, in one process, written out by hand."""
    task, layout = setup.task, setup.layout
    participant = Participant(name="test", regime="datacenter")
    model = build_model(task, setup.job.seed)
    optimizer = task.optimizer(model.parameters(), participant)
    data = task.local_data(participant)
    order = Order(
        examples=len(data),
        ranks=ranks,
        batch_size=setup.job.datacenter.batch_size,
        seed=setup.job.seed,
    )
    total, units = 0.0, 0
    for step in range(steps):
        indices = [index for rank in range(ranks) for index in order.steps(step, step + 1, rank)]
        inputs, target = (
            torch.stack(column) for column in zip(*(data[i] for i in indices), strict=True)
        )
        _, values = losses(task, model, inputs, target)
        values.mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        total += float(values.detach().sum(dtype=torch.float64))
        units += values.numel()
    return layout.gather(model), total / units


# SGD is linear in the gradients, so only their rounding differs. AdamW divides by them; some of a
# transformer's are zero but for rounding, so its eps is put well above that.
SGD = {"optimizer": "SGD", "options": {"lr": 0.2}}
ADAMW = {"optimizer": "AdamW", "options": {"lr": 0.01, "eps": 1e-3}}
CASES = {
    f"{task}-{ranks}-{stage}-{settings['optimizer']}": (task, ranks, stage, settings)
    for task, ranks, stage, settings in (
        ("Table", 2, 0, SGD),
        ("Table", 2, 1, SGD),
        ("Table", 2, 2, SGD),
        ("Table", 2, 3, SGD),
        ("Language", 2, 0, SGD),
        ("Language", 2, 1, SGD),
        ("Language", 2, 2, SGD),
        ("Language", 2, 3, SGD),
        ("Language", 2, 0, ADAMW),
        ("Language", 2, 3, ADAMW),
        ("Table", 4, 3, SGD),
        ("Language", 4, 3, SGD),
        ("Language", 4, 0, ADAMW),
        ("Language", 1, 2, ADAMW),
    )
}


@dataclasses.dataclass(frozen=True)
class Trained:
    setup: Any
    values: list[dict[str, Any]]
    """What each rank returned."""
    content: bytes


@pytest.fixture(scope="module")
def trained(setup: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """Every case, trained; all cases of one number of ranks in one group."""
    found = {}
    for ranks in (1, 2, 4):
        names = [name for name, case in CASES.items() if case[1] == ranks]
        setups, works, results = [], [], []
        for name in names:
            task, _, stage, settings = CASES[name]
            made = setup(task, settings, zero_stage=stage)
            directory = tmp_path_factory.mktemp(name)
            result = directory / "result"
            result.write_bytes(made.layout.header + bytes(4 * made.layout.size))
            command = {
                "op": "train",
                "run_id": "run",
                "until_step": STEPS,
                "evaluate": True,
                "result": str(result),
            }
            works.append((made.command(), command, str(directory / "state")))
            setups.append(made)
            results.append(result)
        by_rank = on_ranks(ranks, RANKS_PY, "train", works)
        for name, made, values, result in zip(
            names, setups, zip(*by_rank, strict=True), results, strict=True
        ):
            found[name] = Trained(made, list(values), result.read_bytes())
    return found


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_one_process(
    name: str, trained: dict[str, Trained], vector: Any
) -> None:
    _, ranks, _, settings = CASES[name]
    case = trained[name]
    expected, loss = single_process(case.setup, ranks, STEPS)
    parameters = vector(case.content, case.setup.layout)
    assert (parameters - expected).abs().max() <= (1e-6 if settings is SGD else 2e-5)
    values = case.values
    assert all(value == {**values[0], "seconds": value["seconds"]} for value in values)
    assert values[0]["training"]["loss"] == pytest.approx(loss, abs=1e-6)
    assert values[0]["examples"] == STEPS * ranks * 4

    model = build_model(case.setup.task, 5)
    case.setup.layout.scatter(parameters, model)
    held_out = case.setup.task.eval_data()
    alone = evaluate(case.setup.task, model, held_out, range(23), 8, torch.device("cpu")).result()
    assert values[0]["evaluation"] == pytest.approx(alone, abs=1e-6)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_crosses_bit_for_bit(stage: int, setup: Any, tmp_path: Path) -> None:
    made = setup("Table", zero_stage=stage)
    source, target = tmp_path / "source", tmp_path / "target"
    sent = torch.randn(made.layout.size, generator=torch.Generator().manual_seed(0))
    source.write_bytes(made.layout.encode(sent))
    target.write_bytes(made.layout.header + bytes(4 * made.layout.size))
    held = on_ranks(4, RANKS_PY, "round_trip", made.command(), str(source), str(target))
    assert target.read_bytes() == source.read_bytes()
    assert sum(map(sum, held)) == made.layout.size * (4 if stage == 0 else 1)


def test_a_checkpoint_is_read_by_any_layout(setup: Any, vector: Any, tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    result = tmp_path / "result"
    written = setup("Language", zero_stage=2)
    result.write_bytes(written.layout.header + bytes(4 * written.layout.size))
    command = {"op": "train", "run_id": "run", "until_step": 3, "result": str(result)}
    on_ranks(2, RANKS_PY, "train", [(written.command(), command, state)])
    (reference,) = on_ranks(1, RANKS_PY, "state_at", [written.command()], state, 3)[0]
    parts = written.layout.parts(vector(result.read_bytes(), written.layout))
    for name, part in parts:
        assert np.array_equal(reference[name]["value"], part.numpy())
        assert reference[name].keys() == {"value", "step", "exp_avg", "exp_avg_sq"}

    openings = [setup("Language", zero_stage=stage).command() for stage in (0, 3)]
    for found in on_ranks(4, RANKS_PY, "state_at", openings, state, 3)[1]:
        assert found.keys() == reference.keys()
        for name, fields in reference.items():
            assert all(np.array_equal(found[name][key], value) for key, value in fields.items())
