"""Models of which each rank's batch uses other modules train like one process, or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.datacenter.plain import largest_difference, train_plainly

from isthmus.job import with_changes

STEPS = 6
ADAMW = {"optimizer": "AdamW", "options": {"lr": 0.02, "weight_decay": 0.3, "eps": 1e-3}}
MOMENTUM = {"optimizer": "SGD", "options": {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.2}}

CASES = {
    "zero0": (2, "Experts", "rows", MOMENTUM, {"zero_stage": 0}),
    "zero1": (2, "Experts", "rows", MOMENTUM, {"zero_stage": 1, "accumulate": 2}),
    "zero2": (2, "Experts", "rows", ADAMW, {"zero_stage": 2}),
    "zero2-accumulate": (2, "Experts", "unique", MOMENTUM, {"zero_stage": 2, "accumulate": 2}),
    "zero3-clip": (2, "Experts", "list", ADAMW, {"zero_stage": 3, "clip_norm": 0.5}),
    "zero3-recompute": (2, "Experts", "name", ADAMW, {"checkpoint_activations": True}),
    "zero1-blocks": (2, "Blocks", "rows", ADAMW, {"zero_stage": 1, "accumulate": 2}),
    "zero3-blocks": (2, "Blocks", "unique", ADAMW, {"zero_stage": 3}),
    "zero2-towers": (2, "Towers", "", ADAMW, {"zero_stage": 2}),
    "zero3-four": (4, "Experts", "rows", ADAMW, {"zero_stage": 3, "batch_size": 2}),
    "zero1-four": (4, "Experts", "name", MOMENTUM, {"zero_stage": 1, "batch_size": 2}),
}


def setup_of(make_setup: Any, name: str, settings: dict[str, Any], **section: Any) -> Any:
    prepared = make_setup("Table", settings, **section)
    job = with_changes(prepared.job, {"task.source": f"conditional_tasks.py:{name}"})
    return type(prepared)(job)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_use_other_modules_train_like_one_process(
    ranks: int, make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    operations = []
    setups = {}
    for name, (count, task, by, optimizer, section) in CASES.items():
        if count != ranks:
            continue
        setup = setup_of(make_setup, task, {**optimizer, "by": by}, ranks=ranks, **section)
        file = tmp_path / name
        file.write_bytes(setup.layout.header + bytes(4 * setup.layout.size))
        command = {"op": "train_steps", "run_id": "run", "until_step": STEPS, "result": str(file)}
        operations.append((setup.open_command(), command, str(tmp_path / f"{name}.state")))
        setups[name] = setup
    on_ranks(ranks, "train", operations)
    for name, setup in setups.items():
        difference = largest_difference(
            setup, (tmp_path / name).read_bytes(), train_plainly(setup, STEPS)
        )
        assert difference < 2e-6, name


def test_modules_that_a_batch_does_not_call_are_refused(
    make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    """At once where the task has chosen them, and in the step where no earlier batch shows it."""
    given = setup_of(make_setup, "Given", {"by": "rows"})
    (message, _) = on_ranks(2, "refusals", [given.open_command()], str(tmp_path / "given"))
    assert message[0].startswith("shard_units() returned 'experts.")
    for settings in ({}, {"given": True}):
        setup = setup_of(make_setup, "Hidden", settings)
        command = {"op": "train_steps", "run_id": "run", "until_step": STEPS}
        operation = (setup.open_command(), command, str(tmp_path / f"hidden-{len(settings)}"))
        with pytest.raises(RuntimeError, match=r"TaskError: the model has 'layers\.2', which a b"):
            on_ranks(2, "train", [operation])


@pytest.mark.parametrize(
    ("decides", "layout", "layers"),
    [
        (False, {"zero_stage": 3}, ["1.left", "1.right", "2.left", "2.right"]),
        (True, {"zero_stage": 3}, ["1.left", "1.right"]),
        (False, {"zero_stage": 2}, []),
        (False, {"checkpoint_activations": True}, []),
    ],
    ids=str,
)
def test_large_layers_are_gathered_one_by_one_where_a_block_calls_them_always(
    decides: bool,
    layout: dict[str, Any],
    layers: list[str],
    make_setup: Any,
    on_ranks: Any,
    tmp_path: Path,
) -> None:
    """What a block would gather together needs as much memory as all its layers, twice."""
    optimizer = {"optimizer": "SGD", "options": {"lr": 1e-4, "momentum": 0.9}}
    setup = setup_of(make_setup, "Wide", {**optimizer, "decides": decides}, **layout)
    file = tmp_path / "model"
    file.write_bytes(setup.layout.header + bytes(4 * setup.layout.size))
    command = {"op": "train_steps", "run_id": "run", "until_step": 3, "result": str(file)}
    operation = (setup.open_command(), command, str(tmp_path / "state"))
    units = on_ranks(2, "trained_units", operation)
    assert units == [["", *sorted(["1", "2", *layers])]] * 2
    assert largest_difference(setup, file.read_bytes(), train_plainly(setup, 3)) < 2e-6
