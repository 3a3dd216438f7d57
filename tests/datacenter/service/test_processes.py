"""Lifetimes of processes: agents are restarted, and all processes end with the service."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

from tests import forked
from tests.datacenter.conftest import wait_until


def parents_by_pid() -> dict[int, int]:
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


def descendants(pid: int) -> list[int]:
    """All processes below a process."""
    parents = parents_by_pid()
    pids = [pid]
    for current in pids:
        pids.extend(child for child, parent in parents.items() if parent == current)
    return pids[1:]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] != "Z"
    except OSError:
        return False


def test_a_new_service_resumes_from_the_state_of_another(
    start_datacenter: Any, warm_datacenter: Any, make_setup: Any, tmp_path: Path
) -> None:
    setup = make_setup("Table", {"dropout": 0.2}, zero_stage=3)
    warm_datacenter.open("resumed", setup)
    warm_datacenter.train("resumed", 0, 3)
    warm_datacenter.train("resumed", 3, 6)
    shutil.copytree(
        warm_datacenter.service.state / "resumed", tmp_path / "state" / "resumed", symlinks=True
    )
    _, undisturbed = warm_datacenter.train("resumed", 6, 9, hand_back=True)

    fresh = start_datacenter(tmp_path / "state")
    fresh.open("resumed", setup)
    assert fresh.train("resumed", 6, 9, hand_back=True)[1] == undisturbed
    assert fresh.export("resumed", 9) == undisturbed

    ranks = fresh.rank_pids().values()
    (agent,) = {parents_by_pid()[pid] for pid in ranks}
    assert sorted(descendants(agent)) == sorted(ranks)
    os.kill(agent, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, ranks)))
    trained, blob = fresh.train("resumed", 6, 9, hand_back=True)
    assert blob == undisturbed
    assert all("the agent of the ranks died" in event for event in trained.events)


def test_killing_the_service_ends_all_its_processes(tmp_path: Path) -> None:
    words = ["datacenter", "launch", "--ranks", "2", "--server", "127.0.0.1:1"]
    words += ["--state", str(tmp_path), "--die-with-parent"]
    service, _output = forked.start(words, tmp_path, os.environ)
    logs = "logs/*/attempt_0/*/stderr.log"
    wait_until(lambda: not service.is_alive() or len(list(tmp_path.glob(logs))) == 2)
    assert service.is_alive()
    children = descendants(service.pid)
    assert len(children) == 4  # fork server, agent, two ranks
    service.kill()
    service.join()
    wait_until(lambda: not any(map(is_alive, children)))
