"""A disk that is full or fails: the round ends with a sentence, and the ranks go on.

The ranks are real, and so are the errors of the file system. The limit on the size of a file gives
EFBIG on one rank; a full file system in memory, which only root can mount, gives ENOSPC on all.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from isthmus.errors import UserError

RunId = str
Fault = Callable[[Any, RunId], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def limited_files(datacenter: Any, run_id: RunId) -> Iterator[None]:
    """Rank 1 cannot write files of more than 1000 bytes."""
    pid = datacenter.rank_pids()[1]
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def full_disk(datacenter: Any, run_id: RunId) -> Iterator[None]:
    """The file system of the run has room for a few kilobytes."""
    free = os.statvfs(datacenter.service.state / run_id)
    filler = datacenter.service.state / run_id / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_bsize - 8192)
    try:
        yield
    finally:
        filler.unlink()


@pytest.fixture
def run_id(request: pytest.FixtureRequest, warm_datacenter: Any) -> Iterator[RunId]:
    """A run whose directory is a small file system of its own, for root."""
    name = f"storage-{abs(hash(request.node.name))}"
    directory: Path = warm_datacenter.service.state / name
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(directory)]
    mounted = os.geteuid() == 0 and not subprocess.run(command, capture_output=True).returncode
    if not mounted and "full_disk" in request.node.name:
        pytest.skip("only root can mount a file system; run as root")
    yield name
    if mounted:
        subprocess.run(["umount", "-l", str(directory)], check=True)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [(limited_files, r": File too large \(rank 1\)$"), (full_disk, r": No space left on device")],
    ids=["limited_files", "full_disk"],
)
@pytest.mark.parametrize("every", [0, 1], ids=["at the end", "within the round"])
def test_a_checkpoint_that_cannot_be_written_ends_the_attempt_and_nothing_else(
    warm_datacenter: Any, make_setup: Any, run_id: RunId, fault: Fault, sentence: str, every: int
) -> None:
    setup = make_setup("Table", {"width": 64}, zero_stage=3, checkpoint_steps=every)
    directory = warm_datacenter.service.state / run_id
    warm_datacenter.open(run_id, setup)
    warm_datacenter.train(run_id, 0, 2)
    ranks = warm_datacenter.rank_pids()
    files = {path.name for path in directory.iterdir()}
    with (
        fault(warm_datacenter, run_id),
        pytest.raises(UserError, match="a checkpoint could not be written to .*" + sentence) as end,
    ):
        warm_datacenter.train(run_id, 2, 6)
    assert end.value.code == "storage-failed"
    assert {path.name for path in directory.iterdir()} == files  # nothing half-written is left
    trained, blob = warm_datacenter.train(run_id, 2, 6, hand_back=True)
    assert warm_datacenter.rank_pids() == ranks
    assert trained.events == []
    warm_datacenter.open(f"{run_id}-undisturbed", setup)
    warm_datacenter.train(f"{run_id}-undisturbed", 0, 2)
    _, expected = warm_datacenter.train(f"{run_id}-undisturbed", 2, 6, hand_back=True)
    assert blob == expected


def test_a_checkpoint_that_cannot_be_read_is_reported_and_the_ranks_go_on(
    warm_datacenter: Any, make_setup: Any, run_id: RunId
) -> None:
    warm_datacenter.open(run_id, make_setup("Table"))
    warm_datacenter.train(run_id, 0, 2)
    ranks = warm_datacenter.rank_pids()
    (data,) = (warm_datacenter.service.state / run_id / "step-2").glob("__1_*.distcp")
    data.rename(data.with_suffix(".hidden"))
    warm_datacenter.open(run_id, make_setup("Table"))
    with pytest.raises(UserError, match=r"cannot be read \(No such file or directory\)"):
        warm_datacenter.train(run_id, 2, 4)
    data.with_suffix(".hidden").rename(data)
    warm_datacenter.train(run_id, 2, 4)
    assert warm_datacenter.rank_pids() == ranks
