"""A change of the number of ranks neither repeats nor leaves out an example."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.datacenter.plain import largest_difference, train_plainly

from isthmus.errors import DamagedError
from isthmus.job.datacenter import DatacenterSection
from isthmus_datacenter.training.data import ExampleOrder
from isthmus_datacenter.training.positions import DataPositions

EXAMPLES = 1201


def order_at(positions: DataPositions, step: int, replicas: int, batch_size: int) -> ExampleOrder:
    return ExampleOrder(
        examples=EXAMPLES,
        replicas=replicas,
        batch_size=batch_size,
        seed=3,
        origin=(step, positions.at(step)),
    )


@pytest.mark.parametrize("global_batch", [None, 24])
@pytest.mark.parametrize("seed", range(8))
def test_24_changes_in_five_epochs_use_each_example_five_times(
    seed: int, global_batch: int | None, tmp_path: Path
) -> None:
    """Attempts that fail are trained anew with other ranks, from the file that they wrote.

    No epoch ends with a step, and most changes are in the middle of one.
    """
    section = DatacenterSection(batch_size=4, global_batch=global_batch)
    draw = random.Random(seed)
    step = 0
    counted: list[int] = []
    counts = draw.choices([1, 2, 3, 4, 8], k=25)
    for number, replicas in enumerate(counts):
        for replicas_of_attempt in (draw.choice([1, 2, 4]), replicas):
            size = section.for_replicas(replicas_of_attempt).batch_size
            positions = DataPositions.read(tmp_path).with_size(
                step, replicas=replicas_of_attempt, batch_size=size
            )
            positions.write(tmp_path)
        size = section.for_replicas(replicas).batch_size
        order = order_at(positions, step, replicas, size)
        steps = draw.randrange(1, 12)
        if number == len(counts) - 1:
            steps = -(-(5 * EXAMPLES - len(counted)) // (replicas * size))
        for each in range(step, step + steps):
            for replica in range(replicas):
                counted += order.indices(each, each + 1, replica)
        step += steps
        assert positions.at(step) == len(counted)
        assert global_batch is None or len(counted) == step * global_batch
    assert set(Counter(counted[: 5 * EXAMPLES]).values()) == {5}
    for epoch in range(5):
        part = counted[epoch * EXAMPLES : (epoch + 1) * EXAMPLES]
        assert sorted(part) == list(range(EXAMPLES))


def test_changes_are_described_and_damage_is_refused(tmp_path: Path) -> None:
    positions = DataPositions().with_size(0, replicas=4, batch_size=8)
    assert positions.change_at(0) is None
    positions = positions.with_size(10, replicas=1, batch_size=8)
    assert positions.change_at(10) == (
        "1 replica in place of 4 from step 10 on: the data go on at example 320 of the order, and "
        "a step has 8 examples in place of 32"
    )
    assert positions.with_size(20, replicas=1, batch_size=8) == positions
    positions.write(tmp_path)
    assert DataPositions.read(tmp_path) == positions
    file = tmp_path / "positions.json"
    file.write_bytes(file.read_bytes().replace(b"320", b"321"))
    with pytest.raises(DamagedError, match=r"positions\.json is damaged, which has how far"):
        DataPositions.read(tmp_path)


def test_a_global_batch_is_divided_among_any_number_of_replicas() -> None:
    section = DatacenterSection(batch_size=4, global_batch=24)
    shares = {replicas: section.for_replicas(replicas) for replicas in (1, 2, 3, 4, 6, 8, 24)}
    assert {count: (each.batch_size, each.accumulate) for count, each in shares.items()} == {
        1: (24, 6),
        2: (12, 3),
        3: (8, 2),
        4: (6, 2),
        6: (4, 1),
        8: (3, 1),
        24: (1, 1),
    }
    for replicas in (5, 48):
        with pytest.raises(
            ValueError, match=rf"global_batch=24 cannot be divided among {replicas}"
        ):
            section.for_replicas(replicas)


def test_ranks_that_come_and_go_train_like_one_process(
    make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    """With the same examples in a step, whatever ranks train it, and a receipt of each change."""
    options = {"optimizer": "SGD", "options": {"lr": 0.2, "momentum": 0.9}}
    state = str(tmp_path / "state")
    notes = []
    setup = None
    for step, ranks in enumerate([2, 4, 4, 1, 2]):
        setup = make_setup("Table", options, ranks=ranks, batch_size=2, global_batch=8)
        file = tmp_path / "model"
        file.write_bytes(setup.layout.header + bytes(4 * setup.layout.size))
        command = {
            "op": "train_steps",
            "run_id": "run",
            "from_step": 3 * step,
            "until_step": 3 * step + 3,
            "result": str(file),
        }
        values = on_ranks(ranks, "train", [(setup.open_command(), command, state)])
        notes.append(values[0][0]["notes"])
        assert values[0][0]["examples"] == 24
    assert setup is not None
    plain = make_setup("Table", options, ranks=1, batch_size=8)
    assert largest_difference(
        setup, (tmp_path / "model").read_bytes(), train_plainly(plain, 15)
    ) < (2e-6)
    assert [len(each) for each in notes] == [0, 1, 0, 1, 1]
    assert notes[1] == [
        "4 replicas in place of 2 from step 3 on: the data go on at example 24 of the order, and a "
        "step has 8 examples"
    ]


def test_ranks_with_batches_of_their_own_go_on_where_others_ended(
    make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    """The job's steps get smaller with fewer ranks, and no example is used twice in an epoch."""
    state = str(tmp_path / "state")
    read: list[int] = []
    for step, ranks in enumerate([4, 2, 1, 4, 2]):
        setup = make_setup("Table", {}, ranks=ranks, batch_size=2)
        command = {
            "op": "train_steps",
            "run_id": "run",
            "from_step": 2 * step,
            "until_step": 2 * step + 2,
        }
        by_rank = on_ranks(ranks, "train_and_list", setup.open_command(), command, state)
        read += [index for indices in by_rank for index in indices]
    assert len(read) == 2 * 2 * (4 + 2 + 1 + 4 + 2)
    # 50 examples: the first epoch is whole, and two examples of the second follow.
    counts = Counter(read)
    assert sorted(counts) == list(range(50))
    assert sorted(counts.values())[-2:] == [2, 2]
