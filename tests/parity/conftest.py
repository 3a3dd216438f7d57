"""Ranks that the comparisons share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from tests.warm_ranks import Ranks


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """The models here are so small that a second thread only waits."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(4)`: a group of four ranks, the same for all tests of a file."""
    groups: dict[int, Ranks] = {}
    yield lambda count: groups.setdefault(count, Ranks(count))
    for group in groups.values():
        group.close()
