"""Processes that tests start from several threads."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

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
