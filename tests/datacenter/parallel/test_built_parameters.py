"""What a parameter is besides its values is kept where ranks shard it, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.datacenter.plain import largest_difference, train_plainly

STEPS = 3


@pytest.fixture
def difference(make_setup: Any, on_ranks: Any, tmp_path: Path) -> Any:
    """Between what two ranks train, and plain PyTorch."""

    def difference(kind: str, stage: int) -> float:
        setup = make_setup("Peculiar", {"kind": kind}, zero_stage=stage)
        target = tmp_path / "model"
        target.write_bytes(setup.layout.header + bytes(4 * setup.layout.size))
        on_ranks(2, "trained_from_start", setup.open_command(), STEPS, str(target), False)
        return largest_difference(setup, target.read_bytes(), train_plainly(setup, STEPS))

    return difference


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_optimizer_finds_the_attributes_of_parameters(stage: int, difference: Any) -> None:
    """Such as a learning rate of their own."""
    assert difference("rated", stage) < 1e-6


@pytest.mark.parametrize("kind", ["hooked", "kept", "clamped"])
def test_parameters_that_are_not_sharded_stay_what_they_are(kind: str, difference: Any) -> None:
    assert difference(kind, 0) < 1e-6


@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_parameters_may_be_whole_numbers(stage: int, difference: Any) -> None:
    assert difference("whole numbers", stage) < 1e-6


@pytest.mark.parametrize(
    ("kind", "layout", "sentence"),
    [
        ("hooked", {"zero_stage": 1}, "parameter '3.weight' has a hook that gets its gradient"),
        ("clamped", {"zero_stage": 1}, "the forward pass of the model changes its parameter"),
        ("clamped", {"zero_stage": 3}, "the forward pass of the model changes its parameter"),
        ("renormalised", {"zero_stage": 0}, "module '1' has max_norm=0.1, which changes rows of"),
        ("renormalised", {"zero_stage": 3}, "module '1' has max_norm=0.1, which changes rows of"),
    ],
)
def test_what_ranks_would_do_otherwise_is_refused(
    kind: str,
    layout: dict[str, Any],
    sentence: str,
    make_setup: Any,
    on_ranks: Any,
    tmp_path: Path,
) -> None:
    setup = make_setup("Peculiar", {"kind": kind}, **layout)
    for (message,) in on_ranks(2, "refusals", [setup.open_command()], str(tmp_path)):
        assert message.startswith(sentence)


def test_a_change_that_one_rank_would_forget_is_refused(
    make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    """In half precision it computes with a copy, too."""
    setup = make_setup("Peculiar", {"kind": "clamped"}, ranks=1, precision="bf16")
    ((message,),) = on_ranks(1, "refusals", [setup.open_command()], str(tmp_path))
    assert message.startswith("the forward pass of the model changes its parameter '6.scale'")


def test_a_reference_to_what_is_not_trained_any_more_is_refused(
    make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    setup = make_setup("Peculiar", {"kind": "kept"}, zero_stage=3)
    command = {"op": "train_steps", "run_id": "run", "until_step": 2}
    operation = (setup.open_command(), command, str(tmp_path))
    for sentence in on_ranks(2, "refused_training", operation):
        assert "uses parameter '6.scale' by a reference that its code has kept" in sentence
