"""Ranks that hang are ended early, with the rank, its line and its stack; slow ones are not."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import pytest

from isthmus.errors import UserError
from isthmus.job import with_changes
from isthmus.wire import link_pb2

LINE = r"hanging_tasks\.py:\d+ in _stop\(\)"


def hanging(make_setup: Any, how: str, *, once: Path | None = None, **keys: Any) -> Any:
    """A job whose ranks hang after a quarter of 24 s, if it has no limit of its own."""
    settings = {"how": how} if once is None else {"how": how, "once": str(once)}
    prepared = make_setup("Table", settings, lease_seconds=2.0, zero_stage=0, **keys)
    changes = {"task.source": "hanging_tasks.py:Hanging", "time.round_seconds": 24.0}
    return type(prepared)(with_changes(prepared.job, changes))


def begin(datacenter: Any, run_id: str, setup: Any) -> dict[int, int]:
    """Open a run, and remove the logs of others; returns the processes of the ranks."""
    datacenter.open(run_id, setup)
    for path in datacenter.service.state.glob("**/stderr.log"):
        os.truncate(path, 0)
    pids: dict[int, int] = datacenter.rank_pids()
    return pids


def logs(datacenter: Any) -> str:
    """What all ranks have written."""
    return "".join(path.read_text() for path in datacenter.service.state.glob("**/stderr.log"))


@pytest.mark.parametrize("how", ["spin", "sleep", "lock"])
def test_a_rank_that_keeps_others_waiting_ends_the_attempt(
    how: str, warm_datacenter: Any, make_setup: Any, tmp_path: Path
) -> None:
    begin(warm_datacenter, f"plain-{how}", hanging(make_setup, "none"))
    _, expected = warm_datacenter.train(f"plain-{how}", 0, 6, hand_back=True)
    setup = hanging(make_setup, how, once=tmp_path / "once")
    before = begin(warm_datacenter, f"hangs-{how}", setup)
    sentence = (
        rf"^rank 1 hung for \d+ s at {LINE} \(rank 1 has not begun all_reduce \d+ of all ranks, in "
        r"which rank 0 waits\); if the code was at work, set datacenter\.hang_seconds above its "
        r"longest step; the stack of each rank is in .*/logs$"
    )
    with pytest.raises(UserError, match=sentence):
        warm_datacenter.train(f"hangs-{how}", 0, 6)
    text = logs(warm_datacenter)
    trained, model = warm_datacenter.train(f"hangs-{how}", 0, 6, hand_back=True)
    assert not trained.events
    assert model == expected
    assert not any(Path(f"/proc/{pid}").exists() for pid in before.values())
    assert re.search(r'hanging_tasks.py", line \d+ in _stop', text)
    assert re.search(r"in all_reduce \d+ of all ranks", text)


@pytest.mark.parametrize(
    ("how", "difference"),
    [
        (
            "skip",
            r"rank 1 hung for \d+ s at consensus\.py:\d+ in wait\(\), and rank 0 at "
            r"hanging_tasks\.py:\d+ in _hang\(\) \(collective \d+ of all ranks is all_reduce on "
            r"rank 1 and barrier on rank 0\)",
        ),
        (
            "swap",
            r"rank 1 hung for \d+ s at hanging_tasks\.py:\d+ in _hang\(\), and rank 0 at "
            r"hanging_tasks\.py:\d+ in _hang\(\) \(rank 1 has not begun barrier 1 of axis 'left', "
            r"in which rank 0 waits\)",
        ),
    ],
)
def test_ranks_in_different_collectives_end_the_attempt_within_seconds(
    how: str, difference: str, warm_datacenter: Any, make_setup: Any, tmp_path: Path
) -> None:
    setup = hanging(make_setup, how, once=tmp_path / "once", hang_seconds=10**6)
    begin(warm_datacenter, how, setup)
    with pytest.raises(UserError, match=difference):
        warm_datacenter.train(how, 0, 6)
    assert warm_datacenter.train(how, 0, 6)[0].steps == 6


def test_a_single_rank_that_sleeps_is_named(start_datacenter: Any, make_setup: Any) -> None:
    """In a note, which the server puts into its reason when the attempt's time is over."""
    driver = start_datacenter(ranks=1)
    driver.open("alone", hanging(make_setup, "alone", ranks=1))
    train = link_pb2.TrainSteps(run_id="alone", from_step=0, until_step=6)
    request = link_pb2.Request(id="alone", train_steps=train)

    async def noted() -> str:
        note: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def progress(report: link_pb2.Progress) -> None:
            if report.note and not note.done():
                note.set_result(report.note)

        work = asyncio.create_task(driver.service.work(request, None, progress))
        said = await note
        driver.service.cancel(request, "the attempt is over")
        with pytest.raises(UserError, match="the result is not wanted"):
            await work
        return said

    said = driver.run(noted())
    assert re.fullmatch(
        rf"rank 0 has been at {LINE} for \d+ s; the stack of each rank is in its log", said
    )
    assert re.search(r'hanging_tasks.py", line \d+ in _stop', logs(driver))


def test_what_gloo_says_of_tensors_of_other_sizes_is_the_reason(
    warm_datacenter: Any, make_setup: Any, tmp_path: Path
) -> None:
    begin(warm_datacenter, "sizes", hanging(make_setup, "sizes", once=tmp_path / "once"))
    trained, _ = warm_datacenter.train("sizes", 0, 6)
    (event,) = trained.events
    assert re.match(
        r"rank \d was ended by signal 6 \(SIGABRT\): \[enforce fail at .*\] op\.preamble\.length "
        r"<= op\.nbytes\. 20000 vs 10000.* \(gloo: another rank sent more than this one expects; "
        r"have all ranks call the same collectives, with tensors of the same size\) and was "
        r"replaced",
        event,
    )


def test_a_slow_step_is_no_hang(warm_datacenter: Any, make_setup: Any) -> None:
    # Longer than the lease and than what a rank logs, and not as long as the limit.
    prepared = hanging(make_setup, "slow")
    job = with_changes(prepared.job, {"time.round_seconds": 120.0})
    begin(warm_datacenter, "slow", type(prepared)(job))
    trained, _ = warm_datacenter.train("slow", 0, 6)
    assert trained.steps == 6
    assert not trained.events
    assert re.search(r'hanging_tasks.py", line \d+ in _stop', logs(warm_datacenter))


def test_a_job_has_a_limit_of_its_own(warm_datacenter: Any, make_setup: Any) -> None:
    setup = hanging(make_setup, "sleep", hang_seconds=3.0)
    changes = {"time.round_seconds": 10**6}
    begin(warm_datacenter, "own", type(setup)(with_changes(setup.job, changes)))
    # Whether the recorder had the others' collective by then depends on the machine.
    others = r"\((the others wait|rank 1 has not begun all_reduce \d+ of all ranks)"
    with pytest.raises(UserError, match=rf"^rank 1 hung for \d+ s at {LINE} {others}"):
        warm_datacenter.train("own", 0, 6)


def test_the_stack_of_native_code_that_keeps_pythons_lock_is_logged(
    warm_datacenter: Any, make_setup: Any, tmp_path: Path
) -> None:
    begin(warm_datacenter, "native", hanging(make_setup, "native", once=tmp_path / "once"))
    trained, _ = warm_datacenter.train("native", 0, 6)
    (event,) = trained.events
    assert event.startswith("rank 1 did not answer for 2 s")
    assert re.search(r'hanging_tasks.py", line \d+ in _stop', logs(warm_datacenter))
