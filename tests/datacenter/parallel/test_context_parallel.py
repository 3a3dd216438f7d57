"""Blocks that share positions train like one process, or are refused, whatever they attend by."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.datacenter.plain import largest_difference, train_plainly

from isthmus.job import with_changes

STEPS = 2
SGD = {"optimizer": "SGD", "options": {"lr": 0.2}}
WHOLE = {"0": 8, "38": 8}
"""Lengths of the two sentences by which a model is compared; all other sentences have padding."""
SHORT = {"0": 4, "38": 4}
SECOND_BATCH = dict.fromkeys(("7", "5", "45", "29", "24", "1", "42", "12"), 8)

EQUAL: dict[str, tuple[str, dict[str, int]]] = {
    "grouped heads": ("grouped", WHOLE),
    "padding as (batch, positions)": ("padding", WHOLE),
    "a mask as (positions, positions)": ("square", WHOLE),
    "a mask as (batch, positions, positions)": ("batched", WHOLE),
    "a window": ("window", SHORT),
    "slopes": ("slopes", SHORT),
    "a learned bias": ("learned", SHORT),
    "rotary tables as (positions, width)": ("rotary", WHOLE),
    "a mask of some batches": ("sometimes", WHOLE),
    "no mask of one batch": ("sometimes", {"0": 8, "38": 4, **SECOND_BATCH}),
    # Batches of eight sentences with eight positions, and a width of eight.
    "a width of as many as positions": ("conditioned", SHORT),
}

REFUSED_AT_ONCE = {
    "conditioned": "with context_parallel=2 the model fails",
    "gated": "with context_parallel=2 the model gives parameter '.*' another gradient than whole",
    "crossing": "with context_parallel=2 the model",
    "eager": "no block of the model has an attention that can be shared by positions",
    "own_window": r"mask of shape \(4, 4\) for 4 of 8 positions; make it outside of the block",
    "own_slopes": "with context_parallel=2 the model gives another output than whole",
    "pooled": "with context_parallel=2 the model gives another output than whole",
    "recomputed": r"with context_parallel=2 the model fails in training",
    "both": "an attention has a mask and is_causal; make one mask of both",
}

REFUSED_IN_A_STEP = {
    "eager_sometimes": r"a Block calls scaled_dot_product_attention\(\) 0 times and did not for",
    "padding_sometimes": r"a Block is given a tensor of shape \(8, 8\) as argument \[1\] and did",
    "between": "the model changes hidden states between two blocks, where each rank has a part",
    "between_in_place": "the model changes hidden states between two blocks",
    "crossing_sometimes": r"shape \(8, 4, 8\) as argument \[1\], which is not for its 8 positions",
}


def setup_of(make_setup: Any, settings: dict[str, Any], **section: Any) -> Any:
    section = {"context_parallel": 2, "zero_stage": 0, "batch_size": 8, **section}
    prepared = make_setup("Table", {**SGD, **settings}, **section)
    job = with_changes(prepared.job, {"task.source": "context_tasks.py:Attending"})
    return type(prepared)(job)


def operation_of(setup: Any, file: Path) -> tuple[Any, ...]:
    file.write_bytes(setup.layout.header + bytes(4 * setup.layout.size))
    command = {"op": "train_steps", "run_id": "run", "until_step": STEPS, "result": str(file)}
    return setup.open_command(), command, f"{file}.state"


def test_every_way_of_attending_trains_like_one_process(
    make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    setups = {
        name: setup_of(make_setup, {"kind": kind, "lengths": lengths})
        for name, (kind, lengths) in EQUAL.items()
    }
    files = {name: tmp_path / str(number) for number, name in enumerate(setups)}
    on_ranks(2, "train", [operation_of(each, files[name]) for name, each in setups.items()])
    for name, setup in setups.items():
        expected = train_plainly(setup, STEPS)
        assert largest_difference(setup, files[name].read_bytes(), expected) < 1e-6, name


def test_blocks_that_see_other_positions_are_refused_when_a_run_opens(
    make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    commands = [setup_of(make_setup, {"kind": kind}).open_command() for kind in REFUSED_AT_ONCE]
    for messages in on_ranks(2, "refusals", commands, str(tmp_path)):
        for message, sentence in zip(messages, REFUSED_AT_ONCE.values(), strict=True):
            assert re.search(sentence, message), message


def test_one_position_on_each_rank_is_refused(
    make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    """Blocks of Transformers take it for a generated one, and leave out the causal mask."""
    command = setup_of(make_setup, {"kind": "causal", "positions": 2}).open_command()
    messages = on_ranks(2, "refusals", [command], str(tmp_path))
    assert "a Block gets one position on each rank" in messages[0][0]


@pytest.mark.parametrize("kind", REFUSED_IN_A_STEP)
def test_what_only_a_later_batch_does_is_refused(
    kind: str, make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    setup = setup_of(make_setup, {"kind": kind, "lengths": WHOLE})
    with pytest.raises(RuntimeError, match=f"TaskError: .*{REFUSED_IN_A_STEP[kind]}"):
        on_ranks(2, "train", [operation_of(setup, tmp_path / "result")])
