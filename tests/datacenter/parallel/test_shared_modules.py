"""Shared modules, and tensors in another order in memory, train on ranks or are refused."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tests.datacenter.conftest import DatacenterDriver
from tests.datacenter.plain import largest_difference, train_plainly
from torch import nn

from isthmus.job import with_changes
from isthmus.task.scoring.blocks import default_units
from isthmus_datacenter.service.rank_group import CommandError

STEPS = 4
STAGES = (1, 3)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
MODELS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Shared", {"what": "activation"}),
    ("Shared", {"what": "norm"}),
    # One is within another, and one is given twice.
    ("Shared", {"what": "none", "units": ["blocks.0", "blocks.0.layer", "blocks.1", "blocks.1"]}),
    ("Transposed", {}),
)


def setup_of(make_setup: Any, name: str, settings: dict[str, Any], **section: Any) -> Any:
    options = {"optimizer": "SGD", "options": {"lr": 0.05, "momentum": 0.9}}
    prepared = make_setup("Table", {**options, **settings}, ranks=2, **section)
    job = with_changes(prepared.job, {"task.source": f"shared_tasks.py:{name}"})
    return type(prepared)(job)


def test_they_train_like_in_one_process(make_setup: Any, on_ranks: Any, tmp_path: Path) -> None:
    cases = [
        (name, settings, {"zero_stage": stage}) for name, settings in MODELS for stage in STAGES
    ]
    cases += [("Shared", {"what": "activation"}, {"zero_stage": 0, "checkpoint_activations": True})]
    cases += [("Turned", {}, {"pipeline_parallel": 2, "schedule": each}) for each in SCHEDULES]
    train_like_in_one_process(cases, make_setup, on_ranks, tmp_path)


def test_what_blocks_keep_in_attributes_counts_each_step_once(
    make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    """Neither calls that compare the model nor those in the backward pass are left in it."""
    layouts: tuple[dict[str, Any], ...] = (
        {"zero_stage": 3},
        {"zero_stage": 0, "checkpoint_activations": True},
        {"zero_stage": 3, "checkpoint_activations": "operators"},
        {"tensor_parallel": 2},
        {"tensor_parallel": 2, "checkpoint_activations": True},
    )
    cases = [
        ("Remembering", {"kind": kind}, layout)
        for kind in ("number", "tensor", "list", "dict", "table")
        for layout in layouts
        # Replicas have the means of their own examples.
        if kind != "tensor" or "tensor_parallel" in layout
    ]
    cases += [("Remembering", {"kind": "table"}, {"pipeline_parallel": 2})]
    train_like_in_one_process(cases, make_setup, on_ranks, tmp_path)


def train_like_in_one_process(
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]],
    make_setup: Any,
    on_ranks: Any,
    tmp_path: Path,
) -> None:
    operations = []
    setups = []
    for number, (name, settings, layout) in enumerate(cases):
        setup = setup_of(make_setup, name, settings, **layout)
        file = tmp_path / str(number)
        file.write_bytes(setup.layout.header + bytes(4 * setup.layout.size))
        command = {"op": "train_steps", "run_id": "run", "until_step": STEPS, "result": str(file)}
        operations.append((setup.open_command(), command, f"{file}.state"))
        setups.append((file, setup))
    on_ranks(2, "train", operations)
    for case, (file, setup) in zip(cases, setups, strict=True):
        plain = train_plainly(setup, STEPS)
        assert largest_difference(setup, file.read_bytes(), plain) < 2e-6, case


@pytest.mark.parametrize(
    ("what", "units", "message"),
    [
        (
            "activation",
            ["blocks.0", "blocks.1"],
            "shard_units() returned 'blocks.1', which has parameter 'blocks.1.activation.weight', "
            "and this is one of 'blocks.0', too; ",
        ),
        (
            "norm",
            ["blocks.2"],
            "shard_units() returned 'blocks.2', which has parameter 'blocks.2.norm.weight', and "
            "this is one of the rest of the model, too; ",
        ),
    ],
)
def test_units_of_a_task_that_share_a_module_are_refused(
    what: str, units: list[str], message: str, make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    setup = setup_of(make_setup, "Shared", {"what": what, "units": units}, zero_stage=2)
    for (refusal,) in on_ranks(2, "refusals", [setup.open_command()], str(tmp_path)):
        assert refusal.startswith(message)
        assert refusal.endswith("leave out the units that share it")


def test_a_tensor_that_is_kept_of_a_parameter_is_refused_on_shards(
    make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    cases = [("tensor", 0), ("copy", 3), ("tensor", 3), ("list", 1)]
    setups = [setup_of(make_setup, "Kept", {"as": kind}, zero_stage=stage) for kind, stage in cases]
    commands = [setup.open_command() for setup in setups]
    for messages in on_ranks(2, "refusals", commands, str(tmp_path)):
        assert messages[:2] == ["", ""]
        for message in messages[2:]:
            assert message.startswith(
                "the model keeps 'kept', a tensor that shares memory with parameter 'first.weight'"
            )


def test_blocks_that_share_a_module_are_no_units() -> None:
    """Nor is one that has a module of the rest; a block that is called twice is one unit."""
    shared = nn.Linear(2, 2)
    model = nn.Module()
    model.blocks = nn.ModuleList(
        nn.Sequential(each, nn.Linear(2, 2)) for each in (shared, nn.Linear(2, 2), shared)
    )
    model.repeated = nn.ModuleList([nn.Linear(2, 2)] * 2)
    model.outer = nn.Linear(2, 2)
    model.last = nn.ModuleList([nn.Sequential(model.outer)])
    assert default_units(model, 1) == [[model.blocks[1]], [model.repeated[0]], []]
    every = [[*model.blocks], [model.repeated[0]], [*model.last]]
    assert default_units(model, 1, shared=True) == every


def test_a_count_of_calls_in_whole_numbers_is_refused_in_a_pipeline(
    make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    setup = setup_of(make_setup, "Counted", {}, pipeline_parallel=2)
    for (refusal,) in on_ranks(2, "refusals", [setup.open_command()], str(tmp_path)):
        assert refusal.startswith(
            "each call of the model in training changes its buffer '0.calls', and a pipeline calls"
        )


@pytest.mark.parametrize(
    ("kind", "attribute"),
    [("number", "calls"), ("tensor", "mean"), ("list", "seen"), ("dict", "counts")],
)
def test_an_attribute_that_each_call_changes_is_refused_in_a_pipeline(
    kind: str, attribute: str, make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    setup = setup_of(make_setup, "Remembering", {"kind": kind}, pipeline_parallel=2)
    for (refusal,) in on_ranks(2, "refusals", [setup.open_command()], str(tmp_path)):
        assert refusal == (
            f"each call of the model in training changes its attribute '1.{attribute}', and a "
            "pipeline calls it for every micro-batch instead of once; set pipeline_parallel = 1"
        )


@pytest.mark.parametrize(
    ("layout", "places"),
    [
        ({"tensor_parallel": 2}, ["shard_units", "forward", "training", "tensor_parallel_plan"]),
        ({"pipeline_parallel": 2}, ["shard_units", "forward", "training"]),
        ({"zero_stage": 3}, ["shard_units"]),
    ],
    ids=repr,
)
def test_a_refusal_of_one_rank_is_that_of_all(
    layout: dict[str, Any], places: list[str], make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    """The others would wait for it, or take its message for another one."""
    setups = [setup_of(make_setup, "RefusedApart", {"where": each}, **layout) for each in places]
    commands = [setup.open_command() for setup in setups]
    for messages in on_ranks(2, "refusals", commands, str(tmp_path)):
        assert messages == [f"no model for {each}" for each in places]


def test_a_refusal_of_one_rank_in_an_exchange_ends_the_others(
    make_setup: Any, warm_datacenter: DatacenterDriver
) -> None:
    """They wait in a collective for it, and end long before that counts as a hang."""
    setup = setup_of(make_setup, "RefusedApart", {"where": "sharded"}, tensor_parallel=2)
    began = time.monotonic()
    with pytest.raises(CommandError, match=r"^no model for sharded$"):
        warm_datacenter.open("apart", setup)
    assert time.monotonic() - began < setup.job.time.lease_seconds
