"""Aggregate the updates of federated rounds with a Flower strategy.

The strategy receives what Flower would give it: messages with each device's final model and
figures, and the model that they started from. Its result counts as the final model of the
devices, so the server optimizer and the merge with a datacenter work as without a strategy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from isthmus.errors import JobError, RoundFailed, UpdateError, UserError
from isthmus.integrations.flower.messages import (
    SERVER_NODE,
    captured_warnings,
    identify,
    message,
    read_record,
    record_of,
)
from isthmus.job.federated import FederatedSection
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.stream import to_the_end
from isthmus.wire import link_pb2
from isthmus_server.flower.one_run import OneRun
from isthmus_server.flower.state import State, check
from isthmus_server.flower.strategies import (
    EVERYBODY,
    check_losses,
    describe,
    innermost,
    make,
    so_many,
)
from isthmus_server.model.fixed_point_sum import Spool
from isthmus_server.regimes.base import AttemptSpec, FederatedAttempt
from isthmus_server.regimes.plaintext import PlaintextAttempt

if TYPE_CHECKING:
    from isthmus_server.regimes.context import FederatedContext


class FlowerStrategyAdapter:
    """The Flower strategy of a run, as a `FederatedExtension`.

    Guarantees:
      * the strategy's state is committed with the round, or not at all;
      * the updates of a round take at most `max_bytes` together.
    """

    def __init__(
        self,
        federated: FederatedSection,
        layout: TensorLayout,
        *,
        sampled_nodes: int | None = None,
    ) -> None:
        """Construct the strategy once, to find out whether it can be used.

        `sampled_nodes`: under Flower's own runtime, how many nodes the strategy samples itself.

        Raises:
            UserError: it cannot be used, or a cohort's updates would take too much memory.
        """
        assert federated.flower is not None
        if sampled_nodes is None:
            identify()
        self.sampling = EVERYBODY if sampled_nodes is None else so_many(sampled_nodes)
        self.settings = federated.flower
        self.layout = layout
        self.state = State()
        check(self.make(federated.needed))
        try:
            self.check_size(federated.cohort)
        except RoundFailed as error:
            raise JobError(str(error)) from None

    def attempt(self, context: FederatedContext, spec: AttemptSpec) -> FederatedAttempt:
        """An attempt whose updates the strategy aggregates; devices run the app if there is one.

        Raises:
            RoundFailed: the updates of the cohort would take too much memory.
        """
        assert spec.start is not None
        strategy = self.begin(spec.round, spec.start, spec.settings)
        if self.settings.app is not None:
            from isthmus_server.flower.attempt import FlowerAttempt

            return FlowerAttempt(context, strategy, spec)
        return PlaintextAttempt(context, spec, StrategyAggregator(context, strategy, spec.cohort))

    def begin(
        self,
        round_: int,
        start: torch.Tensor,
        federated: FederatedSection,
    ) -> StrategyRound:
        """Prepare the strategy for an attempt at a round from the model `start`, float32 (N).

        Raises:
            RoundFailed: the updates of the cohort would take too much memory.
        """
        self.check_size(federated.cohort)
        strategy = self.make(federated.needed)
        self.state.put_into(strategy)
        return StrategyRound(self, strategy, round_, start, federated.needed)

    def make(self, quorum: int) -> Strategy:
        """A new strategy without state."""
        with captured_warnings():
            return make(
                self.settings.strategy,
                quorum,
                clips=self.settings.app is not None,
                sampling=self.sampling,
            )

    def check_size(self, cohort: int) -> None:
        """Refuse a cohort whose updates take more than `max_bytes`.

        Raises:
            RoundFailed: they do; with both numbers.
        """
        takes = cohort * self.layout.nbytes
        if takes > self.settings.max_bytes:
            raise RoundFailed(
                f"{self.settings.strategy.name} needs all updates of a round at once, and "
                f"{cohort} of this model take {takes} bytes where federated.flower.max_bytes="
                f"{self.settings.max_bytes}; raise it, or lower federated.cohort"
            )

    # -- state -------------------------------------------------------------------------------------

    def commit(self, state: State) -> None:
        """Make the state of an attempt the current one."""
        self.state = state

    def reset(self) -> None:
        """Forget all moments and norms."""
        self.state = State()

    def export_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The strategy's state as tensors and JSON values."""
        return dict(self.state.tensors), dict(self.state.numbers)

    def import_state(self, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:
        """Restore what `export_state` returned."""
        self.state = State(dict(tensors), dict(values))


class StrategyRound:
    """A strategy in one attempt at a round: its messages, and its aggregate of the replies."""

    def __init__(
        self,
        adapter: FlowerStrategyAdapter,
        strategy: Strategy,
        round_: int,
        start: torch.Tensor,
        needed: int,
    ) -> None:
        self.adapter = adapter
        self.strategy = strategy
        self.round = round_
        self.start = start
        self.needed = needed
        self.state = adapter.state
        """What the strategy remembers after `aggregate`."""
        self.figures: dict[str, float] = {}
        """What it made of the devices' figures, after `aggregate`."""

    @property
    def name(self) -> str:
        """The strategy's, with those it wraps."""
        return f"the strategy {describe(self.strategy)}"

    @property
    def weighted_by(self) -> str:
        """The figure by which it weighs replies."""
        return str(getattr(innermost(self.strategy), "weighted_by_key", "num-examples"))

    def configure(self, grid: Grid) -> list[Message]:
        """What the strategy sends at the beginning of the round.

        Raises:
            RoundFailed: it failed.
        """
        with self._on("the beginning of a round"):
            model = record_of(self.adapter.layout.parts(self.start))
            config = ConfigRecord(dict(self.adapter.settings.config))
            return list(self.strategy.configure_train(self.round, model, config, grid))

    def aggregate(self, replies: list[Message]) -> torch.Tensor:
        """The pseudo-gradient to the strategy's model, a new float32 vector (N).

        Raises:
            RoundFailed: the strategy failed, or made no model that can be used.
        """
        result = torch.empty_like(self.start)
        with self._on(f"{len(replies)} updates") as warnings:
            check_losses(self.strategy, replies)
            made, figures = self.strategy.aggregate_train(self.round, replies)
            if made is None:
                raise UpdateError("; ".join(["it made no model of them", *warnings]))
            read_record(made, self.adapter.layout.parts(result))
            self.state = State.of(self.strategy, self.adapter.make(self.needed))
        self.figures = {
            name: float(value)
            for name, value in (figures or {}).items()
            if isinstance(value, int | float)
        }
        return torch.sub(self.start, result, out=result)

    @contextmanager
    def _on(self, what: str) -> Iterator[list[str]]:
        """Whatever the strategy's code raises is a failed round, with its name."""
        try:
            with captured_warnings() as warnings:
                yield warnings
        except Exception as error:
            reason = " ".join(str(error).split())
            if not isinstance(error, UserError):  # it may be anybody's code
                reason = f"{type(error).__name__}: {reason}"
            raise RoundFailed(f"{self.name} failed on {what}: {reason}") from error


class StrategyAggregator:
    """Has a strategy aggregate the updates that Isthmus devices send: an `Aggregator`."""

    def __init__(
        self, context: FederatedContext, strategy: StrategyRound, cohort: Mapping[str, int]
    ) -> None:
        self._context = context
        self._strategy = strategy
        self._updates = UpdateCollector(strategy, context.layout, cohort)
        self._collecting = asyncio.Lock()

    async def add(self, name: str, trained: link_pb2.Trained, accept: Callable[[], None]) -> None:
        """Fetch an update and keep the model it stands for; see `Aggregator.add`."""
        with Spool(self._context.spool, expected=self._context.layout.nbytes) as spool:
            await self._context.link.fetch(name, trained.result, spool.write)
            await to_the_end(self._collect(name, trained, spool, accept))

    async def _collect(
        self, name: str, trained: link_pb2.Trained, spool: Spool, accept: Callable[[], None]
    ) -> None:
        async with self._collecting:
            await asyncio.to_thread(self._updates.collect, name, trained, spool)
            try:
                accept()
            except UpdateError:
                self._updates.discard(name)
                raise

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

    def collect(self, name: str, trained: link_pb2.Trained, spool: Spool) -> None:
        """Check an update and keep the device's final model.

        Raises:
            UpdateError: another layout, a bad value, or a weight beyond what was declared.
        """
        max_weight = 2 * max(self._cohort[name], 1)
        if not 1 <= trained.examples <= max_weight:
            raise UpdateError(
                f"its weight={trained.examples} does not fit: it must be at least 1 and at most "
                f"{max_weight}, twice the examples declared at the start"
            )
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
            RoundFailed: the strategy failed, or made no model that can be used.
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


class CohortGrid(OneRun):
    """The nodes of a round as a Flower `Grid` that a strategy selects from; it sends nothing."""

    def __init__(self, nodes: list[int]) -> None:
        self.nodes = nodes
        self._asked = 0

    def get_node_ids(self) -> Iterable[int]:
        """Everyone who was asked; a strategy that waits for more will not get them."""
        self._asked += 1
        if self._asked > 10:
            raise UpdateError(f"it waits for more than the {len(self.nodes)} devices of the cohort")
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Refused: the cohort has been asked already."""
        raise UpdateError("it sends messages of its own, and the devices of this job take none")

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Nothing was sent."""
        return []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Refused, as `push_messages`."""
        return self.pull_messages(self.push_messages(messages))
