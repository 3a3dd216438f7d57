"""The datacenter as one participant of the link: it serves requests and leaves in good order."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from isthmus.errors import IsthmusError, StorageError, UserError
from isthmus.identity.membership import Membership
from isthmus.identity.proxies import ProxyChoice
from isthmus.transport.blob_sources import NamedSource
from isthmus.transport.blobs import Buffer, InFile
from isthmus.transport.uplink import Uplink
from isthmus.transport.worker import ReportProgress
from isthmus.wire import link_pb2
from isthmus_datacenter.messages import ControlSignal
from isthmus_datacenter.service.fork_server import AgentForkServer
from isthmus_datacenter.service.rank_group import Nodes, RankGroup
from isthmus_datacenter.service.request_handler import RequestHandler
from isthmus_datacenter.service.transfer_files import TransferFiles

LOCK_SECONDS = 5.0
"""Time for a service that was just killed to release the state directory."""
_LEAVE_POLL_SECONDS = 1.0
"""Interval of the checks whether a node is about to be taken from the datacenter."""
_NODE_GRACE_SECONDS = 20.0
"""Grace period of a running round in that case; schedulers give about thirty seconds."""
SAVING_SECONDS = 10.0
"""Part of a grace period, at least, that is left for saving the state within a round."""

log = logging.getLogger(__name__)


class DatacenterService:
    """The `isthmus.transport.worker.Worker` of a datacenter, with a group of ranks.

    Guarantees:
      * one service per state directory;
      * a step is trained identically however often ranks, or this process, died on the way;
      * a failure is one sentence; every request gets a reply unless the service leaves.
    """

    def __init__(
        self,
        name: str,
        ranks: int,
        state: Path,
        data: Path | None = None,
        *,
        tasks: Path | None = None,
        nodes: Nodes | None = None,
        fork_server: AgentForkServer | None = None,
    ) -> None:
        """Lock the state directory and prepare the ranks, which `start` starts.

        Args:
            name: name of this participant on the link.
            ranks: number of ranks on this machine, or on each of the `nodes`.
            state: directory of checkpoints and logs.
            data: directory of the data, instead of the one in the job.
            tasks: with it, only tasks in this directory are loaded, and the server does not
                choose the data. Without it, the server chooses both, as on one machine.
            nodes: the cluster that runs the ranks; None for this machine.
            fork_server: starts the agent of this machine; by default a new one.

        Raises:
            UserError: another service uses this state directory.
        """
        self.name = name
        self.state = state.resolve()
        self._places = {"--tasks": tasks, "--data": data, "--state": state}
        # First: everything below uses files of the directory.
        self._lock_file = _lock(self.state)
        self._files = TransferFiles(self.state / "exchange")
        self.group = RankGroup(name, ranks, self.state, nodes, fork_server)
        self._handler = RequestHandler(
            self.group,
            self._files,
            self.state,
            None if data is None else data.resolve(),
            None if tasks is None else tasks.resolve(),
        )
        self._busy = asyncio.Lock()
        self._leave_requested = asyncio.Event()
        self._grace_seconds = 0.0
        self._running: str | None = None
        """Id of the request that is being executed."""
        self._cancelled: set[str] = set()
        """Ids of requests that were cancelled before they began."""

    def start(self) -> None:
        """Start the ranks, so that they are warm when the first request comes."""
        self.group.start()

    def close(self) -> None:
        """End the ranks and unlock the state directory."""
        self.group.close()
        self._lock_file.close()

    async def serve(
        self,
        address: str,
        membership: Membership | None = None,
        sources: Sequence[NamedSource] = (),
        proxy: ProxyChoice | None = None,
    ) -> None:
        """Connect to the server and serve its requests until cancelled.

        `sources` may have the models and packages that it sends; `proxy` is what the owner says
        about proxies, see `Uplink`.

        Raises:
            AdmissionRefused: the server does not admit this participant.
            UserError: the server is on another machine, and this one has not joined it, or a proxy
                cannot be used.
        """
        uplink = Uplink(
            address,
            self.name,
            link_pb2.DATACENTER,
            self,
            membership=membership,
            held=self._handler.held_model,
            sources=sources,
            proxy=proxy,
            places=self._places,
        )
        # Before the connection, so that the ranks are warm when the first request comes.
        self.start()
        link = asyncio.create_task(uplink.run())
        leave = asyncio.create_task(self.wait_to_leave())
        try:
            await asyncio.wait((link, leave), return_when=asyncio.FIRST_COMPLETED)
            if link.done():
                link.result()
        finally:
            for task in (link, leave):
                task.cancel()
            await asyncio.gather(link, leave, return_exceptions=True)
            self.close()

    # -- leaving --------------------------------------------------------------------------------

    @property
    def leaving(self) -> bool:
        """Whether `leave` was called."""
        return self._leave_requested.is_set()

    @property
    def running(self) -> bool:
        """Whether a request is being executed."""
        return self._running is not None

    def leave(self, grace_seconds: float) -> None:
        """Accept no more requests, and end after the running one or the grace period.

        After half of the grace period a running round saves its state, or earlier if saving would
        have less than ten seconds. The next service with this state directory resumes there; if
        there was no time to save, it repeats the round.
        """
        self._grace_seconds = grace_seconds
        self._leave_requested.set()

    async def wait_to_leave(self) -> None:
        """Wait for a request to leave, then until this service may end."""
        while not self.leaving:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_POLL_SECONDS):
                    await self._leave_requested.wait()
            if not self.leaving and await self.group.is_leave_requested():
                self.leave(_NODE_GRACE_SECONDS)
        log.warning("leaving: %s", "a round is running" if self.running else "idle")
        deadline = time.monotonic() + self._grace_seconds
        # A round that can end within the grace period does: its result is worth more than saved
        # progress.
        save_at = deadline - max(self._grace_seconds / 2, SAVING_SECONDS)
        # Results too: the server may still be fetching the last one.
        while (self.running or self._files.has_results) and time.monotonic() < deadline:
            if time.monotonic() > save_at:
                self.group.send_signal(ControlSignal.SAVE)
            await asyncio.sleep(0.05)
        if self.running:
            log.warning(
                "the round did not end within %g s and will be repeated", self._grace_seconds
            )

    # -- the link's worker ----------------------------------------------------------------------

    def buffer(self, request: link_pb2.Request, size: int) -> Buffer | None:
        """See `RequestHandler.create_buffer`."""
        return self._handler.create_buffer(request, size)

    async def work(
        self, request: link_pb2.Request, model: Buffer | None, progress: ReportProgress
    ) -> tuple[link_pb2.Reply, Buffer | InFile | None]:
        """Execute one request after the earlier ones; when leaving, never reply."""
        # The ranks execute one command at a time.
        async with self._busy:
            if not self.leaving:
                try:
                    return await self._execute(request, model, progress)
                except IsthmusError as error:
                    if not self.leaving:
                        raise
                    log.warning("%s", error)
            # The server would retry a refused round at once, and only a few times; for a lost
            # participant it waits. The link ends shortly.
            await asyncio.Event().wait()
        raise AssertionError

    async def _execute(
        self, request: link_pb2.Request, model: Buffer | None, progress: ReportProgress
    ) -> tuple[link_pb2.Reply, Buffer | InFile | None]:
        try:
            if request.id in self._cancelled:
                raise UserError("cancelled before it began")
            self._running = request.id
            return await self._handler.handle(request, model, progress)
        except BaseException as error:
            self._files.delete_result(request.id)
            if isinstance(error, OSError):  # for example, the disk is full
                raise StorageError(
                    f"the state directory {self.state} cannot be used: {error}"
                ) from error
            raise
        finally:
            self._running = None
            self._cancelled.discard(request.id)
            self._files.delete_model(request.id)

    def acknowledged(self, request: link_pb2.Request, accepted: bool, reason: str) -> None:
        """Delete the request's files; its model may be incomplete."""
        self._files.delete_model(request.id)
        self._files.delete_result(request.id)

    def cancel(self, request: link_pb2.Request, reason: str) -> None:
        """Stop the ranks at their next step if they execute this request; else refuse it later."""
        if request.id == self._running:
            self.group.send_signal(ControlSignal.CANCEL)
        else:
            self._cancelled.add(request.id)


def _lock(state: Path) -> TextIO:
    """Lock the state directory; the kernel unlocks it when this process ends.

    Returns:
        The open file that has the lock.

    Raises:
        UserError: another service has it, or the directory cannot be used.
    """
    try:
        # Who can write there has ranks execute code: the metadata of a checkpoint is a pickle.
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Who can open the file can hold its lock, also without writing to it.
        handle = os.open(state / "lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        file = os.fdopen(handle, "w")
    except OSError as error:
        raise UserError(f"the state directory {state} cannot be used: {error}") from error
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.1)  # `flock` has no timeout
                continue
            file.close()
            raise UserError(
                f"another datacenter service uses the state directory {state}; give each its own"
            ) from None
        return file
