"""The last model that a device received: it is not sent again, and later ones as their change."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING

from isthmus.errors import UpdateError
from isthmus.transport.blobs import Buffer
from isthmus.transport.requests import changes_of, first_model_of, model_of
from isthmus.wire import link_pb2

if TYPE_CHECKING:
    from isthmus_clients.device.active_run import ActiveRun
    from isthmus_clients.device.task_host import TaskHost

MAX_CHANGES = 16
"""Most changes of rounds that are applied one after the other."""


class ReceivedModels:
    """Keeps a copy of the last model of a run.

    Guarantees:
      * a model that is here is not asked for again, whatever it is for: training, another attempt,
        an evaluation, a comparison;
      * a change is asked for only if the model before it is here;
      * a model that changes lead to is used only if it has the SHA-256 that the server announced.
    """

    def __init__(self, *, shares: bool = False) -> None:
        """`shares`: models come as open files, which cost no more than the copy of one.

        Then a copy is kept only in jobs that send changes.
        """
        self._shares = shares
        self._run_id = ""
        self._sha256 = b""
        self._model: bytearray | None = None
        self._takes_changes = False
        self._is_linked = False
        """Whether a link asks what is wanted; devices that are simulated get whole models."""

    def wanted(self, request: link_pb2.Request) -> link_pb2.Blob | None:
        """The blob that a request needs: a change instead of a model, if it leads to that."""
        self._is_linked = True
        change = self._change(request)
        return model_of(request) if change is None else change.blob

    def held(self, request: link_pb2.Request) -> Buffer | None:
        """The beginning of the blob of a request that is here already; None for nothing of it."""
        first = first_model_of(request)
        if self._model is None or not first or first != self._sha256:
            return None
        work = getattr(request, request.WhichOneof("work") or "")
        return self._model if work.run_id == self._run_id else None

    def change_size(self, run: ActiveRun, request: link_pb2.Request, size: int) -> int:
        """The size of the model that a blob of `size` bytes leads to.

        Raises:
            UpdateError: these are not changes of the run's models.
        """
        change = self._change(request)
        model = model_of(request)
        if change is None or model is None or size != change.blob.size:
            return size
        each = 0 if run.changes is None else run.changes.nbytes
        if not 0 < size <= MAX_CHANGES * each:
            raise UpdateError(
                f"a change of the model in {size} bytes was announced; one round's has at most "
                f"{each}"
            )
        return model.size

    async def whole(
        self, host: TaskHost, run: ActiveRun, request: link_pb2.Request, received: Buffer
    ) -> Buffer:
        """The models of a request, of which changes may have been received, in the host's memory.

        Raises:
            UpdateError: the changes lead to another model than the announced one, or the model
                before them is no longer here.
        """
        change = self._change(request)
        model = model_of(request)
        assert model is not None
        if len(received) >= run.layout.nbytes:
            await asyncio.to_thread(self._keep, run, request, received)
            return received
        kept = self._model
        self._model = None
        if change is None or kept is None:
            raise UpdateError("the model before the received change is not here any more")
        memory = host.buffer(len(kept), run.room_for(request))
        await asyncio.to_thread(self._advance, run, kept, received, model)
        memory[:] = kept
        return memory

    def forget(self, run_id: str) -> None:
        """Free the memory of a run's model."""
        if run_id == self._run_id:
            self._model = None

    def _advance(
        self, run: ActiveRun, kept: bytearray, changes: Buffer, model: link_pb2.Blob
    ) -> None:
        codec = run.changes
        assert codec is not None  # else no change is asked for
        view = memoryview(changes)
        vector = run.layout.decode(kept)
        try:
            while view:
                view = view[codec.apply(vector, view) :]
        except ValueError as error:
            raise UpdateError(f"the changes of its model cannot be used: {error}") from error
        if hashlib.sha256(kept).digest() != model.sha256:
            raise UpdateError("the changes of its model do not lead to the announced model")
        self._model = kept
        self._sha256 = model.sha256

    def _keep(self, run: ActiveRun, request: link_pb2.Request, received: Buffer) -> None:
        """Keep a copy of the first model that was received for a request."""
        takes_changes = run.changes is not None
        if not self._is_linked or (self._shares and not takes_changes):
            return
        first = first_model_of(request)
        if not first or (self.held(request) is not None):
            return
        model = memoryview(received)[: run.layout.nbytes]
        # The link has checked the whole blob, of which this may be a part.
        if len(model) < len(received) and hashlib.sha256(model).digest() != first:
            return
        kept = self._model
        self._model = None  # while it is being overwritten
        if kept is None or len(kept) != len(model):
            kept = None  # before the new one is allocated
            try:
                kept = bytearray(len(model))
            except MemoryError:
                return  # of the owner's limit; the next request gets the whole model again
        kept[:] = model
        self._run_id = run.run_id
        self._sha256 = first
        self._takes_changes = takes_changes
        self._model = kept

    def _change(self, request: link_pb2.Request) -> link_pb2.ModelChange | None:
        """The change in a request that begins at the model that is here."""
        offers = changes_of(request)
        model = model_of(request)
        if self._model is None or not self._takes_changes or not offers or model is None:
            return None
        if self._sha256 == model.sha256:
            return None  # it is here
        if getattr(request, request.WhichOneof("work") or "").run_id != self._run_id:
            return None
        # One of a model's size could not be told from a model, whose SHA-256 the link checks.
        changes = (each for each in offers if each.blob.size < model.size)
        return next((change for change in changes if change.base == self._sha256), None)
