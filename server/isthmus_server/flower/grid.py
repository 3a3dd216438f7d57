"""Flower's `Grid` over the link: a strategy's messages to ClientApps on our devices.

    strategy.start(LinkGrid(link, loop, run_id, nodes), initial_arrays=arrays, num_rounds=3)

in a thread runs an unmodified Flower strategy on the devices of `nodes`. A round of a job goes
through `exchange` in the same way. Messages are pushed, not polled for; records that many devices
get are encoded once and travel as one content.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from flwr.app import Error, Message, RecordDict

from isthmus.errors import UpdateError
from isthmus.integrations.flower.messages import SERVER_NODE, ErrorCode, identify, message, node_of
from isthmus.integrations.flower.records import decode, encode
from isthmus.transport.blobs import describe, into
from isthmus.wire import link_pb2
from isthmus_server.flower.one_run import OneRun
from isthmus_server.regimes.call import CallFailed, call
from isthmus_server.transport.link import Link
from isthmus_server.transport.sanitize import in_a_line

_LOST = ErrorCode.NODE_UNAVAILABLE
_LATE = ErrorCode.REPLY_MESSAGE_UNAVAILABLE
_BROKEN = ErrorCode.CLIENT_APP_RAISED_EXCEPTION


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What became of one message."""

    node: int
    reply: Message
    """With records, or with an error."""
    bytes_out: int = 0
    bytes_in: int = 0
    seconds: float = 0.0
    """The app's own time."""
    started: bool = True
    """It was here when it was asked."""
    sent: bool = False
    """It answered."""

    @property
    def failure(self) -> str:
        """Why there are no records; empty where there are."""
        return (self.reply.error.reason or "no reason") if self.reply.has_error() else ""


class LinkGrid(OneRun):
    """One run's devices, as the nodes of a Flower strategy.

    Guarantees:
      * every message that is sent has one reply, an error where a device is lost or late;
      * who a reply is from, and what it answers, is what the link knows, not what the app says;
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
        """Be asked from other threads than the loop's.

        Args:
            link: where the devices are; the run is open on them.
            loop: the link's.
            run_id: the run.
            names: the devices that are there now.
            max_bytes: for all replies to what is sent at once.
            seconds: for a reply, where nobody says how long to wait.
        """
        identify()
        self.link = link
        self.loop = loop
        self.run_id = run_id
        self.names = names
        self.max_bytes = max_bytes
        self.seconds = seconds
        self._ids = itertools.count(1)
        self._sent: dict[str, asyncio.Task[Answer]] = {}
        self._published: Counter[bytes] = Counter()

    # -- what a Grid is ----------------------------------------------------------------------------

    def get_node_ids(self) -> Iterable[int]:
        """Of the devices that are there, in an order that does not change."""
        return sorted(self._nodes())

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send; returns the id of each."""
        listed = list(messages)  # a strategy may make them as they are asked for: in its thread

        async def push() -> list[str]:
            batch = self._send(listed, self.seconds)
            self._sent.update(batch)
            return list(batch)

        return asyncio.run_coroutine_threadsafe(push(), self.loop).result()

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies that are there; each is given once."""
        ids = list(message_ids)

        async def pull() -> list[Message]:
            done = [id_ for id_ in ids if id_ in self._sent and self._sent[id_].done()]
            return [self._sent.pop(id_).result().reply for id_ in done]

        return asyncio.run_coroutine_threadsafe(pull(), self.loop).result()

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send, and wait for every reply; whoever is late has answered an error."""
        listed = list(messages)
        waiting = self.exchange(listed, self.seconds if timeout is None else timeout)
        answers = asyncio.run_coroutine_threadsafe(waiting, self.loop).result()
        return [answer.reply for answer in answers]

    # -- how it is done ----------------------------------------------------------------------------

    async def exchange(
        self,
        messages: Sequence[Message],
        seconds: float,
        over: Callable[[Sequence[Answer]], str] = lambda answers: "",
    ) -> list[Answer]:
        """Send messages and wait for what becomes of each, in their order.

        The wait ends early when `over` gives a reason to, of the answers so far; it is why there is
        none from the others, who are told that nobody waits any more.
        """
        tasks = list(self._send(messages, seconds).values())
        answers: list[Answer] = []
        why = ""
        try:
            for done in asyncio.as_completed(tasks):
                answers.append(await done)
                if why := over(answers):
                    break
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [
            _failed(asked, _LATE, why) if task.cancelled() else task.result()
            for asked, task in zip(messages, tasks, strict=True)
        ]

    def _send(self, messages: Sequence[Message], seconds: float) -> dict[str, asyncio.Task[Answer]]:
        """Begin to send; on the loop."""
        share = self.max_bytes // max(len(messages), 1)
        names = self._nodes()
        encoded: dict[int, tuple[link_pb2.Blob, bytes]] = {}
        batch = {}
        for asked in messages:
            key = id(asked.content)  # strategies put one object into all messages of a round
            if key not in encoded:
                payload = encode(asked.content)
                encoded[key] = describe(payload), payload
            id_ = f"{self.run_id}/{next(self._ids)}"
            name = names.get(asked.metadata.dst_node_id)
            work = self._ask(name, id_, asked, *encoded[key], share, seconds)
            batch[id_] = asyncio.create_task(work)
        return batch

    async def _ask(
        self,
        name: str | None,
        id_: str,
        asked: Message,
        records: link_pb2.Blob,
        payload: bytes,
        share: int,
        seconds: float,
    ) -> Answer:
        """One message, to its answer; never raises but when cancelled."""
        if name is None:
            return _failed(asked, _LOST, f"there is no node {asked.metadata.dst_node_id}")
        request = link_pb2.Request(
            id=self.link.new_id(),
            flower=link_pb2.FlowerMessage(
                run_id=self.run_id,
                id=id_,
                kind=asked.metadata.message_type,
                group=asked.metadata.group_id,
                node=asked.metadata.dst_node_id,
                records=records,
            ),
        )
        if not self._published[records.sha256]:
            self.link.publish(records, memoryview(payload))
        self._published[records.sha256] += 1
        answer: Answer | None = None
        try:
            async with call(self.link, name, request, "flower_replied", seconds=seconds) as reply:
                answer = await self._read(name, id_, asked, reply.flower_replied, share)
                if answer.failure:
                    raise UpdateError(answer.failure)
        except CallFailed as failed:
            if answer is not None:
                return dataclasses.replace(answer, bytes_out=records.size)
            rejected = failed.status == "rejected"
            code = _BROKEN if rejected else _LATE if failed.timed_out else _LOST
            return dataclasses.replace(
                _failed(asked, code, failed.reason), started=failed.reached, sent=rejected
            )
        finally:
            self._published[records.sha256] -= 1
            if not self._published[records.sha256]:
                self.link.retract(records)
        return dataclasses.replace(answer, bytes_out=records.size)

    async def _read(
        self, name: str, id_: str, asked: Message, replied: link_pb2.FlowerReply, share: int
    ) -> Answer:
        if replied.error or replied.error_code:
            answer = _failed(asked, replied.error_code, in_a_line(replied.error))
            return dataclasses.replace(answer, sent=True, seconds=replied.seconds)
        if replied.records.size > share:
            raise UpdateError(
                f"its reply has {replied.records.size} bytes, and the share of each is {share} "
                "(federated.flower.max_bytes)"
            )
        payload = bytearray(replied.records.size)
        await self.link.fetch(name, replied.records, into(payload))
        records = await asyncio.to_thread(decode, payload)
        return Answer(
            node=asked.metadata.dst_node_id,
            reply=_reply(asked, records, None, answers=id_),
            bytes_in=replied.records.size,
            seconds=replied.seconds,
            sent=True,
        )

    def _nodes(self) -> Mapping[int, str]:
        return {node_of(name): name for name in self.names()}


def _failed(asked: Message, code: int, reason: str) -> Answer:
    reply = _reply(asked, None, Error(code, reason))
    return Answer(node=asked.metadata.dst_node_id, reply=reply)


def _reply(
    asked: Message, records: RecordDict | None, error: Error | None, answers: str = ""
) -> Message:
    return message(
        records,
        kind=asked.metadata.message_type,
        source=asked.metadata.dst_node_id,
        to=SERVER_NODE,
        id_=f"reply to {answers}",
        answers=answers,
        group=asked.metadata.group_id,
        error=error,
    )
