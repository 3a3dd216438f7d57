"""Evaluate the model of a round on devices, where the job asks the strategy for it.

Devices are asked after the model is aggregated. What they answer is shown with the round; it
decides nothing, so a device that fails, lies or is late costs the round only its own figures.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from flwr.app import Message

from isthmus.errors import UpdateError
from isthmus_flower.server.grid import LinkGrid, NodeReply
from isthmus_flower.server.replies import check_metrics, inconsistent_replies
from isthmus_flower.server.strategy_round import StrategyRound

log = logging.getLogger(__name__)

PREFIX = "evaluate."
"""In front of the names of the aggregated metrics, which may equal those of the training."""

FAILED = f"{PREFIX}failed"
"""Number of selected devices without a usable answer; not present if there are none."""


class DeviceEvaluation:
    """The evaluation of one attempt's aggregate by devices of its cohort."""

    def __init__(
        self, strategy: StrategyRound, grid: LinkGrid, names: Mapping[int, str], seed: str
    ) -> None:
        """Prepare.

        Args:
            strategy: with its aggregate of the round.
            grid: the devices of the cohort.
            names: their names by node id.
            seed: decides which of them the strategy draws.
        """
        self._strategy = strategy
        self._grid = grid
        self._names = names
        self._seed = seed

    async def run(self, seconds: float) -> dict[str, float]:
        """Ask the devices that the strategy selects; returns what it makes of their metrics.

        The names begin with `evaluate.`. Empty if no device is selected.

        Raises:
            RoundFailed: the strategy failed.
        """
        messages = await asyncio.to_thread(self._configure)
        if not messages:
            return {}
        node_replies = await self._grid.exchange(messages, seconds)
        replies = self._usable(node_replies)
        figures = await asyncio.to_thread(self._strategy.aggregate_evaluation, replies)
        figures = {f"{PREFIX}{name}": value for name, value in figures.items()}
        if len(replies) < len(node_replies):
            figures[FAILED] = float(len(node_replies) - len(replies))
        return figures

    def _configure(self) -> list[Message]:
        with _drawn_by(self._seed):
            messages = self._strategy.configure_evaluation(self._grid)
        return sorted(messages, key=lambda message: message.metadata.dst_node_id)

    def _usable(self, node_replies: list[NodeReply]) -> list[Message]:
        failures = {node_reply.node: node_reply.failure for node_reply in node_replies}
        contents = {}
        for node_reply in node_replies:
            if failures[node_reply.node]:
                continue
            try:
                check_metrics(
                    node_reply.reply.content,
                    weighted_by=self._strategy.weighted_by,
                    max_examples=self._strategy.settings.max_examples,
                )
                contents[node_reply.node] = node_reply.reply.content
            except UpdateError as error:
                failures[node_reply.node] = str(error)
        for node in inconsistent_replies(contents):
            failures[node] = "its records or metrics have other names than most devices'"
        for node, failure in failures.items():
            if failure:
                name = self._names.get(node, f"node {node}")
                log.warning("%s did not evaluate the model: %s", name, failure)
        return [node_reply.reply for node_reply in node_replies if not failures[node_reply.node]]


@contextmanager
def _drawn_by(seed: str) -> Iterator[None]:
    """Repeat what Flower's strategies draw: they use Python's global generator."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
