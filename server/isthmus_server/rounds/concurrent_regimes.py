"""Run the regimes of one attempt at the same time; if one fails, cancel the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from isthmus.errors import RoundFailed
from isthmus_server.regimes.attempt_result import TrainingResult
from isthmus_server.regimes.base import AttemptFailed, DatacenterResult, FederatedResult
from isthmus_server.regimes.call import ReceiptBook
from isthmus_server.regimes.federated import FederatedRegime
from isthmus_server.storage.records import Receipt

_CANCELLED_BECAUSE = "the attempt failed elsewhere"
"""Reason in the receipts of participants that were cancelled because others failed."""


class ConcurrentRegimes:
    """Runs the datacenters and the devices of an attempt at once, and ends them together."""

    def __init__(self, federated: FederatedRegime) -> None:
        """`federated` knows the receipts of devices whose training was cancelled."""
        self._federated = federated

    async def run(
        self,
        datacenters: Sequence[str],
        train_datacenter: Callable[[str], Coroutine[Any, Any, DatacenterResult]],
        train_devices: Coroutine[Any, Any, FederatedResult] | None = None,
    ) -> TrainingResult:
        """Run all regimes of a round to their end.

        Args:
            datacenters: names of the datacenters that take part.
            train_datacenter: what a datacenter does, by its name.
            train_devices: what the devices do; None in a round without devices.

        Raises:
            AttemptFailed: all that failed can be tried again; with all receipts.
            Exception: that of the first that failed in a way which no other attempt changes.
        """
        running = [asyncio.create_task(train_datacenter(name), name=name) for name in datacenters]
        devices = None if train_devices is None else asyncio.create_task(train_devices)
        tasks: list[asyncio.Task[Any]] = [*running, *([devices] if devices else [])]
        # A TaskGroup would do the same, but leaves this task marked as cancelled when one of the
        # others fails (until Python 3.13). Before Python 3.11.4 every later time limit of the task
        # then ends in CancelledError.
        try:
            finished, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            await _end_of(tasks)
        # What failed first comes before what then failed because it was cancelled.
        tasks.sort(key=lambda task: task not in finished)
        errors = [error for task in tasks if not task.cancelled() and (error := task.exception())]
        final = [error for error in errors if not isinstance(error, RoundFailed)]
        if final:
            raise final[0]
        if errors:
            raise self._combined(errors, running, devices)
        return TrainingResult(
            federated=devices.result() if devices is not None else None,
            datacenters=[task.result() for task in running],
        )

    def _combined(
        self,
        failures: Sequence[BaseException],
        datacenters: Sequence[asyncio.Task[DatacenterResult]],
        devices: asyncio.Task[FederatedResult] | None,
    ) -> AttemptFailed:
        """All failures of an attempt as one, with the receipts of cancelled participants too."""
        reasons: list[str] = []
        receipts: list[Receipt] = []
        task_failures: set[str] = set()
        for error in failures:
            reasons.append(str(error))
            if isinstance(error, AttemptFailed):
                receipts += error.receipts
                task_failures |= error.task_failures
        for task in datacenters:
            if task.cancelled():
                book = ReceiptBook([task.get_name()], "datacenter")
                receipts += book.complete(_CANCELLED_BECAUSE)
        if devices is not None and devices.cancelled():
            receipts += self._federated.cancelled(_CANCELLED_BECAUSE)
        # A side that ended before the other one failed has done its work, which is paid for.
        tasks: list[asyncio.Task[Any]] = [*datacenters, *([devices] if devices else [])]
        for task in tasks:
            if task.done() and not task.cancelled() and task.exception() is None:
                receipts += task.result().receipts
        # One failure that counts towards `attempts` makes the whole attempt count.
        excused = all(isinstance(error, AttemptFailed) and error.excused for error in failures)
        return AttemptFailed(
            "; ".join(reasons), receipts, excused=excused, task_failures=task_failures
        )


async def _end_of(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Wait until tasks have ended, so that nothing of an attempt goes on after it.

    A cancellation of the waiting task, and another one, is raised after that.
    """
    cancelled: asyncio.CancelledError | None = None
    while not all(task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
