"""Ranks train on text from disk: each sequence once in an epoch, whatever ranks come and go."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.datacenter.plain import largest_difference, train_plainly


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for name in "abc":
        rows = [json.dumps({"text": f"{name}{number:03d}"}) for number in range(40)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    return folder


def steps(first: int, until: int, **more: Any) -> dict[str, Any]:
    return {"op": "train_steps", "run_id": "run", "from_step": first, "until_step": until, **more}


def test_ranks_that_come_and_go_read_each_sequence_once(
    make_setup: Any, on_ranks: Any, text: Path, tmp_path: Path
) -> None:
    """120 documents of five tokens are 74 sequences of eight, in steps of two for each rank."""
    read: list[int] = []
    first = 0
    for ranks, count in ((2, 3), (4, 5), (1, 4), (2, 3)):
        setup = make_setup("Text", {"text": str(text)}, ranks=ranks, batch_size=2)
        command = steps(first, first + count)
        by_rank = on_ranks(
            ranks, "train_and_list", setup.open_command(), command, str(tmp_path / "state")
        )
        read += [index for indices in by_rank for index in indices]
        first += count
    assert len(read) == 2 * (2 * 3 + 4 * 5 + 1 * 4 + 2 * 3)
    assert len(read) == 72
    assert set(Counter(read).values()) == {1}
    assert set(read) < set(range(74))


def test_ranks_train_like_one_process(
    make_setup: Any, on_ranks: Any, text: Path, tmp_path: Path
) -> None:
    settings = {"text": str(text), "optimizer": "SGD"}
    setup = make_setup("Text", settings, ranks=2, batch_size=4, zero_stage=3)
    file = tmp_path / "model"
    file.write_bytes(setup.layout.header + bytes(4 * setup.layout.size))
    command = steps(0, 12, result=str(file))
    on_ranks(2, "train", [(setup.open_command(), command, str(tmp_path / "state"))])
    plain = train_plainly(make_setup("Text", settings, ranks=1, batch_size=8), 12)
    assert largest_difference(setup, file.read_bytes(), plain) < 2e-6


def test_text_that_has_changed_since_the_run_began_is_refused(
    make_setup: Any, on_ranks: Any, text: Path, tmp_path: Path
) -> None:
    """Also where its tokens were deleted, so that it was tokenised anew."""
    setup = make_setup("Text", {"text": str(text)}, batch_size=2)
    opening = setup.open_command()
    state = str(tmp_path / "state")
    on_ranks(2, "train", [(opening, steps(0, 3), state)])
    (text / "d.jsonl").write_text(json.dumps({"text": "one more"}))
    sentences = on_ranks(2, "refused_training", (opening, steps(3, 6), state))
    assert sentences == 2 * [
        "the training data are not those of which this run has used 12 examples: files, tokenizer "
        "or length have changed; restore them, or begin another run"
    ]
    (text / "d.jsonl").unlink()
    [[values], _] = on_ranks(2, "train", [(opening, steps(3, 6), state)])
    assert values["examples"] == 12


def test_ranks_with_other_text_are_refused(
    make_setup: Any, on_ranks: Any, text: Path, tmp_path: Path
) -> None:
    settings = {"text": str(text), "length_of_rank": {"1": 4}}
    setup = make_setup("Text", settings, batch_size=2)
    operation = (setup.open_command(), steps(0, 3), str(tmp_path / "state"))
    assert on_ranks(2, "refused_training", operation) == 2 * [
        "rank 1 has other training data than rank 0; give all nodes the same files"
    ]
