"""A federated attempt in which devices run a Flower ClientApp and a strategy directs them.

The strategy decides what each device of the cohort is sent. The job decides which devices those
are, how long to wait and how many must answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from flwr.app import Message

from isthmus.errors import RoundFailed, UpdateError
from isthmus.job.flower import evaluates
from isthmus_flower.messages import node_of
from isthmus_flower.server.device_evaluation import DeviceEvaluation
from isthmus_flower.server.grid import LinkGrid, NodeReply
from isthmus_flower.server.replies import check_reply, inconsistent_replies
from isthmus_flower.server.strategy_round import StrategyRound
from isthmus_server.regimes.base import AttemptFailed, AttemptSpec, FederatedResult
from isthmus_server.regimes.call import ReceiptBook
from isthmus_server.regimes.plaintext import ENOUGH
from isthmus_server.regimes.reasons import UNREACHABLE, summarize_failures
from isthmus_server.storage.records import Receipt, Status

if TYPE_CHECKING:
    from isthmus_server.regimes.context import FederatedContext


class FlowerAttempt:
    """One attempt of a cohort whose devices run the job's app."""

    def __init__(
        self, context: FederatedContext, strategy: StrategyRound, spec: AttemptSpec
    ) -> None:
        self._context = context
        self._strategy = strategy
        self._spec = spec
        self._names = {node_of(name): name for name in spec.cohort}
        self._grid = LinkGrid(
            context.link,
            asyncio.get_running_loop(),
            context.run_id,
            lambda: spec.cohort,
            max_bytes=strategy.settings.max_bytes,
            seconds=context.job.time.first_round_seconds,
        )
        self._receipts = ReceiptBook(spec.cohort, "federated")

    async def run(self) -> FederatedResult:
        """Send the strategy's messages, and have it aggregate the replies.

        Raises:
            AttemptFailed: fewer replies than the quorum, or the strategy failed on them.
        """
        settings = self._spec.settings
        messages = await asyncio.to_thread(self._configure)

        def end_reason(node_replies: Sequence[NodeReply]) -> str:
            usable = sum(not node_reply.failure for node_reply in node_replies)
            if usable >= settings.cohort:
                return ENOUGH
            outstanding = len(messages) - len(node_replies)
            return UNREACHABLE if usable + outstanding < settings.needed else ""

        seconds = self._context.job.time.first_round_seconds
        ends_at = time.monotonic() + seconds
        node_replies = await self._grid.exchange(messages, seconds, end_reason)
        replies = await asyncio.to_thread(self._usable_replies, node_replies)
        receipts = self.cancelled("the strategy did not select it")
        if len(replies) < settings.needed:
            raise AttemptFailed(
                f"{len(replies)} of {len(receipts)} answers were accepted and the quorum is "
                f"{settings.needed} ({summarize_failures(receipts)})",
                receipts,
            )
        try:
            pseudo_gradient = await asyncio.to_thread(self._strategy.aggregate, replies)
        except RoundFailed as error:
            raise AttemptFailed(str(error), receipts) from error
        figures = dict(self._strategy.figures)
        if evaluates(self._strategy.settings):
            seed = f"{self._context.job.seed}/{self._spec.round}"
            evaluation = DeviceEvaluation(self._strategy, self._grid, self._names, seed)
            try:
                figures |= await evaluation.run(max(ends_at - time.monotonic(), 1.0))
            except RoundFailed as error:
                raise AttemptFailed(str(error), receipts) from error
        return FederatedResult(
            pseudo_gradient=pseudo_gradient,
            training=figures,
            receipts=receipts,
            extension_state=self._strategy.state,
        )

    def cancelled(self, reason: str) -> list[Receipt]:
        """Receipts of the whole cohort; devices without one were dropped for `reason`."""
        return self._receipts.complete(reason)

    def _configure(self) -> list[Message]:
        """The strategy's messages in the cohort's order, since it samples nodes at random."""
        messages = self._strategy.configure(self._grid)
        places = {node: place for place, node in enumerate(self._names)}
        if any(message.metadata.dst_node_id not in places for message in messages):
            raise RoundFailed(f"{self._strategy.name} selected nodes that are not in the cohort")
        return sorted(messages, key=lambda message: places[message.metadata.dst_node_id])

    def _usable_replies(self, node_replies: Sequence[NodeReply]) -> list[Message]:
        """Check each reply and write its receipt; returns the replies for the strategy."""
        scratch = torch.empty_like(self._strategy.start)
        failures = {node_reply.node: node_reply.failure for node_reply in node_replies}
        weights: dict[int, int] = {}
        for node_reply in node_replies:
            if not node_reply.failure:
                try:
                    weights[node_reply.node] = check_reply(
                        node_reply.reply.content,
                        self._strategy.layout,
                        scratch,
                        weighted_by=self._strategy.weighted_by,
                        max_examples=self._strategy.settings.max_examples,
                    )
                except UpdateError as error:
                    failures[node_reply.node] = str(error)
        usable = {
            node_reply.node: node_reply.reply.content
            for node_reply in node_replies
            if node_reply.node in weights
        }
        for node in inconsistent_replies(usable):
            failures[node] = "its records or metrics have other names than most devices'"
            del weights[node]
        for node_reply in node_replies:
            self._record(node_reply, failures[node_reply.node], weights.get(node_reply.node, 0))
        return [node_reply.reply for node_reply in node_replies if not failures[node_reply.node]]

    def _record(self, node_reply: NodeReply, failure: str, examples: int) -> None:
        status: Status = (
            "accepted" if not failure else "rejected" if node_reply.answered else "dropped"
        )
        self._receipts.record(
            self._names[node_reply.node],
            status,
            failure,
            started=node_reply.started,
            sent=node_reply.answered,
            late=node_reply.late,
            examples=examples,
            seconds=node_reply.seconds,
            bytes_in=node_reply.bytes_in,
            bytes_out=node_reply.bytes_out,
        )
