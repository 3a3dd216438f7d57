"""Flower's `Grid` over Isthmus connections: send a strategy's messages to ClientApps on devices.

    strategy.start(LinkGrid(link, loop, run_id, nodes), initial_arrays=arrays, num_rounds=3)

called in a thread, runs an unmodified Flower strategy on the devices in `nodes`. The rounds of a
job use `exchange`. Messages are pushed and not polled for. Records for several devices are encoded
once and sent as one blob.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from flwr.app import Error, Message, RecordDict

from isthmus.errors import UpdateError
from isthmus.printable import in_a_line
from isthmus.transport.blobs import describe, into
from isthmus.wire import link_pb2
from isthmus_flower.messages import SERVER_NODE, ErrorCode, identify, message, node_of
from isthmus_flower.records import decode, encode
from isthmus_flower.server.run_scoped_grid import RunScopedGrid
from isthmus_server.regimes.call import CallFailed, call
from isthmus_server.transport.link import Link

_LOST = ErrorCode.NODE_UNAVAILABLE
_LATE = ErrorCode.REPLY_MESSAGE_UNAVAILABLE
_BROKEN = ErrorCode.CLIENT_APP_RAISED_EXCEPTION


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeReply:
    """The outcome of one message to a node."""

    node: int
    reply: Message
    """The reply message, with records or an error."""
    bytes_out: int = 0
    bytes_in: int = 0
    seconds: float = 0.0
    """Running time of the app."""
    started: bool = True
    """The node was connected when the message was sent."""
    answered: bool = False
    """The node sent a reply, valid or not."""

    @property
    def failure(self) -> str:
        """Why the reply has no records; empty if it has."""
        return (self.reply.error.reason or "no reason") if self.reply.has_error() else ""

    @property
    def late(self) -> bool:
        """The node was there, and did not answer in time."""
        return self.reply.has_error() and self.reply.error.code == _LATE


class LinkGrid(RunScopedGrid):
    """The devices of a run as the nodes of a Flower strategy.

    Guarantees:
      * every message has exactly one reply, which is an error if the device is lost or late;
      * sender and message id of a reply come from the connection and not from the app;
      * the replies to one batch of messages take at most `max_bytes` together.
    """

    def __init__(
        self,
        link: Link,
        loop: asyncio.AbstractEventLoop,
        run_id: str,
        names: Callable[[], Iterable[str]],
        *,
        max_bytes: int = 4 << 30,
        seconds: float = 600.0,
    ) -> None:
        """Create a grid, to be called from other threads than the event loop's.

        Args:
            link: connects the devices, on which the run is open.
            loop: the event loop of the link.
            run_id: the run.
            names: returns the names of the connected devices.
            max_bytes: limit for all replies to one batch of messages.
            seconds: default timeout for a reply.
        """
        identify()
        self.link = link
        self.loop = loop
        self.run_id = run_id
        self.names = names
        self.max_bytes = max_bytes
        self.seconds = seconds
        self._ids = itertools.count(1)
        self._tasks: dict[str, asyncio.Task[NodeReply]] = {}
        self._published: Counter[bytes] = Counter()

    # -- the Grid interface ------------------------------------------------------------------------

    def get_node_ids(self) -> Iterable[int]:
        """Ids of the connected devices, in ascending order."""
        return sorted(self._nodes())

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages and return their ids."""
        listed = list(messages)  # in this thread: it may be a generator of the strategy
        return asyncio.run_coroutine_threadsafe(self.push(listed), self.loop).result()

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies that have arrived; each is returned once."""
        pull = self.pull(list(message_ids))
        return asyncio.run_coroutine_threadsafe(pull, self.loop).result()

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and wait for all replies; late ones are errors."""
        listed = list(messages)
        exchange = self.exchange(listed, self.seconds if timeout is None else timeout)
        node_replies = asyncio.run_coroutine_threadsafe(exchange, self.loop).result()
        return [node_reply.reply for node_reply in node_replies]

    # -- sending and receiving, on the event loop --------------------------------------------------

    async def close(self) -> None:
        """Cancel the messages that were pushed and not pulled."""
        tasks = self._tasks
        self._tasks = {}
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def push(self, messages: Sequence[Message]) -> list[str]:
        """See `push_messages`."""
        batch = self._send(messages, self.seconds)
        self._tasks.update(batch)
        return list(batch)

    async def pull(self, message_ids: Sequence[str]) -> list[Message]:
        """See `pull_messages`."""
        done = [id_ for id_ in message_ids if id_ in self._tasks and self._tasks[id_].done()]
        return [self._tasks.pop(id_).result().reply for id_ in done]

    async def exchange(
        self,
        messages: Sequence[Message],
        seconds: float,
        end_reason: Callable[[Sequence[NodeReply]], str] = lambda node_replies: "",
    ) -> list[NodeReply]:
        """Send messages and wait for their replies, which are returned in the same order.

        Args:
            messages: to send.
            seconds: timeout for each reply.
            end_reason: called with the replies so far; returns a reason to stop waiting, or "".
                Outstanding messages are then cancelled and fail with this reason.
        """
        tasks = list(self._send(messages, seconds).values())
        node_replies: list[NodeReply] = []
        reason = ""
        try:
            for done in asyncio.as_completed(tasks):
                node_replies.append(await done)
                if reason := end_reason(node_replies):
                    break
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [
            _failed(outgoing, _LATE, reason) if task.cancelled() else task.result()
            for outgoing, task in zip(messages, tasks, strict=True)
        ]

    def _send(
        self, messages: Sequence[Message], seconds: float
    ) -> dict[str, asyncio.Task[NodeReply]]:
        """Start to send messages; runs on the event loop. Returns the tasks by message id."""
        max_bytes = self.max_bytes // max(len(messages), 1)
        names = self._nodes()
        encoded: dict[int, tuple[link_pb2.Blob, bytes]] = {}
        batch = {}
        for outgoing in messages:
            # Strategies share one object between the messages of a round.
            key = id(outgoing.content)
            if key not in encoded:
                payload = encode(outgoing.content)
                encoded[key] = describe(payload), payload
            id_ = f"{self.run_id}/{next(self._ids)}"
            name = names.get(outgoing.metadata.dst_node_id)
            records, payload = encoded[key]
            coroutine = self._call(name, id_, outgoing, records, payload, max_bytes, seconds)
            batch[id_] = asyncio.create_task(coroutine)
        return batch

    async def _call(
        self,
        name: str | None,
        id_: str,
        outgoing: Message,
        records: link_pb2.Blob,
        payload: bytes,
        max_bytes: int,
        seconds: float,
    ) -> NodeReply:
        """Send one message and await its reply. Raises only when cancelled."""
        if name is None:
            return _failed(outgoing, _LOST, f"there is no node {outgoing.metadata.dst_node_id}")
        request = link_pb2.Request(
            id=self.link.new_id(),
            app=link_pb2.AppMessage(
                run_id=self.run_id,
                id=id_,
                kind=outgoing.metadata.message_type,
                group=outgoing.metadata.group_id,
                node=outgoing.metadata.dst_node_id,
                records=records,
            ),
        )
        if not self._published[records.sha256]:
            self.link.publish(records, memoryview(payload))
        self._published[records.sha256] += 1
        node_reply: NodeReply | None = None
        try:
            async with call(self.link, name, request, "app_replied", seconds=seconds) as reply:
                node_reply = await self._read(name, id_, outgoing, reply.app_replied, max_bytes)
                if node_reply.failure:
                    raise UpdateError(node_reply.failure)
        except CallFailed as failed:
            if node_reply is not None:
                return dataclasses.replace(node_reply, bytes_out=records.size)
            rejected = failed.status == "rejected"
            code = _BROKEN if rejected else _LATE if failed.timed_out else _LOST
            return dataclasses.replace(
                _failed(outgoing, code, failed.reason), started=failed.reached, answered=rejected
            )
        finally:
            self._published[records.sha256] -= 1
            if not self._published[records.sha256]:
                self.link.retract(records)
        return dataclasses.replace(node_reply, bytes_out=records.size)

    async def _read(
        self, name: str, id_: str, outgoing: Message, replied: link_pb2.AppReply, max_bytes: int
    ) -> NodeReply:
        if not (math.isfinite(replied.seconds) and replied.seconds >= 0):
            raise UpdateError(f"its time of {replied.seconds:g} s is not a duration")
        if replied.error or replied.error_code:
            node_reply = _failed(outgoing, replied.error_code, in_a_line(replied.error))
            return dataclasses.replace(node_reply, answered=True, seconds=replied.seconds)
        if replied.records.size > max_bytes:
            raise UpdateError(
                f"its reply has {replied.records.size} bytes, and the limit for each reply is "
                f"{max_bytes} (federated.flower.max_bytes)"
            )
        payload = bytearray(replied.records.size)
        await self.link.fetch(name, replied.records, into(payload))
        records = await asyncio.to_thread(decode, payload)
        return NodeReply(
            node=outgoing.metadata.dst_node_id,
            reply=_reply(outgoing, records, None, answers=id_),
            bytes_in=replied.records.size,
            seconds=replied.seconds,
            answered=True,
        )

    def _nodes(self) -> Mapping[int, str]:
        return {node_of(name): name for name in self.names()}


def _failed(outgoing: Message, code: int, reason: str) -> NodeReply:
    reply = _reply(outgoing, None, Error(code, reason))
    return NodeReply(node=outgoing.metadata.dst_node_id, reply=reply)


def _reply(
    outgoing: Message, records: RecordDict | None, error: Error | None, answers: str = ""
) -> Message:
    return message(
        records,
        kind=outgoing.metadata.message_type,
        source=outgoing.metadata.dst_node_id,
        to=SERVER_NODE,
        id_=f"reply to {answers}",
        answers=answers,
        group=outgoing.metadata.group_id,
        error=error,
    )
