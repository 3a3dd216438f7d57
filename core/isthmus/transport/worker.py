"""The interface between a participant's work and the link, or a server in the same process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from isthmus.transport.blobs import Buffer, InFile
from isthmus.wire import link_pb2

ReportProgress = Callable[[link_pb2.Progress], None]
"""Called from any thread; cheap. Reports may be dropped. The request's id is filled in."""


class Worker(Protocol):
    """Executes the requests that a participant receives."""

    def buffer(self, request: link_pb2.Request, size: int) -> Buffer | None:
        """Memory of `size` bytes for the blob of a request; an error becomes a `Failure` reply.

        None if the worker does not need the blob: the request is executed without it.
        """
        ...

    async def work(
        self, request: link_pb2.Request, model: Buffer | None, progress: ReportProgress
    ) -> tuple[link_pb2.Reply, Buffer | InFile | None]:
        """Execute a request. `model` is the filled buffer from `buffer`; the worker may keep it.

        Returns the reply (the caller fills in its id) and its blob, which must not change until
        `acknowledged` is called. A blob without a SHA-256 is named by the link; in the same process
        there must be one. An `IsthmusError` becomes a `Failure` reply with its message.
        """
        ...

    def acknowledged(self, request: link_pb2.Request, accepted: bool, reason: str) -> None:
        """The server accepted or rejected the result; the request's blobs can be freed."""
        ...

    def cancel(self, request: link_pb2.Request, reason: str) -> None:
        """The result of a request is no longer needed: stop early if possible."""
        ...
