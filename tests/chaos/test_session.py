"""What a chaos run does with its queue of jobs."""

from __future__ import annotations

import asyncio
import threading

from isthmus_chaos import session
from isthmus_chaos.session import ChaosSession


class Queue:
    """A deployment with a queue whose second submission takes a while."""

    def __init__(self) -> None:
        self.states: list[str] = []
        self.is_submitting = asyncio.Event()
        self.arrives = threading.Event()
        self.processes: dict[str, object] = {}

    async def submit(self) -> str:
        if self.states:
            self.is_submitting.set()
            await asyncio.to_thread(self.add_later)
        else:
            self.states.append("finished")
        return str(len(self.states))

    def add_later(self) -> None:
        assert self.arrives.wait(10)
        self.states.append("queued")

    async def cancel(self, id_: str) -> None:
        self.states[int(id_)] = "cancelled"

    def jobs(self) -> dict[str, tuple[str, str]]:
        return {str(number): (state, "") for number, state in enumerate(self.states)}

    async def until_connected(self) -> None:
        pass


async def test_a_submission_in_progress_at_the_end_is_cancelled_too(monkeypatch):
    queue = Queue()

    class Injector:
        def __init__(self, *_: object) -> None:
            pass

        async def run(self, _: object) -> None:
            await queue.is_submitting.wait()
            asyncio.get_running_loop().call_later(0.1, queue.arrives.set)

    class Checker:
        def __init__(self, *_: object) -> None:
            self.cancelled: set[str] = set()

        def check(self) -> list[str]:
            return []

    monkeypatch.setattr(session, "FaultInjector", Injector)
    monkeypatch.setattr(session, "InvariantChecker", Checker)
    run = ChaosSession(queue, [], lambda _: None)
    await run._run_faults(0.0)
    assert await asyncio.to_thread(queue.arrives.wait, 10)
    assert queue.states == ["finished", "cancelled"]
    assert run.report.violations == []
