"""Blocks that compute something else when they are recomputed are refused in every layout.

The repetition that finds them leaves no trace in others.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tests.datacenter.conftest import DatacenterDriver

from isthmus.job import with_changes
from isthmus_datacenter.service.rank_group import CommandError

STEPS = 2
SGD = {"optimizer": "SGD", "options": {"lr": 0.05, "momentum": 0.9}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
    "tensor": {"tensor_parallel": 2},
    "sequence": {"tensor_parallel": 2, "sequence_parallel": True},
    "context": {"context_parallel": 2},
    "experts": {"expert_parallel": 2, "zero_stage": 3},
    "pipeline": {"pipeline_parallel": 2, "microbatches": 2},
    "zero-bubble": {"pipeline_parallel": 2, "schedule": "zero_bubble", "microbatches": 2},
    "zero3, tensor": {"ranks": 4, "zero_stage": 3, "tensor_parallel": 2},
    "context, pipeline": {
        "ranks": 4,
        "context_parallel": 2,
        "pipeline_parallel": 2,
        "microbatches": 2,
    },
    "zero3, experts, pipeline": {
        "ranks": 4,
        "zero_stage": 3,
        "expert_parallel": 2,
        "pipeline_parallel": 2,
        "microbatches": 2,
    },
}
PARTS = ["blocks.0", "blocks.1", "blocks.1.up", "blocks.1.down"]


def setup_of(
    make_setup: Any, task: str, layout: str, settings: dict[str, Any], **section: Any
) -> Any:
    keys = {"ranks": 2, "checkpoint_activations": True, "batch_size": 8}
    keys.update(LAYOUTS[layout], **section)
    blocks = {"blocks": 4} if layout == "zero-bubble" else {}
    prepared = make_setup("Table", {**SGD, **blocks, **settings}, **keys)
    job = with_changes(prepared.job, {"task.source": f"recomputed_tasks.py:{task}"})
    return type(prepared)(job)


def keeping(make_setup: Any, layout: str, *, kind: str = "count", **more: Any) -> Any:
    mixture = {"mixture": True} if "experts" in layout else {}
    choice = more.pop("checkpoint_activations", True)
    settings = {"kind": kind, **mixture, **more}
    return setup_of(make_setup, "Keeping", layout, settings, checkpoint_activations=choice)


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "zero2": ("zero2", {}),
    "zero3": ("zero3", {}),
    "zero3, of operators": ("zero3", {"checkpoint_activations": "operators"}),
    "zero3, units in a unit": ("zero3", {"units": PARTS}),
    "zero3, no units": ("zero3", {"units": []}),
    "tensor": ("tensor", {}),
    "sequence": ("sequence", {"kind": "count"}),
    "context": ("context", {}),
    "experts": ("experts", {}),
    "zero3, tensor": ("zero3, tensor", {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_blocks_keep_where_it_is_not_given_back_is_refused_on_all_ranks(
    name: str, make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    layout, settings = REFUSED[name]
    setup = keeping(make_setup, layout, **settings)
    command = {"op": "train_steps", "run_id": "run", "until_step": 1}
    operation = (setup.open_command(), command, str(tmp_path))
    for refusal in on_ranks(setup.job.datacenter.ranks, "refused_training", operation):
        name = "Decoder" if settings.get("units") == [] else "Block"
        assert f"{name} computes something else when it is called once more" in refusal
        assert refusal.endswith("or set checkpoint_activations = false")


ONE_RANK = {
    # The other rank waits in a collective of the block after, or in the one that it refuses.
    "zero3": {"rank": 1},
    "tensor": {"rank": 0, "kind": "count"},
    "experts": {"rank": 1},
    # The other rank has the first stage, and waits for gradients.
    "pipeline": {"rank": 1},
    "zero-bubble": {"rank": 1},
}


@pytest.mark.parametrize("layout", ONE_RANK)
def test_a_block_of_one_rank_that_is_refused_ends_all_ranks_with_the_sentence(
    layout: str, make_setup: Any, warm_datacenter: DatacenterDriver
) -> None:
    setup = keeping(make_setup, layout, **ONE_RANK[layout])
    warm_datacenter.open(layout, setup)
    began = time.monotonic()
    with pytest.raises(CommandError, match=r"Block computes something else when it is called"):
        warm_datacenter.train(layout, 0, 1)
    assert time.monotonic() - began < setup.job.time.lease_seconds


def test_a_block_that_calls_its_units_in_another_order_is_refused_before_ranks_gather_them(
    make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    settings = {"kind": "count", "units": ["blocks.0", "blocks.1", "blocks.1.q", "blocks.1.k"]}
    setup = setup_of(make_setup, "Turning", "zero3", settings)
    command = {"op": "train_steps", "run_id": "run", "until_step": 1}
    for refusal in on_ranks(2, "refused_training", (setup.open_command(), command, str(tmp_path))):
        assert "a _TurningBlock computes something else when it is called once more" in refusal


@pytest.mark.parametrize("layout", ["zero3", "tensor"])
def test_a_block_that_fails_when_it_is_called_once_more_is_refused(
    layout: str, make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    """As with an iterator that ends: plain PyTorch calls it once."""
    setup = keeping(make_setup, layout, kind="once")
    command = {"op": "train_steps", "run_id": "run", "until_step": 1}
    for refusal in on_ranks(2, "refused_training", (setup.open_command(), command, str(tmp_path))):
        assert "a _KeepingBlock fails (StopIteration) when it is called once more" in refusal


USUAL: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "qwen3": [
        ("zero3", {}),
        ("zero3", {"precision": "bf16"}),
        ("tensor", {}),
        ("sequence", {}),
        ("pipeline", {}),
    ],
    "qwen3-four": [("zero-bubble", {})],
    "gpt2": [("zero3", {"accumulate": 2}), ("tensor", {}), ("context", {})],
    "bert": [("zero3", {}), ("tensor", {}), ("pipeline", {})],
    "qwen3_moe": [("zero3", {}), ("experts", {})],
}


def test_usual_models_train_to_the_same_bits_with_and_without(
    make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    """In float32 and in bfloat16, with dropout."""
    cases: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = []
    for kind, layouts in USUAL.items():
        for layout, section in layouts:
            cases.append(("Usual", layout, {"kind": kind, "autocast": False}, section))
            # Elsewhere the comparison with the whole model refuses the rounding of autocast.
            if layout in ("zero3", "experts") and not section:
                cases.append(("Usual", layout, {"kind": kind, "autocast": True}, section))
    check_bits(cases, make_setup, on_ranks, tmp_path)


def test_blocks_that_python_skips_by_chance_train_to_the_same_bits_with_and_without(
    make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    """Tensor-parallel ranks skip the same ones, also in the check of their gradients."""
    cases: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
        ("Skipping", layout, {}, {}) for layout in ("zero3", "tensor", "sequence")
    ]
    check_bits(cases, make_setup, on_ranks, tmp_path)


def test_units_within_a_unit_train_to_the_same_bits_with_and_without(
    make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    """What watches the order of their calls sees those of both calls of the outer one."""
    nobody = {"kind": "count", "rank": 2}
    cases: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
        ("Keeping", "zero2", {**nobody, "units": PARTS}, {}),
        ("Keeping", "zero3", {**nobody, "units": PARTS}, {}),
        ("Keeping", "zero3", {**nobody, "units": ["blocks.1.up"]}, {"accumulate": 2}),
        ("Keeping", "sequence", {**nobody, "units": []}, {}),
        ("Keeping", "experts", {**nobody, "mixture": True}, {}),
    ]
    check_bits(cases, make_setup, on_ranks, tmp_path)


def test_losses_that_blocks_collect_train_to_the_same_bits_with_and_without(
    make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    """They are there once; nothing of a backward pass, or of what came before, is left for a step.

    Setting up a layout calls the model, too.
    """
    cases: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
        ("Collecting", "zero3", {"place": "file"}, {"accumulate": 2}),
        ("Collecting", "tensor", {"place": "hook"}, {}),
        ("Collecting", "zero2", {"place": "argument"}, {}),
    ]
    check_bits(cases, make_setup, on_ranks, tmp_path)


def test_combined_layouts_train_to_the_same_bits_with_and_without(
    make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    nobody = {"kind": "count", "rank": 4}
    cases: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
        ("Keeping", "zero3, tensor", nobody, {}),
        ("Keeping", "zero3, tensor", {**nobody, "units": PARTS}, {}),
        ("Keeping", "context, pipeline", nobody, {}),
        ("Keeping", "zero3, experts, pipeline", {**nobody, "mixture": True}, {}),
    ]
    check_bits(cases, make_setup, on_ranks, tmp_path, ranks=4)


def check_bits(
    cases: list[tuple[str, str, dict[str, Any], dict[str, Any]]],
    make_setup: Any,
    on_ranks: Any,
    tmp_path: Path,
    ranks: int = 2,
) -> None:
    """Train each case without recomputation, with it, and with that of operators."""
    operations = []
    for number, (task, layout, settings, section) in enumerate(cases):
        for choice in choices_of(layout):
            section = {**section, "checkpoint_activations": choice}
            setup = setup_of(make_setup, task, layout, settings, **section)
            file = tmp_path / f"{number}-{choice}"
            file.write_bytes(setup.layout.header + bytes(4 * setup.layout.size))
            command = {
                "op": "train_steps",
                "run_id": "run",
                "until_step": STEPS,
                "result": str(file),
            }
            operations.append((setup.open_command(), command, f"{file}.state"))
    on_ranks(ranks, "train", operations)
    for number, case in enumerate(cases):
        without, *others = (
            (tmp_path / f"{number}-{choice}").read_bytes() for choice in choices_of(case[1])
        )
        assert others == [without] * len(others), case


def choices_of(layout: str) -> list[Any]:
    return [False, True] if layout == "zero-bubble" else [False, True, "operators"]
