"""What counts as a hang, and the first collective in which ranks differ."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from isthmus_datacenter.messages import Activity, Collective
from isthmus_datacenter.service.activity import Pace
from isthmus_datacenter.service.flight_recorder import ENTRIES, first_difference
from isthmus_datacenter.service.flight_recorder import recorder_environment as environment
from isthmus_datacenter.service.hangs import HangLimits, describe_ranks, find_hang

LIMITS = HangLimits(lease_seconds=10.0, round_seconds=600.0)


def at(number: int, operation: str = "all_reduce", **more: Any) -> Collective:
    """A collective under way on all ranks."""
    values: dict[str, Any] = {"group": "gloo 0", "axis": "", "ranks": [], "elements": 5}
    return Collective(number=number, operation=operation, **{**values, "done": False, **more})


def after(number: int, operation: str = "all_reduce", **more: Any) -> Collective:
    return at(number, operation, done=True, **more)


def waiting(seconds: float, *collectives: Collective) -> Activity:
    return Activity(waits=True, seconds=seconds, where="w.py:1 in w()", collectives=collectives)


def working(seconds: float, *collectives: Collective, **more: Any) -> Activity:
    values = {"in_task": True, "collectives": collectives, **more}
    return Activity(waits=False, seconds=seconds, where="task.py:2 in loss()", **values)


@pytest.mark.parametrize(
    ("by_rank", "rank", "sentence"),
    [
        (
            [at(17), after(16)],
            1,
            "rank 1 has not begun all_reduce 17 of all ranks, in which rank 0 waits",
        ),
        (
            [at(18), at(17), at(18)],
            1,
            "rank 1 waits in all_reduce 17 of all ranks, and ranks 0 and 2 in all_reduce 18 of all "
            "ranks",
        ),
        (
            [at(7), at(7), at(7, "barrier"), at(7)],
            2,
            "collective 7 of all ranks is barrier on rank 2 and all_reduce on rank 0 and 2 others",
        ),
        (
            [at(7), at(7, elements=6)],
            1,
            "collective 7 of all ranks is all_reduce of 6 elements on rank 1 and all_reduce of 5 "
            "elements on rank 0",
        ),
        (
            [after(5), at(7), after(5)],
            0,
            "ranks 0 and 2 have not begun collective 6 of all ranks, and rank 1 waits in "
            "all_reduce 7 of all ranks",
        ),
    ],
)
def test_the_first_rank_that_differs_is_named(
    by_rank: list[Collective], rank: int, sentence: str
) -> None:
    difference = first_difference([[each] for each in by_rank])
    assert difference is not None
    assert (difference.rank, difference.sentence) == (rank, sentence)


def test_only_members_of_a_group_are_compared() -> None:
    first = {"group": "gloo 1", "ranks": [0, 1], "axis": "tensor"}
    second = {"group": "gloo 2", "ranks": [2, 3], "axis": "tensor"}
    rows = [[at(3, **first)], [at(3, **first)], [at(8, **second)], [after(7, **second)]]
    difference = first_difference(rows)
    assert difference is not None
    assert difference.sentence == (
        "rank 3 has not begun all_reduce 8 of axis 'tensor', in which rank 2 waits"
    )
    assert first_difference(rows[:2]) is None
    # Parts of an all-gather, and of what is done, may be unequal.
    assert first_difference([[at(3, "all_gather")], [at(3, "all_gather", elements=9)]]) is None
    assert first_difference([[after(3)], [after(3, "barrier")]]) is None
    # The ring of another rank may have lost the group; of its first collective it has not.
    assert first_difference([[at(3)], []]) is None
    assert first_difference([[at(1)], []]) is not None


@pytest.mark.parametrize(
    ("activities", "hang_seconds", "seconds"),
    [
        ([waiting, working], None, 150.0),
        ([waiting, working], 30.0, 30.0),
        # A job's own limit may be below the lease.
        ([waiting, working], 3.0, 3.0),
        # All may be at work, also in the only rank.
        ([working, working], None, None),
        ([working, working], 30.0, 30.0),
        ([working], None, None),
        ([working], 30.0, 30.0),
        # In the same collective, which may be slow.
        ([waiting, waiting], None, None),
        ([waiting, waiting], 30.0, 30.0),
    ],
)
def test_ranks_hang_after_the_limit_and_not_before(
    activities: list[Any], hang_seconds: float | None, seconds: float | None
) -> None:
    limits = dataclasses.replace(LIMITS, hang_seconds=hang_seconds)

    def hangs(after_: float, trains: bool = True) -> bool:
        # One of them has been there for longer.
        rows = [each(after_ + 1000.0 * (rank == 1)) for rank, each in enumerate(activities)]
        return find_hang(rows, limits, trains=trains) is not None

    assert hangs(seconds or 1e9) == (seconds is not None)
    assert not hangs((seconds or 1e9) - 0.1)
    assert hangs(1e9, trains=False) == (hang_seconds is not None)


def test_ranks_that_wait_for_each_other_hang_after_a_lease() -> None:
    rows = [waiting(10.0, at(4)), waiting(10.0, at(4, "barrier"))]
    sentence = find_hang(rows, LIMITS, trains=False)
    assert sentence == (
        "rank 1 hung for 10 s at w.py:1 in w(), and rank 0 at w.py:1 in w() (collective 4 of all "
        "ranks is barrier on rank 1 and all_reduce on rank 0)"
    )
    earlier = [dataclasses.replace(each, seconds=9.9) for each in rows]
    assert find_hang(earlier, LIMITS, trains=False) is None
    # Code that reads a checkpoint looks as if it waited, and has begun no collective.
    reading = [waiting(1e6, at(4)), waiting(1e6, after(3))]
    assert find_hang(reading, LIMITS, trains=True) is None
    assert describe_ranks([rows[0], None]) == [
        "rank 0 waits for other ranks at w.py:1 in w(), for 10 s, in all_reduce 4 of all ranks",
        "rank 1 has no command",
    ]


def test_steps_that_take_long_have_a_longer_limit() -> None:
    rows = [waiting(400.0), working(400.0, longest=41.0)]
    assert find_hang(rows, LIMITS, trains=True) is None
    rows = [waiting(410.0), working(410.0, longest=41.0)]
    assert find_hang(rows, LIMITS, trains=True) is not None
    # Not in the task's code: a slow disk, or a compiler.
    rows = [waiting(1e6), working(1e6, in_task=False)]
    assert find_hang(rows, LIMITS, trains=True) is None


def test_a_device_that_waits_keeps_its_rank_from_being_blamed() -> None:
    nccl = {"group": "nccl 0"}
    rows = [working(200.0, at(9, **nccl)), working(200.0, after(8, **nccl))]
    sentence = find_hang(rows, LIMITS, trains=True)
    assert sentence is not None
    assert sentence.startswith("rank 1 hung for 200 s at task.py:2 in loss() (rank 1 has not begun")


def test_a_thread_that_waits_keeps_its_rank_from_being_blamed() -> None:
    saving = working(200.0, at(9), in_task=False)
    sentence = find_hang([saving, working(200.0, after(8))], LIMITS, trains=True)
    assert sentence is not None
    assert sentence.startswith("rank 1 hung")
    # It may have begun a collective and be at work.
    rows = [working(200.0, at(9)), working(200.0, after(8))]
    assert find_hang(rows, LIMITS, trains=True) is None


def test_the_longest_step_is_not_a_wait_for_the_first_one() -> None:
    pace = Pace()
    pace.begin(run=True)
    pace.tick("step")
    pace.tick("evaluation")
    assert (pace.count, pace.longest) == (2, 0.0)
    pace.tick("evaluation")
    longest = pace.longest
    assert longest > 0
    pace.begin(run=False)
    pace.tick("step")
    assert pace.longest == longest
    pace.begin(run=True)
    assert pace.longest == 0.0


def test_the_owner_of_ranks_may_set_the_size_of_the_record() -> None:
    assert environment({}) == {"TORCH_FR_BUFFER_SIZE": str(ENTRIES)}
    assert environment({"TORCH_FR_BUFFER_SIZE": "0"}) == {}
