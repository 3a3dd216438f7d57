"""A federated attempt in which devices run a Flower ClientApp and a strategy talks to them.

The strategy says what each device of the cohort is sent; which devices those are, for how long it
is waited and how many have to answer is the job's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import Message

from isthmus.errors import RoundFailed, UpdateError
from isthmus.integrations.flower.messages import node_of
from isthmus.job.federated import FederatedSection
from isthmus_server.flower.grid import Answer, LinkGrid
from isthmus_server.flower.replies import check, odd_ones
from isthmus_server.flower.strategy_adapter import FlowerStrategyAdapter
from isthmus_server.regimes.results import AttemptFailed, FederatedResult
from isthmus_server.storage.receipts import UNREACHABLE, Receipt, Status, reasons

if TYPE_CHECKING:
    from isthmus_server.regimes.context import Federation


class FlowerAttempt:
    """One attempt of a cohort whose devices run the job's app."""

    def __init__(
        self,
        federation: Federation,
        guest: FlowerStrategyAdapter,
        round_: int,
        start: torch.Tensor,
        cohort: Mapping[str, int],
        settings: FederatedSection,
    ) -> None:
        """`start` is the model that the round begins with, float32 (N).

        Raises:
            RoundFailed: too many updates to hold at once.
        """
        self.federation = federation
        self.settings = settings
        self.names = {node_of(name): name for name in cohort}
        self.strategy = guest.begin(round_, start, settings)
        self.grid = LinkGrid(
            federation.link,
            asyncio.get_running_loop(),
            federation.run_id,
            lambda: cohort,
            max_bytes=guest.settings.max_bytes,
            seconds=federation.job.time.round_seconds,
        )
        self.receipts: dict[str, Receipt] = {}

    async def run(self) -> FederatedResult:
        """Ask, wait, and make a model of what comes.

        Raises:
            AttemptFailed: fewer answers than the quorum, or the strategy failed on them.
        """
        settings = self.settings
        messages = await asyncio.to_thread(self._configure)

        def over(answers: Sequence[Answer]) -> str:
            good = sum(not answer.failure for answer in answers)
            if good >= settings.cohort:
                return "enough updates were in"
            left = len(messages) - len(answers)
            return UNREACHABLE if good + left < settings.needed else ""

        answers = await self.grid.exchange(messages, self.federation.job.time.round_seconds, over)
        replies = await asyncio.to_thread(self._receive, answers)
        receipts = self.stopped("the strategy did not ask it")
        if len(replies) < settings.needed:
            raise AttemptFailed(
                f"{len(replies)} of {len(receipts)} answers were accepted and the quorum is "
                f"{settings.needed} ({reasons(receipts)})",
                receipts,
            )
        try:
            made = await asyncio.to_thread(self.strategy.aggregate, replies)
        except RoundFailed as error:
            raise AttemptFailed(str(error), receipts) from error
        return FederatedResult(
            pseudo_gradient=made,
            training=self.strategy.figures,
            receipts=receipts,
            strategy_state=self.strategy.state,
        )

    def stopped(self, reason: str) -> list[Receipt]:
        """Everyone's receipt; who has none yet was dropped for that reason."""
        for name in self.names.values():
            self.receipts.setdefault(name, _receipt(name, "dropped", reason))
        return [self.receipts[name] for name in self.names.values()]

    def _configure(self) -> list[Message]:
        """What the strategy sends, in the cohort's order, for it draws the nodes at random."""
        messages = self.strategy.configure(self.grid)
        places = {node: place for place, node in enumerate(self.names)}
        unknown = [m for m in messages if m.metadata.dst_node_id not in places]
        if unknown:
            raise RoundFailed(f"{self.strategy.name} asks nodes that are not in the cohort")
        return sorted(messages, key=lambda one: places[one.metadata.dst_node_id])

    def _receive(self, answers: Sequence[Answer]) -> list[Message]:
        """Leave a receipt of each; the replies that can be used."""
        guest = self.strategy.guest
        scratch = torch.empty_like(self.strategy.start)
        failures = {answer.node: answer.failure for answer in answers}
        weights: dict[int, int] = {}
        for answer in answers:
            if not answer.failure:
                try:
                    weights[answer.node] = check(
                        answer.reply.content,
                        guest.layout,
                        scratch,
                        weighted_by=self.strategy.weighted_by,
                        max_examples=guest.settings.max_examples,
                    )
                except UpdateError as error:
                    failures[answer.node] = str(error)
        fine = {a.node: a.reply.content for a in answers if a.node in weights}
        for node in odd_ones(fine):
            failures[node] = "its records or figures have other names than most devices'"
            del weights[node]
        for answer in answers:
            self._note(answer, failures[answer.node], weights.get(answer.node, 0))
        return [answer.reply for answer in answers if not failures[answer.node]]

    def _note(self, answer: Answer, failure: str, examples: int) -> None:
        status: Status = "accepted" if not failure else "rejected" if answer.sent else "dropped"
        name = self.names[answer.node]
        self.receipts[name] = _receipt(
            name,
            status,
            failure,
            started=answer.started,
            sent=answer.sent,
            examples=examples,
            seconds=answer.seconds,
            bytes_in=answer.bytes_in,
            bytes_out=answer.bytes_out,
        )


def _receipt(name: str, status: Status, reason: str, **more: Any) -> Receipt:
    return Receipt(participant=name, regime="federated", status=status, reason=reason, **more)
