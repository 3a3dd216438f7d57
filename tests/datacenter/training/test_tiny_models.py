"""Ranks without an element of the model train, save, resume and clip like one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.datacenter.plain import largest_difference, train_plainly

from isthmus.job import with_changes

ROUND = 3
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "Adam": {"amsgrad": True},
    "AdamW": {"fused": True},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "Adagrad": {},
    "Adadelta": {},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "ASGD": {"t0": 2},
}


def cases(ranks: int) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Tasks with settings and `[datacenter]`: every optimizer, stage and number of elements."""
    listed: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
    for number, (optimizer, options) in enumerate(OPTIMIZERS.items()):
        settings = {"optimizer": optimizer, "options": {"lr": 0.02, **options}}
        section: dict[str, Any] = {"zero_stage": 1 + number % 3, "checkpoint_steps": 2}
        if number % 2:
            section["clip_norm"] = 0.5
        task = "Linear" if number % 4 == 0 else "Tiny"
        listed.append((task, {**settings, "elements": 1 + number % 3}, section))
    adam = {"optimizer": "AdamW", "options": {"lr": 0.02}}
    listed += [("Tiny", {**adam, "elements": 1}, {"zero_stage": each}) for each in range(4)]
    listed += [("Tiny", {**adam, "elements": 2}, {"accumulate": 2, "precision": "fp32"})]
    return listed


@pytest.mark.parametrize("ranks", [2, 3])
def test_models_with_fewer_elements_than_ranks_train_like_one_process(
    ranks: int, make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    """In two rounds, the second by new engines, which restore the checkpoint of the first."""
    setups = []
    rounds: list[list[Any]] = [[], []]
    for number, (task, settings, section) in enumerate(cases(ranks)):
        prepared = make_setup("Table", settings, ranks=ranks, **section)
        job = with_changes(prepared.job, {"task.source": f"conditional_tasks.py:{task}"})
        setup = type(prepared)(job)
        file = tmp_path / str(number)
        file.write_bytes(setup.layout.header + bytes(4 * setup.layout.size))
        for index, operations in enumerate(rounds):
            command = {
                "op": "train_steps",
                "run_id": "run",
                "from_step": index * ROUND,
                "until_step": (index + 1) * ROUND,
                "evaluate": True,
                "result": str(file),
            }
            operations.append((setup.open_command(), command, str(tmp_path / f"{number}.state")))
        setups.append((file, setup))
    for operations in rounds:
        on_ranks(ranks, "train", operations)
    for file, setup in setups:
        plain = train_plainly(setup, 2 * ROUND)
        difference = largest_difference(setup, file.read_bytes(), plain)
        assert difference < 2e-6, setup.job.task.settings
