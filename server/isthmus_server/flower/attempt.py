"""A federated attempt in which devices run a Flower ClientApp and a strategy directs them.

The strategy decides what each device of the cohort is sent. The job decides which devices those
are, how long to wait and how many must answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from flwr.app import Message

from isthmus.errors import RoundFailed, UpdateError
from isthmus.integrations.flower.messages import node_of
from isthmus_server.flower.grid import Answer, LinkGrid
from isthmus_server.flower.replies import check, odd_ones
from isthmus_server.regimes.base import AttemptFailed, AttemptSpec, FederatedResult
from isthmus_server.regimes.call import ReceiptBook
from isthmus_server.regimes.plaintext import ENOUGH
from isthmus_server.storage.records import UNREACHABLE, Receipt, Status, summarize_failures

if TYPE_CHECKING:
    from isthmus_server.flower.strategy_adapter import StrategyRound
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
            max_bytes=strategy.adapter.settings.max_bytes,
            seconds=context.job.time.round_seconds,
        )
        self._receipts = ReceiptBook(spec.cohort, "federated")

    async def run(self) -> FederatedResult:
        """Send the strategy's messages, and have it aggregate the replies.

        Raises:
            AttemptFailed: fewer replies than the quorum, or the strategy failed on them.
        """
        settings = self._spec.settings
        messages = await asyncio.to_thread(self._configure)

        def end_reason(answers: Sequence[Answer]) -> str:
            usable = sum(not answer.failure for answer in answers)
            if usable >= settings.cohort:
                return ENOUGH
            outstanding = len(messages) - len(answers)
            return UNREACHABLE if usable + outstanding < settings.needed else ""

        seconds = self._context.job.time.round_seconds
        answers = await self._grid.exchange(messages, seconds, end_reason)
        replies = await asyncio.to_thread(self._usable_replies, answers)
        receipts = self.cancelled("the strategy did not ask it")
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
        return FederatedResult(
            pseudo_gradient=pseudo_gradient,
            training=self._strategy.figures,
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
            raise RoundFailed(f"{self._strategy.name} asks nodes that are not in the cohort")
        return sorted(messages, key=lambda message: places[message.metadata.dst_node_id])

    def _usable_replies(self, answers: Sequence[Answer]) -> list[Message]:
        """Check each answer and write its receipt; returns the replies for the strategy."""
        adapter = self._strategy.adapter
        scratch = torch.empty_like(self._strategy.start)
        failures = {answer.node: answer.failure for answer in answers}
        weights: dict[int, int] = {}
        for answer in answers:
            if not answer.failure:
                try:
                    weights[answer.node] = check(
                        answer.reply.content,
                        adapter.layout,
                        scratch,
                        weighted_by=self._strategy.weighted_by,
                        max_examples=adapter.settings.max_examples,
                    )
                except UpdateError as error:
                    failures[answer.node] = str(error)
        usable = {a.node: a.reply.content for a in answers if a.node in weights}
        for node in odd_ones(usable):
            failures[node] = "its records or figures have other names than most devices'"
            del weights[node]
        for answer in answers:
            self._record(answer, failures[answer.node], weights.get(answer.node, 0))
        return [answer.reply for answer in answers if not failures[answer.node]]

    def _record(self, answer: Answer, failure: str, examples: int) -> None:
        status: Status = "accepted" if not failure else "rejected" if answer.sent else "dropped"
        self._receipts.record(
            self._names[answer.node],
            status,
            failure,
            started=answer.started,
            sent=answer.sent,
            examples=examples,
            seconds=answer.seconds,
            bytes_in=answer.bytes_in,
            bytes_out=answer.bytes_out,
        )
