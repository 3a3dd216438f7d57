"""What a participant is to who carries its requests: the link, or a server in its own process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from isthmus.transport.blobs import Buffer
from isthmus.wire import link_pb2

ReportProgress = Callable[[link_pb2.Progress], None]
"""Cheap, callable from any thread, may be dropped; the request's id is filled in."""


class Worker(Protocol):
    """What a participant does with what it is asked for."""

    def buffer(self, request: link_pb2.Request, size: int) -> Buffer | None:
        """Memory of `size` bytes for the model of a request; an error is a `Failure` reply.

        None for what is not wanted: the work is done without it.
        """
        ...

    async def work(
        self, request: link_pb2.Request, model: Buffer | None, progress: ReportProgress
    ) -> tuple[link_pb2.Reply, Buffer | None]:
        """Do the work; `model` is the buffer given before, filled, and the worker's to keep.

        Returns the reply (its id is filled in by the caller) and the content that goes with it,
        which stays untouched until `acknowledged`. An `IsthmusError` becomes a `Failure` reply with
        its sentence.
        """
        ...

    def acknowledged(self, request: link_pb2.Request, accepted: bool, reason: str) -> None:
        """What became of a request: neither its model nor its result is needed any more."""
        ...

    def cancel(self, request: link_pb2.Request, reason: str) -> None:
        """Nobody wants this request's result any more: stop early if that is easy."""
        ...
