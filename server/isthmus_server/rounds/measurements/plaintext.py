"""Ask devices for something short, in a job in which the server may see what each one answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from isthmus.wire import link_pb2
from isthmus_server.regimes.base import AttemptFailed
from isthmus_server.regimes.call import CallFailed, ReceiptBook, call
from isthmus_server.regimes.context import FederatedContext
from isthmus_server.regimes.transfer_allowance import TransferAllowance
from isthmus_server.storage.records import Receipt

Answer = TypeVar("Answer")


class PlaintextAnswers(Generic[Answer]):
    """The answers of a cohort to one request."""

    def __init__(
        self,
        context: FederatedContext,
        request: Callable[[], link_pb2.Request],
        read: Callable[[link_pb2.Reply], Answer],
        *,
        outcome: str,
        verb: str,
    ) -> None:
        """Prepare.

        Args:
            context: of the run.
            request: makes the request for one device.
            read: the answer in a reply; raises `UpdateError` if it is not usable.
            outcome: name of the expected outcome in `link_pb2.Reply`.
            verb: what devices do, for messages: "evaluate the model".
        """
        self._context = context
        self._request = request
        self._read = read
        self._outcome = outcome
        self._verb = verb
        self._answers: dict[str, Answer] = {}

    async def of(
        self, cohort: Collection[str], *, needed: int
    ) -> tuple[dict[str, Answer], list[Receipt]]:
        """The answers, by device, that were given within the round's time, and all receipts.

        Args:
            cohort: names of the devices.
            needed: least number of answers.

        Raises:
            AttemptFailed: fewer devices answered.
        """
        receipts = ReceiptBook(cohort, "federated")
        limits = self._context.job.time
        seconds = limits.first_round_seconds
        allowance = TransferAllowance(self._context.link, receipts.names, limits.least_rate)
        tasks = [asyncio.create_task(self._ask(name, receipts)) for name in receipts.names]
        pending = set(tasks)
        loop = asyncio.get_running_loop()
        own_deadline = deadline = loop.time() + seconds
        try:
            while pending and (left := deadline - loop.time()) > 0:
                _, pending = await asyncio.wait(pending, timeout=left)
                missing = [name for name in receipts.names if name not in receipts]
                deadline = allowance.end(own_deadline, missing)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            # The tasks of devices that were too slow are cancelled; anything else is an error of
            # the server.
            if isinstance(result, Exception):
                raise result
        for name in receipts.names:
            if name not in receipts:
                receipts.blame(name)
        all_receipts = receipts.complete(f"it did not {self._verb} within {seconds:g} s")
        if len(self._answers) < needed:
            reasons = sorted({f"{r.participant}: {r.reason}" for r in all_receipts if r.reason})
            raise AttemptFailed(
                f"{len(self._answers)} of {len(all_receipts)} devices could {self._verb} and "
                f"{needed} are needed ({'; '.join(reasons[:3])})",
                all_receipts,
                excused=receipts.excused,
                task_failures=receipts.task_failures,
            )
        # In the order of the cohort and not of arrival: sums of floats depend on it.
        answers = {name: self._answers[name] for name in receipts.names if name in self._answers}
        return answers, all_receipts

    async def _ask(self, name: str, receipts: ReceiptBook) -> None:
        link = self._context.link
        request = self._request()
        with contextlib.suppress(CallFailed):
            async with call(link, name, request, self._outcome, receipts) as reply:
                self._answers[name] = self._read(reply)
                receipts.record(name, "accepted", sent=True)
