"""The requests of the agent, executed in the task's process.

All of this runs with the task in one process, so the agent trusts none of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING

from isthmus.errors import IsthmusError
from isthmus.job.flower import MAX_BYTES
from isthmus.system.channel import Channel
from isthmus.system.memory_file import mapped
from isthmus.task import user_traceback
from isthmus.wire import link_pb2
from isthmus_clients.device.resource_limits import CpuThrottle
from isthmus_clients.device.sandbox.confinement import confine
from isthmus_clients.device.sandbox.settings import WorkerSettings
from isthmus_clients.device.task_host import InProcessHost, train_in
from isthmus_clients.training.withholding import (
    INTERRUPTED,
    has_broken_accelerator,
    may_be_of_server,
)

if TYPE_CHECKING:
    from isthmus_clients.training.local_run import DeviceRun

_PROGRESS_SECONDS = 0.25
"""Shortest time between two reports; the agent passes on even fewer."""
_MAX_REASON = 4000
"""Longest explanation of an error, in characters."""


class TaskWorker:
    """Executes the agent's requests in the main thread, one at a time."""

    def __init__(
        self, channel: Channel, settings: WorkerSettings, secret: bytes | None = None
    ) -> None:
        self._channel = channel
        self._settings = settings
        self._requests: queue.SimpleQueue[tuple[link_pb2.Request, list[int]]] = queue.SimpleQueue()
        self._cancelled = ""
        """ID of the request that was cancelled last."""
        self._woken = threading.Event()
        self._throttle = CpuThrottle(settings.cpu_percent, sleep=self._woken.wait)
        who = settings.participant
        self._host = InProcessHost(
            who,
            settings.data,
            settings.tasks,
            settings.threads,
            device=settings.device,
            start=settings.start,
            secret=secret,
        )

    def run(self, separate: bool) -> None:
        """Serve until the agent ends the connection, which ends this process."""
        try:
            report = confine(self._settings.confinement, separate=separate)
        except IsthmusError as error:
            self._reply("", _failure(error))
            return
        self._send(link_pb2.Envelope(progress=link_pb2.Progress(note=report)))
        _print_notes()
        threading.Thread(target=self._read, daemon=True).start()
        while True:
            request, handles = self._requests.get()
            self._woken.clear()
            self._throttle.begin()
            broken = False
            try:
                memory = [memoryview(mapped(handle, filled=True)) for handle in handles]
                reply = self._execute(request, memory)
            except Exception as error:  # noqa: BLE001 - reported to the agent
                reply = _failure(error)
                broken = has_broken_accelerator(error)
            self._throttle.pause()
            self._reply(request.id, reply)
            if broken:
                # Here all later work would fail as well, whatever its model and data are.
                os._exit(1)

    def _read(self) -> None:
        try:
            while True:
                encoded, handles = self._channel.receive_with_handles()
                message = link_pb2.Envelope.FromString(encoded)
                if message.HasField("cancel"):
                    self._cancelled = message.cancel.id
                    self._woken.set()
                else:
                    self._requests.put((message.request, handles))
        except EOFError:
            os._exit(0)

    def _execute(self, request: link_pb2.Request, memory: list[memoryview]) -> link_pb2.Reply:
        kind = request.WhichOneof("work")
        host = self._host
        if kind == "open":
            examples = host.open(request.open)
            return link_pb2.Reply(opened=link_pb2.Opened(examples=examples))
        if kind == "train_local":
            return link_pb2.Reply(trained=self._train(request, *memory))
        if kind == "score":
            candidates = [list(mean.of) for mean in request.score.candidates]
            scores = self._run.score(memory[0], candidates, *memory[1:])
            return link_pb2.Reply(scored=link_pb2.Scored(scores=scores))
        if kind == "evaluate":
            return link_pb2.Reply(counted=self._run.evaluate(request.evaluate.round, *memory))
        *sent, out = memory
        payload = sent[0] if sent else b""
        answer, records = host.answer(request.id, request.app, payload)
        if records is not None:
            if len(records) > len(out):
                raise IsthmusError(
                    f"the app answered {len(records)} bytes, which exceeds {MAX_BYTES}={len(out)}"
                )
            out[: len(records)] = bytes(records)
        return link_pb2.Reply(app_replied=answer)

    @property
    def _run(self) -> DeviceRun:
        """The open run, whose personal state the agent sends in memory of its own."""
        assert self._host.run is not None
        return self._host.run

    def _train(
        self, request: link_pb2.Request, memory: memoryview, personal: memoryview | None = None
    ) -> link_pb2.Trained:
        run = self._run
        reported_at = 0.0

        def stopped() -> bool:
            self._throttle.pause()
            return self._cancelled == request.id

        def report(progress: link_pb2.Progress) -> None:
            nonlocal reported_at
            if time.monotonic() - reported_at >= _PROGRESS_SECONDS:
                reported_at = time.monotonic()
                self._send(link_pb2.Envelope(progress=progress))

        work = request.train_local
        return train_in(run, work, memory, report, stopped, personal)[0]

    def _reply(self, request_id: str, reply: link_pb2.Reply) -> None:
        reply.id = request_id
        self._send(link_pb2.Envelope(reply=reply))

    def _send(self, message: link_pb2.Envelope) -> None:
        self._channel.send(message.SerializeToString())


def _print_notes() -> None:
    """Have what the training notes in the agent's log, with what the task prints.

    The task's own settings for logging are left alone.
    """
    notes = logging.getLogger("isthmus_clients")
    notes.setLevel(logging.INFO)
    notes.addHandler(logging.StreamHandler())
    notes.propagate = False
    # That a run was opened is in the agent's log already.
    logging.getLogger("isthmus_clients.device.task_host").setLevel(logging.WARNING)


def _failure(error: Exception) -> link_pb2.Reply:
    reason = str(error)
    details = user_traceback(error)
    if not isinstance(error, IsthmusError):
        reason = f"internal error: {type(error).__name__}: {reason}"
        details = "".join(traceback.format_exception(error))
    code = INTERRUPTED if may_be_of_server(error) else ""
    with contextlib.suppress(Exception):  # the task may have closed it
        # For the owner: standard error is in the device's log, which gets the sentence too.
        print(details, end="", file=sys.stderr, flush=True)
    return link_pb2.Reply(failure=link_pb2.Failure(reason=reason[:_MAX_REASON], code=code))
