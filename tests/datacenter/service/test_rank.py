"""A rank uses the processors that are there for it."""

from __future__ import annotations

import os

import pytest
import torch

from isthmus_datacenter.service.rank import share_processors


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
