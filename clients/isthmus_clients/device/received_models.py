"""The last model that a device received, to which the change of a later one can be added."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING

from isthmus.errors import UpdateError
from isthmus.transport.blobs import Buffer
from isthmus.transport.requests import model_of
from isthmus.wire import link_pb2

if TYPE_CHECKING:
    from isthmus_clients.device.active_run import ActiveRun
    from isthmus_clients.device.task_host import TaskHost

MAX_CHANGES = 16
"""Most changes of rounds that are applied one after the other."""


class ReceivedModels:
    """Keeps a copy of the last model of a run whose job has `federated.download_bits`.

    Guarantees:
      * a change is asked for only if the model before it is here;
      * a model that changes lead to is used only if it has the SHA-256 that the server announced.
    """

    def __init__(self) -> None:
        self._run_id = ""
        self._sha256 = b""
        self._model: bytearray | None = None
        self._is_linked = False
        """Whether a link asks what is wanted; devices that are simulated get whole models."""

    def wanted(self, request: link_pb2.Request) -> link_pb2.Blob | None:
        """The blob that a request needs: a change instead of a model, if it leads to that."""
        self._is_linked = True
        change = self._change(request)
        return model_of(request) if change is None else change.blob

    def change_size(self, run: ActiveRun, request: link_pb2.Request, size: int) -> int:
        """The size of the model that a blob of `size` bytes leads to.

        Raises:
            UpdateError: these are not changes of the run's models.
        """
        change = self._change(request)
        if change is None or size != change.blob.size:
            return size
        each = run.change_codec.nbytes
        if not 0 < size <= MAX_CHANGES * each:
            raise UpdateError(
                f"a change of the model in {size} bytes was announced; one round's has at most "
                f"{each}"
            )
        return request.train_local.model.size

    async def whole(
        self, host: TaskHost, run: ActiveRun, request: link_pb2.Request, received: Buffer
    ) -> Buffer:
        """The model of a request, of which changes may have been received, in the host's memory.

        Raises:
            UpdateError: the changes lead to another model than the announced one, or the model
                before them is no longer here.
        """
        change = self._change(request)
        model = request.train_local.model
        if len(received) >= run.layout.nbytes:
            await asyncio.to_thread(self._keep, run, model, received)
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
        codec = run.change_codec
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

    def _keep(self, run: ActiveRun, model: link_pb2.Blob, received: Buffer) -> None:
        """Keep a copy of a model that was received whole, if changes of it can follow."""
        if not self._is_linked or run.job.federated.download_bits is None:
            return
        if len(received) > run.layout.nbytes:  # a gradient follows the model
            return
        if self._model is None or len(self._model) != len(received):
            self._model = bytearray(len(received))
        self._model[:] = received
        self._run_id = run.run_id
        self._sha256 = model.sha256

    def _change(self, request: link_pb2.Request) -> link_pb2.ModelChange | None:
        """The change in a request that begins at the model that is here."""
        work = request.train_local
        if self._model is None or not request.HasField("train_local"):
            return None
        if work.run_id != self._run_id or work.with_gradient:
            return None
        # One of a model's size could not be told from a model, whose SHA-256 the link checks.
        changes = (each for each in work.changes if each.blob.size < work.model.size)
        return next((change for change in changes if change.base == self._sha256), None)
