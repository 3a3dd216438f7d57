"""Every optimizer of PyTorch trains like in one process in each layout, or is refused at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.datacenter.plain import largest_difference, train_plainly

from isthmus.errors import TaskError
from isthmus.job import with_changes
from isthmus_datacenter.checks import check
from isthmus_datacenter.parallel.optimizer_check import ELEMENTWISE

HERE = Path(__file__).parents[1]
NEVER = ("LBFGS", "SparseAdam")
WHOLE = ("Adafactor", "Muon", "Rprop")
"""Those that need whole parameters."""
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True},
    "AdamW": {"fused": True},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "ASGD": {"t0": 2},
}
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"zero_stage": 0},
    {"zero_stage": 1},
    {"zero_stage": 3},
    {"tensor_parallel": 2},
)
ROUND = 3


def setup_of(make_setup: Any, kind: str, section: dict[str, Any], **options: Any) -> Any:
    settings = {"optimizer": kind, "options": {**OPTIONS.get(kind, {}), **options}}
    prepared = make_setup("Table", settings, **section)
    job = with_changes(prepared.job, {"task.source": "conditional_tasks.py:Matrices"})
    return type(prepared)(job)


def test_every_optimizer_is_in_this_test() -> None:
    names = {
        name
        for name, each in vars(torch.optim).items()
        if isinstance(each, type) and issubclass(each, torch.optim.Optimizer)
    }
    assert names - {"Optimizer"} == {each.__name__ for each in ELEMENTWISE} | {*NEVER, *WHOLE}


def test_optimizers_train_like_one_process(make_setup: Any, on_ranks: Any, tmp_path: Path) -> None:
    """In two rounds, the second from a checkpoint."""
    kinds = [each.__name__ for each in ELEMENTWISE]
    cases = [(kind, layout) for kind in kinds for layout in LAYOUTS]
    cases += [(kind, LAYOUTS[0]) for kind in WHOLE]
    cases += [("Lamb", layout) for layout in LAYOUTS]
    setups = []
    rounds: list[list[Any]] = [[], []]
    for number, (kind, layout) in enumerate(cases):
        setup = setup_of(make_setup, kind, layout)
        file = tmp_path / str(number)
        file.write_bytes(setup.layout.header + bytes(4 * setup.layout.size))
        for index, operations in enumerate(rounds):
            command = {
                "op": "train_steps",
                "run_id": "run",
                "from_step": index * ROUND,
                "until_step": (index + 1) * ROUND,
                "result": str(file),
            }
            operations.append((setup.open_command(), command, str(tmp_path / f"{number}.state")))
        setups.append((kind, layout, file, setup))
    for operations in rounds:
        on_ranks(2, "train", operations)
    for kind, layout, file, setup in setups:
        plain = train_plainly(setup, 2 * ROUND)
        assert largest_difference(setup, file.read_bytes(), plain) < 2e-6, (kind, layout)


def test_optimizers_of_whole_matrices_are_refused_on_shards(
    make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    cases = [(kind, layout, {}) for kind in WHOLE for layout in LAYOUTS[2:]]
    # Movements by a rate of fine-tuning are small against the parameters.
    rates = (0.02, 1e-5)
    cases += [("Lamb", each, {"local": True, "lr": lr}) for each in LAYOUTS[2:] for lr in rates]
    cases += [("SparseAdam", LAYOUTS[2], {})]
    setups = [setup_of(make_setup, kind, layout, **more) for kind, layout, more in cases]
    commands = [setup.open_command() for setup in setups]
    for messages in on_ranks(2, "refusals", commands, str(tmp_path)):
        for (kind, layout, _), message in zip(cases, messages, strict=True):
            assert message.startswith(f"optimizer() returned {kind}, which "), (kind, layout)
            assert "; SGD, Adam, AdamW, Adamax, NAdam, RAdam, " in message


def test_optimizers_of_all_parameters_are_refused_in_a_pipeline(
    make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    """Each rank would use those of its stages alone."""
    layout = {"pipeline_parallel": 2}
    # The larger limit is one of real gradients.
    refused = [
        ("Clipping", {"most": 0.1}),
        ("Clipping", {"most": 100.0}),
        ("RatesByPlace", {"lr": 1e-5}),
    ]
    trained = [("AdamW", {}), ("Lamb", {}), ("Adafactor", {}), ("Clipping", {"most": 1e9})]
    setups = [setup_of(make_setup, kind, layout, **more) for kind, more in refused + trained]
    commands = [setup.open_command() for setup in setups]
    for messages in on_ranks(2, "refusals", commands, str(tmp_path)):
        for (kind, _), message in zip(refused, messages, strict=False):
            assert message.startswith(f"optimizer() returned {kind}, which moves '")
            assert "otherwise with the parameters of one pipeline stage" in message
        assert messages[len(refused) :] == [""] * len(trained)


@pytest.mark.parametrize("kind", WHOLE)
def test_the_check_of_a_job_refuses_them(kind: str, make_setup: Any) -> None:
    setup = setup_of(make_setup, kind, {"zero_stage": 2})
    with pytest.raises(TaskError, match=rf"returned {kind}, which does not work on shards"):
        check(setup.job, setup.task, HERE)
