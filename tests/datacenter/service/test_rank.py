"""A rank uses the processors that are there for it, and knows whose error it is."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.warm_ranks import Ranks
from torch.utils.data import DataLoader, Dataset

from isthmus.errors import UserError
from isthmus.task import user_code
from isthmus_datacenter.service.rank import _is_lost_peer, share_processors


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of threads that are set."""
    numbers: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4, 5, 6})
    return numbers


def test_the_ranks_of_a_machine_share_its_processors(
    threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for ranks in (1, 2, 3, 8):
        share_processors(ranks)
    assert threads == [4, 2, 1, 1]


def test_a_number_of_threads_that_the_owner_has_set_stays(
    threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    share_processors(1)
    assert not threads


class OwnError(RuntimeError):
    """An error of a user's code."""


def _raised(raise_it: Callable[[], object]) -> UserError:
    """The error of a task whose code raised."""
    with pytest.raises(UserError) as caught, user_code("loss()"):
        raise_it()
    return caught.value


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    "error",
    [
        KeyError("gloomy"),
        ValueError("unknown token 'NCCL' in line 5"),
        RuntimeError("Connection closed by peer"),
        OwnError("[../gloo/transport/tcp/pair.cc] Connection closed by peer"),
    ],
)
def test_errors_of_a_task_are_no_lost_rank_whatever_they_say(error: Exception) -> None:
    assert not _is_lost_peer(_raised(lambda: _raise(error)))


class _GloomyData(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise RuntimeError("gloo: Connection closed by peer")


def read_gloomily(rank: int) -> bool:
    """Whether the error of a process that reads is taken for a lost rank."""
    return _is_lost_peer(_raised(lambda: list(DataLoader(_GloomyData(), num_workers=1))))


def lose_a_peer(rank: int) -> list[bool]:
    """Whether what the loss of a rank raises is noticed, also through the code of a task."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    if rank:
        dist.destroy_process_group(group)  # which closes its connections
        return []
    values = torch.ones(1)
    # The other rank has left: gloo gives up, with an error of no type of its own.
    direct = _raised(lambda: dist.all_reduce(values, group=group))
    return [_is_lost_peer(direct), _is_lost_peer(direct.__cause__)]


def test_errors_of_communication_and_of_readers_are_told_apart() -> None:
    with Ranks(2) as group:
        assert group.run(Path(__file__), "read_gloomily") == [False, False]
        assert group.run(Path(__file__), "lose_a_peer")[0] == [True, True]
