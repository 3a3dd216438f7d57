"""The device agent: holds the link, and hands work to the run it belongs to.

PyTorch is imported only when a run is opened, so that an idle device stays small.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.contents import Buffer
from isthmus.errors import Refused, UpdateError
from isthmus.task import Participant
from isthmus.uplink import ReportProgress, Uplink
from isthmus.wire import link_pb2

if TYPE_CHECKING:
    from isthmus_clients.training import LocalRun

log = logging.getLogger(__name__)


class Agent:
    """One device's side of every run it takes part in (an `isthmus.uplink.Worker`).

    Guarantees:
      * its data never leaves this process: only an update, its weight and average figures do;
      * one piece of work at a time, off the event loop, so the link stays alive meanwhile.
    """

    def __init__(self, participant: Participant, data: Path | None, threads: int = 1) -> None:
        """`data` is where this device keeps its data; it wins over what a job says."""
        self.participant = participant
        self.data = data
        self.threads = threads
        self._runs: dict[str, LocalRun] = {}
        self._working = asyncio.Lock()
        self._stopped: set[str] = set()

    def buffer(self, request: link_pb2.Request, size: int) -> Buffer:
        """Memory for an arriving model: exactly one model of a run that is open.

        Raises:
            UpdateError: no such run is open, or the size is not its model's.
        """
        run = self._run(request.train_local.run_id)
        if size != run.layout.nbytes:
            raise UpdateError(
                f"a model of {size} bytes was announced where this run's takes {run.layout.nbytes}"
            )
        return bytearray(size)

    async def work(
        self, request: link_pb2.Request, model: Buffer | None, progress: ReportProgress
    ) -> tuple[link_pb2.Reply, Buffer | None]:
        """Open or close a run, or train for one round."""
        kind = request.WhichOneof("work")
        if kind == "open":
            async with self._working:
                return await asyncio.to_thread(self._open, request.open), None
        if kind == "train_local":
            run = self._run(request.train_local.run_id)
            assert isinstance(model, bytearray)
            stopped = lambda: request.id in self._stopped  # noqa: E731
            async with self._working:
                trained = await asyncio.to_thread(
                    run.train, request.train_local, model, progress, stopped
                )
            return link_pb2.Reply(trained=trained), model
        if kind == "close":
            self._runs.pop(request.close.run_id, None)
            return link_pb2.Reply(closed=link_pb2.Closed()), None
        raise Refused(f"an edge client does not do {kind!r}")

    def settled(self, request: link_pb2.Request, accepted: bool, reason: str) -> None:
        """Log a refusal; there is nothing to keep."""
        self._stopped.discard(request.id)
        if not accepted:
            log.warning("the server did not use our result: %s", reason)

    def cancel(self, request: link_pb2.Request, reason: str) -> None:
        """Stop training for a result that nobody wants, at the next step."""
        self._stopped.add(request.id)

    def _run(self, run_id: str) -> LocalRun:
        run = self._runs.get(run_id)
        if run is None:
            raise UpdateError(f"the run {run_id!r} is not open on this device")
        return run

    def _open(self, work: link_pb2.OpenRun) -> link_pb2.Reply:
        import torch

        from isthmus_clients.training import LocalRun

        torch.set_num_threads(self.threads)
        run = LocalRun(work, self.participant, self.data)
        self._runs = {work.run_id: run}
        log.info("opened %s with %d examples", work.run_id, run.examples)
        return link_pb2.Reply(opened=link_pb2.Opened(examples=run.examples))


async def serve(address: str, participant: Participant, data: Path | None, threads: int) -> None:
    """Dial in and work until cancelled.

    Raises:
        Refused: the server does not want this device.
    """
    agent = Agent(participant, data, threads)
    await Uplink(address, participant.name, link_pb2.CLIENT, agent).run()
