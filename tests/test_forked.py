"""Processes that tests start from several threads."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from isthmus.task import loading
from tests import forked


def test_threads_read_the_exit_status_of_their_own_process() -> None:
    """Each start looks after all processes, those included that another thread waits for."""

    def status(_: int) -> int | None:
        process = forked.context().Process(target=os._exit, args=(3,))
        process.start()
        process.join()
        return process.exitcode

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(status, range(40))) == {3}


def test_two_threads_wait_for_one_process() -> None:
    process = forked.context().Process(target=os._exit, args=(3,))
    process.start()
    others = [threading.Thread(target=process.join) for _ in range(3)]
    for other in others:
        other.start()
    process.join()
    for other in others:
        other.join()
    assert process.exitcode == 3


def test_a_command_imports_nothing_from_the_task_of_another_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "left_behind.py").touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(loading, "_task_folders", [str(tmp_path)])
    with (tmp_path / "output").open("w+b") as output:
        words = ["python", "-c", "import left_behind"]
        process = forked.start_with([output.fileno()] * 3, words, tmp_path / "..", os.environ)
        process.join()
        output.seek(0)
        assert b"No module named 'left_behind'" in output.read()
