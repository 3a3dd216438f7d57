"""One round of a Flower strategy: its messages, its view of the cohort, its aggregate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from isthmus.errors import RoundFailed, UpdateError, UserError
from isthmus.job.flower import FlowerSection
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.stream import to_the_end
from isthmus.wire import link_pb2
from isthmus_flower.messages import (
    SERVER_NODE,
    captured_warnings,
    message,
    read_record,
    record_of,
)
from isthmus_flower.server.run_scoped_grid import RunScopedGrid
from isthmus_flower.server.state import StrategyState
from isthmus_flower.server.strategies import check_losses, describe_strategy, innermost
from isthmus_server.model.update_decoding import UpdateSpool
from isthmus_server.regimes.plaintext import check_weight

if TYPE_CHECKING:
    from isthmus_server.regimes.context import FederatedContext
    from isthmus_server.regimes.upload_places import UploadPlaces


class StrategyRound:
    """A strategy in one attempt at a round: its messages, and its aggregate of the replies."""

    def __init__(
        self,
        strategy: Strategy,
        *,
        settings: FlowerSection,
        layout: TensorLayout,
        round_: int,
        start: torch.Tensor,
        fresh: Strategy,
        state: StrategyState,
    ) -> None:
        """Use a strategy for one round.

        Args:
            strategy: with the state of the rounds before.
            settings: the job's `[federated.flower]`.
            layout: of the model.
            round_: number of the round.
            start: the model that devices start from, float32 (N).
            fresh: an equal strategy without state; what differs from it is the state.
            state: of the rounds before.
        """
        self.settings = settings
        self.layout = layout
        self.strategy = strategy
        self.round = round_
        self.start = start
        self._fresh = fresh
        self.state = state
        """The strategy's state; after `aggregate`, the new one."""
        self.figures: dict[str, float] = {}
        """The strategy's aggregate of the devices' metrics; set by `aggregate`."""
        self._arrays = ArrayRecord()

    @property
    def name(self) -> str:
        """The strategy's name with those it wraps, for messages."""
        return f"the strategy {describe_strategy(self.strategy)}"

    @property
    def weighted_by(self) -> str:
        """Name of the metric that weights the replies."""
        return str(getattr(innermost(self.strategy), "weighted_by_key", "num-examples"))

    def configure(self, grid: Grid) -> list[Message]:
        """The strategy's messages to the nodes at the start of the round.

        Raises:
            RoundFailed: the strategy failed.
        """
        with self._strategy_errors("the beginning of a round"):
            model = record_of(self.layout.parts(self.start))
            config = ConfigRecord(dict(self.settings.config))
            return list(self.strategy.configure_train(self.round, model, config, grid))

    def aggregate(self, replies: list[Message]) -> torch.Tensor:
        """Aggregate replies; returns the pseudo-gradient to the strategy's model, float32 (N).

        Raises:
            RoundFailed: the strategy failed, or returned no usable model.
        """
        result = torch.empty_like(self.start)
        with self._strategy_errors(f"{len(replies)} updates") as warnings:
            check_losses(self.strategy, replies)
            arrays, metrics = self.strategy.aggregate_train(self.round, replies)
            if arrays is None:
                raise UpdateError("; ".join(["it returned no model", *warnings]))
            read_record(arrays, self.layout.parts(result))
            self._arrays = arrays
            self.state = StrategyState.of(self.strategy, self._fresh)
        self.figures = {
            name: float(value)
            for name, value in (metrics or {}).items()
            if isinstance(value, int | float)
        }
        return torch.sub(self.start, result, out=result)

    def configure_evaluation(self, grid: Grid) -> list[Message]:
        """The strategy's messages to the nodes that evaluate the model of `aggregate`.

        Raises:
            RoundFailed: the strategy failed.
        """
        with self._strategy_errors("the evaluation of a round"):
            config = ConfigRecord(dict(self.settings.config))
            return list(self.strategy.configure_evaluate(self.round, self._arrays, config, grid))

    def aggregate_evaluation(self, replies: list[Message]) -> dict[str, float]:
        """The strategy's aggregate of the metrics of an evaluation.

        Raises:
            RoundFailed: the strategy failed.
        """
        with self._strategy_errors(f"{len(replies)} evaluations"):
            metrics = self.strategy.aggregate_evaluate(self.round, replies)
            self.state = StrategyState.of(self.strategy, self._fresh)
        return {
            name: float(value)
            for name, value in (metrics or {}).items()
            if isinstance(value, int | float)
        }

    @contextmanager
    def _strategy_errors(self, what: str) -> Iterator[list[str]]:
        """Convert any exception of the strategy to RoundFailed, with the strategy's name."""
        try:
            with captured_warnings() as warnings:
                yield warnings
        except Exception as error:
            reason = " ".join(str(error).split())
            if not isinstance(error, UserError):  # user code may raise anything
                reason = f"{type(error).__name__}: {reason}"
            raise RoundFailed(f"{self.name} failed on {what}: {reason}") from error


class StrategyAggregator:
    """An `Aggregator` that passes the updates of Isthmus devices to a strategy."""

    def __init__(
        self, context: FederatedContext, strategy: StrategyRound, cohort: Mapping[str, int]
    ) -> None:
        self._context = context
        self._strategy = strategy
        self._updates = UpdateCollector(strategy, context.layout, cohort)
        self._collecting = asyncio.Lock()

    async def add(
        self,
        name: str,
        trained: link_pb2.Trained,
        accept: Callable[[], None],
        places: UploadPlaces,
    ) -> None:
        """Fetch an update and keep the model it results in; see `Aggregator.add`."""
        nbytes = self._context.layout.nbytes
        async with places.place(name):
            with UpdateSpool(self._context.spool, expected_bytes=nbytes) as spool:
                await self._context.link.fetch(name, trained.result, spool.write)
                await to_the_end(self._collect(name, trained, spool, accept))

    async def _collect(
        self, name: str, trained: link_pb2.Trained, spool: UpdateSpool, accept: Callable[[], None]
    ) -> None:
        async with self._collecting:
            await asyncio.to_thread(self._updates.collect, name, trained, spool)
            try:
                accept()
            except UpdateError:
                self._updates.discard(name)
                raise

    def end(self) -> None:
        """Nothing is kept elsewhere; see `Aggregator.end`."""

    async def settle(self) -> Mapping[str, str]:
        """Nothing is summed elsewhere; see `Aggregator.settle`."""
        return {}

    async def result(self) -> tuple[torch.Tensor, Any]:
        """The pseudo-gradient to the strategy's model, and the strategy's state after it."""
        return await asyncio.to_thread(self._updates.aggregate), self._strategy.state


class UpdateCollector:
    """The updates of one attempt, as the reply messages that a strategy expects."""

    def __init__(
        self, strategy: StrategyRound, layout: TensorLayout, cohort: Mapping[str, int]
    ) -> None:
        self._strategy = strategy
        self._layout = layout
        self._cohort = cohort
        self._nodes = {name: SERVER_NODE + 1 + place for place, name in enumerate(cohort)}
        self._arrays: dict[str, ArrayRecord] = {}
        self._figures: dict[str, dict[str, float]] = {}

    def collect(self, name: str, trained: link_pb2.Trained, spool: UpdateSpool) -> None:
        """Check an update and keep the device's final model.

        Raises:
            UpdateError: another layout, a bad value, or a weight beyond what was declared.
        """
        check_weight(trained.examples, self._cohort[name])
        model = spool.read(self._layout)
        torch.sub(self._strategy.start, model, out=model)
        figures = {self._strategy.weighted_by: float(trained.examples), **trained.training}
        if "loss" in trained.training:
            figures["train_loss"] = trained.training["loss"]
        self._figures[name] = figures
        self._arrays[name] = record_of(self._layout.parts(model))

    def discard(self, name: str) -> None:
        """Remove an update."""
        del self._arrays[name], self._figures[name]

    def aggregate(self) -> torch.Tensor:
        """The pseudo-gradient to the strategy's model, a new float32 vector (N).

        Messages are in the cohort's order, independent of their order of arrival.

        Raises:
            RoundFailed: the strategy failed, or returned no usable model.
        """
        self._strategy.configure(CohortGrid(list(self._nodes.values())))
        return self._strategy.aggregate(self._replies())

    def _replies(self) -> list[Message]:
        """One message per device, with the figures that all of them have."""
        shared = set.intersection(*(set(figures) for figures in self._figures.values()))
        return [
            message(
                RecordDict(
                    {
                        "arrays": self._arrays.pop(name),
                        "metrics": MetricRecord(
                            {key: self._figures[name][key] for key in sorted(shared)}
                        ),
                    }
                ),
                kind="train",
                source=self._nodes[name],
                to=SERVER_NODE,
                id_=name,
                answers=f"{self._strategy.round}/{name}",
            )
            for name in self._cohort
            if name in self._arrays
        ]


class CohortGrid(RunScopedGrid):
    """The nodes of a round as a Flower `Grid` that a strategy selects from; it sends nothing."""

    def __init__(self, nodes: list[int]) -> None:
        self.nodes = nodes
        self._reads = 0

    def get_node_ids(self) -> Iterable[int]:
        """The nodes of the cohort.

        Raises:
            UpdateError: the strategy keeps waiting for more nodes.
        """
        self._reads += 1
        if self._reads > 10:
            raise UpdateError(f"it waits for more than the {len(self.nodes)} devices of the cohort")
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Refuse messages: the devices have trained already.

        Raises:
            UpdateError: always.
        """
        raise UpdateError("it sends its own messages, which the devices of this job do not support")

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """No replies, since nothing is sent."""
        return []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Refuse messages, as `push_messages` does."""
        return self.pull_messages(self.push_messages(messages))
