"""Services that come and go: restored by the next one, and gone with all their processes."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests import forked
from tests.datacenter.conftest import descendants

from isthmus.errors import IsthmusError


def parents() -> dict[int, int]:
    """The parent of every process, read from /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")")[-1].split()
                parents[int(entry.name)] = int(fields[1])
            except OSError:
                continue
    return parents


def gone(pids: list[int]) -> bool:
    """Waits for it: only a hang is long."""
    deadline = time.monotonic() + 100.0
    while time.monotonic() < deadline:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] != "Z"
    except OSError:
        return False


def test_a_fresh_service_goes_on_where_another_was(
    start: Any, warm: Any, setup: Any, tmp_path: Path
) -> None:
    made = setup("Table", {"dropout": 0.2}, zero_stage=3)
    warm.open("resumed", made)
    warm.train("resumed", 0, 3)
    warm.train("resumed", 3, 6)
    shutil.copytree(warm.service.state / "resumed", tmp_path / "state" / "resumed", symlinks=True)
    _, undisturbed = warm.train("resumed", 6, 9, hand_back=True)

    fresh = start(tmp_path / "state")
    fresh.open("resumed", made)
    assert fresh.train("resumed", 6, 9, hand_back=True)[1] == undisturbed
    assert fresh.export("resumed", 9) == undisturbed

    ranks = list(fresh.run(fresh.service.group.rank_pids()).values())
    (agent,) = {parents()[pid] for pid in ranks}
    assert sorted(descendants(agent)) == sorted(ranks)
    os.kill(agent, signal.SIGKILL)
    assert gone(ranks)
    trained, blob = fresh.train("resumed", 6, 9, hand_back=True)
    assert blob == undisturbed
    assert all("the agent of the ranks died" in event for event in trained.events)


def test_kill_9_of_the_service_leaves_nothing(tmp_path: Path) -> None:
    words = ["datacenter", "launch", "--ranks", "2", "--server", "127.0.0.1:1"]
    words += ["--state", str(tmp_path), "--die-with-parent"]
    service, _said = forked.start(words, tmp_path, os.environ)
    deadline = time.monotonic() + 100.0
    while len(list(tmp_path.glob("logs/*/attempt_0/*/stderr.log"))) < 2:
        assert service.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    below = descendants(service.pid)
    assert len(below) == 4  # template, agent, two ranks
    service.kill()
    service.join()
    assert gone(below)


def test_ranks_that_cannot_start(start: Any, setup: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    driver = start()
    sentence = r"failed 4 times .* rank \d ended \(exit code 1\): .*nosuch0"
    with pytest.raises(IsthmusError, match=sentence):
        driver.open("never", setup("Table"))
