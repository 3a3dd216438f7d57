"""A participant's open requests; read and build the messages of requests and replies."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from isthmus.errors import IsthmusError, UpdateError
from isthmus.job.learning_rate import RoundPosition
from isthmus.start.manifest import ListedFile, StartManifest
from isthmus.transport.blob_sources import Filling, RestingSource
from isthmus.transport.blobs import (
    Assembly,
    Buffer,
    InFile,
    Piece,
    chunk_size,
    chunks,
    into,
)
from isthmus.transport.shared_memory import answer, opened, read_into
from isthmus.transport.stream import Stream, to_the_end
from isthmus.transport.transfer_time import TransferTime
from isthmus.transport.uploads import Upload
from isthmus.transport.worker import Worker
from isthmus.wire import link_pb2

MAX_REQUESTS = 64
"""Most unacknowledged requests of a server, which sends one or a few at a time."""

MAX_MODELS = 4
"""Most requests of a participant that have memory for a model, or for records of an app."""


@dataclasses.dataclass
class OpenRequest:
    """A request from its arrival until its result is acknowledged."""

    request: link_pb2.Request
    """The request for the worker, with an ID that no other has: a lying server may repeat its
    own."""
    id: str
    """ID of the request, as the server sent it."""
    buffer: Buffer | None = None
    assembly: Assembly | None = None
    wanted_on: Stream | None = None
    """The stream on which the blob was pulled; chunks on other streams are ignored."""
    read_on: Stream | None = None
    """The stream on which the server offered the file from which the whole blob was read."""
    reading: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    filling: Filling | None = None
    """The blob is being filled from sources of this participant, before the rest is pulled."""
    task: asyncio.Task[None] | None = None
    reply: link_pb2.Reply | None = None
    payload: Buffer | InFile | None = None
    sent_on: Stream | None = None
    """The stream on which its result was sent last, perhaps in part."""
    upload: Upload | None = None
    """The sending of its result to a store of the server."""
    reported_at: float = 0.0
    note: Future[None] | None = None
    """The sending of the last note."""

    @classmethod
    def of(cls, request: link_pb2.Request) -> OpenRequest:
        """A request that has just arrived; its own ID is replaced."""
        id_ = request.id
        request.id = uuid.uuid4().hex
        return cls(request, id_)

    def take(self, held: Buffer) -> None:
        """Begin the blob with what is here of it, unless that is something else after all."""
        assert self.assembly is not None
        assert self.buffer is not None
        blob = self.assembly.blob
        try:
            self.assembly.add(Piece(blob.sha256, 0, memoryview(held)))
        except UpdateError:
            self.assembly = Assembly(blob, into(self.buffer))

    def filled_from(self, sources: Sequence[RestingSource]) -> Filling | None:
        """Prepare to take the blob from sources; None if it is here, or no source can have it.

        Records of an app are for this participant alone, and a roster is of this sum alone.
        """
        assert self.assembly is not None
        kind = self.request.WhichOneof("work")
        if sources and kind not in ("app", "secure_step") and not self.assembly.complete:
            self.filling = Filling(self.assembly, sources)
        return self.filling

    async def fill(self, filling: Filling) -> None:
        """Fill the blob from sources, if one of them has it."""
        self.assembly = await filling.run()
        self.filling = None

    def abandon(self) -> None:
        """Have nothing more written into the memory of the blob, or read of the result's."""
        if self.filling is not None:
            self.filling.abandon()
        if self.upload is not None:
            self.upload.abandon()

    def has_result(self, sha256: bytes) -> bool:
        """Whether its result is this blob."""
        if self.payload is None or self.reply is None:
            return False
        return blob_of(self.reply).sha256 == sha256

    def pull(self, machine: str) -> link_pb2.Envelope:
        """Ask for the rest of the blob, or for a file with it that `machine` can open."""
        assert self.assembly is not None
        sha256 = self.assembly.blob.sha256
        offset = self.assembly.offset
        if offset == self.assembly.blob.size:
            machine = ""
        return link_pb2.Envelope(pull=link_pb2.Pull(sha256=sha256, offset=offset, machine=machine))

    async def read(self, stream: Stream, file: link_pb2.OpenFile) -> bool:
        """Read the whole blob from a file that was offered on a stream; False if it cannot be."""
        async with self.reading:
            if self.buffer is None:
                return False
            try:
                with opened(file, len(self.buffer)) as blob:
                    await to_the_end(asyncio.to_thread(read_into, blob, self.buffer))
            except OSError:
                return False
            self.read_on = stream
            return True

    @property
    def is_running(self) -> bool:
        """Whether its work has begun and not ended."""
        return self.task is not None and self.reply is None


class RequestLimits:
    """Bounds what a server can have a participant hold, whatever it asks, cancels or forgets.

    Guarantees:
      * at most `MAX_REQUESTS` requests are open or still running;
      * at most `MAX_MODELS` have memory for a model, from its allocation until the result is
        acknowledged.
    """

    def __init__(self) -> None:
        self._held: list[OpenRequest] = []
        self._dropped: list[OpenRequest] = []

    def drop(self, job: OpenRequest) -> None:
        """Count a request that the server gave up while it was running, until it has ended."""
        self._dropped.append(job)

    def check_room(self, open_jobs: Mapping[str, OpenRequest]) -> None:
        """Check that there may be one more request.

        Raises:
            UpdateError: too many are open or still running.
        """
        self._dropped = [job for job in self._dropped if job.task and not job.task.done()]
        if len(open_jobs) + len(self._dropped) >= MAX_REQUESTS:
            raise UpdateError(f"more than {MAX_REQUESTS} requests are open")

    def allocate(
        self, job: OpenRequest, size: int, worker: Worker, open_jobs: Mapping[str, OpenRequest]
    ) -> Buffer | None:
        """Allocate the memory for a request's model; None if the worker does not need it.

        Args:
            job: the request.
            size: of the model, in bytes.
            worker: allocates the memory.
            open_jobs: the requests that are not acknowledged, by the server's ID.

        Raises:
            UpdateError: too many others have memory, or there is none.
        """

        def is_held(other: OpenRequest) -> bool:
            if other.task is not None and not other.task.done():
                return True  # it holds the memory also after the server has dropped it
            is_open = open_jobs.get(other.id) is other
            return is_open and (other.reply is None or other.payload is not None)

        self._held = [other for other in self._held if is_held(other)]
        if len(self._held) >= MAX_MODELS:
            raise UpdateError(
                f"{MAX_MODELS} requests with a model are open here; send the next one after the "
                "receipt of one of them"
            )
        try:
            buffer = worker.buffer(job.request, size)
        except IsthmusError as error:
            refused = UpdateError(str(error))
            refused.code = error.code
            raise refused from None
        except (OSError, MemoryError) as error:
            raise UpdateError(f"no room for its model: {error!r}") from None
        if buffer is not None:
            self._held.append(job)
        return buffer


async def send_result(
    stream: Stream,
    open_jobs: Mapping[str, OpenRequest],
    pull: link_pb2.Pull,
    machine: str,
    moved: TransferTime,
) -> None:
    """Send the result of a finished request from the wanted offset, or the file that has it.

    `moved` measures it.
    """
    for job in open_jobs.values():
        if job.payload is None or not job.has_result(pull.sha256):
            continue
        if (file := answer(pull, job.payload, machine)) is not None:
            await stream.send(file)
            return
        moved.begin(time.monotonic())
        # Also where the broken one was of another request: a device at an aggregator does not go on
        # with its vector, and the next one would break the stream in the same way.
        again = moved.has_broken or job.sent_on not in (None, stream)
        job.sent_on = stream
        size = moved.chunk_bytes(chunk_size(len(job.payload)), again=again)
        for message in chunks(pull.sha256, job.payload, offset=pull.offset, chunk_bytes=size):
            if open_jobs.get(job.id) is not job:
                return  # acknowledged: its memory may be reused
            await stream.send(message)
            moved.add(len(message), time.monotonic())
        return
    absent = link_pb2.Chunk(sha256=pull.sha256, offset=pull.offset, absent=True)
    await stream.send(link_pb2.Envelope(chunk=absent))


def is_step_of_a_sum(request: link_pb2.Request) -> bool:
    """Whether the work is of use only if the participant also takes the steps that follow it."""
    kind = request.WhichOneof("work")
    if kind == "train_local" and request.train_local.keep:
        return True
    if kind == "train_local" and request.train_local.ranges:  # of the sum of ranges, before
        return True
    return kind in ("train_local", "score", "evaluate") and bool(getattr(request, kind).secure)


def is_plain_update(request: link_pb2.Request) -> bool:
    """Whether the work's result is an update that the server reads by itself."""
    return request.HasField("train_local") and not is_step_of_a_sum(request)


def ends_at_once(request: link_pb2.Request) -> bool:
    """Whether a participant that leaves gives up the work: what it has of a download is kept."""
    return is_step_of_a_sum(request) or request.HasField("prepare")


def failure(reason: str, code: str = "") -> link_pb2.Reply:
    """A reply that the work could not be done.

    Args:
        reason: a sentence for the user.
        code: a stable identifier of the reason for the server, such as `unmasked-for-model`.
    """
    return link_pb2.Reply(failure=link_pb2.Failure(reason=reason, code=code))


def fingerprint_messages(
    fingerprint: Mapping[str, Sequence[float]],
) -> dict[str, link_pb2.Fingerprint]:
    """Encode the fingerprint of a model's frozen parameters (see `isthmus.tensors.fingerprint`)."""
    return {name: link_pb2.Fingerprint(values=values) for name, values in fingerprint.items()}


def fingerprint_of(messages: Mapping[str, link_pb2.Fingerprint]) -> dict[str, list[float]]:
    """Decode what `fingerprint_messages` encoded."""
    return {name: list(message.values) for name, message in messages.items()}


def position_message(position: RoundPosition) -> link_pb2.RoundPosition:
    """Encode the position of a round in the schedules of the learning rate."""
    return link_pb2.RoundPosition(**position._asdict())


def position_of(message: link_pb2.RoundPosition) -> RoundPosition:
    """Decode what `position_message` encoded."""
    return RoundPosition(message.start, message.steps, message.cohort)


def listed_messages(manifest: StartManifest) -> list[link_pb2.StartFile]:
    """Encode the list of the files that a model starts from."""
    return [
        link_pb2.StartFile(
            part=file.part,
            name=file.name,
            blob=link_pb2.Blob(sha256=bytes.fromhex(file.sha256), size=file.size),
        )
        for file in manifest.files
    ]


def manifest_of(messages: Sequence[link_pb2.StartFile]) -> StartManifest:
    """Decode what `listed_messages` encoded.

    Raises:
        UserError: no start has such files.
    """
    return StartManifest(
        tuple(
            ListedFile(each.part, each.name, each.blob.sha256.hex(), each.blob.size)
            for each in messages
        )
    )


def model_of(request: link_pb2.Request) -> link_pb2.Blob | None:
    """The blob that a worker needs for a request, if any: a model, for most."""
    kind = request.WhichOneof("work")
    if kind == "open":
        return request.open.package.blob
    if kind == "train_local":
        return request.train_local.model
    if kind == "score":
        return request.score.models
    if kind == "evaluate":
        return request.evaluate.model
    if kind == "mean_gradient":
        return request.mean_gradient.model
    if kind == "app":
        return request.app.records
    if kind == "train_steps" and request.train_steps.HasField("model"):
        return request.train_steps.model
    if kind == "secure_step" and request.secure_step.HasField("roster"):
        return request.secure_step.roster
    return None


def changes_of(request: link_pb2.Request) -> Sequence[link_pb2.ModelChange]:
    """What a request offers in place of its model, to those that have an earlier one."""
    kind = request.WhichOneof("work")
    if kind == "train_local" and not request.train_local.with_gradient:
        return request.train_local.changes
    return request.evaluate.changes if kind == "evaluate" else ()


def first_model_of(request: link_pb2.Request) -> bytes:
    """SHA-256 of the model that the blob of a request is, or begins with; empty if unknown."""
    kind = request.WhichOneof("work")
    if kind == "score":
        return request.score.first_model
    if kind == "train_local" and request.train_local.with_gradient:
        return request.train_local.first_model
    if kind in ("train_local", "evaluate", "mean_gradient", "train_steps"):
        blob = model_of(request)
        return b"" if blob is None else blob.sha256
    return b""


def gradient_name(work: link_pb2.TrainLocal) -> bytes:
    """Names the gradient that follows the model of a training, 32 bytes; zeros if there is none.

    It is the SHA-256 of both together, so that it is known without reading them once more.
    """
    return work.model.sha256 if work.with_gradient else bytes(32)


def blobs_of(request: link_pb2.Request) -> list[link_pb2.Blob]:
    """All blobs of which a worker may fetch some for a request."""
    model = model_of(request)
    blobs = [] if model is None else [model]
    blobs += [file.blob for file in request.prepare.files]
    return [*blobs, *(change.blob for change in changes_of(request))]


def blob_of(reply: link_pb2.Reply) -> link_pb2.Blob:
    """The blob that belongs to a reply; an empty one if there is none."""
    kind = reply.WhichOneof("outcome")
    if kind == "trained":
        return reply.trained.result
    if kind == "secure_stepped":
        return reply.secure_stepped.masked
    if kind == "app_replied":
        return reply.app_replied.records
    if kind == "summed":
        return reply.summed.sum
    return reply.exported.model if kind == "exported" else link_pb2.Blob()
