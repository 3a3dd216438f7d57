"""Entries that tasks store at the same time are on disk after one commit."""

import asyncio

import pytest

from isthmus_server.storage.group_commit import GroupCommit


async def test_entries_of_the_same_turn_are_stored_at_once_and_later_ones_on_their_own():
    commits = []
    together = GroupCommit[str](lambda *entries: commits.append(entries))

    async def add(entry):
        await together.add(entry)
        assert any(entry in stored for stored in commits)  # before the caller goes on

    await asyncio.gather(*(add(name) for name in "abc"))
    await add("d")
    assert commits == [("a", "b", "c"), ("d",)]


async def test_each_caller_learns_that_its_commit_failed():
    def fail(*entries):
        raise OSError("the disk is full")

    together = GroupCommit[str](fail)
    outcomes = await asyncio.gather(*map(together.add, "ab"), return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["the disk is full"] * 2


async def test_a_cancelled_caller_does_not_end_the_commit_of_others():
    commits = []
    together = GroupCommit[str](lambda *entries: commits.append(entries))
    first, second = asyncio.create_task(together.add("a")), asyncio.create_task(together.add("b"))
    await asyncio.sleep(0)
    first.cancel()
    await second
    with pytest.raises(asyncio.CancelledError):
        await first
    assert commits == [("a", "b")]
