"""A Flower strategy in the place of the weighted mean of a round's updates.

It is shown what Flower would show it: messages with the model each device ended with and its
figures, and the model that they began with. What it makes of them counts as the model that the
fleet ended with, so the server optimizer and the merging with a datacenter go on from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

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

PREFIX = "flower."
"""Of a strategy's tensors and numbers beside those of the server optimizer."""


class FlowerStrategyAdapter:
    """The strategy of a run.

    Guarantees:
      * what it remembers is committed with the round, or not at all;
      * a round's updates take at most `max_bytes` together.
    """

    def __init__(
        self, federated: FederatedSection, layout: TensorLayout, *, asks: int | None = None
    ) -> None:
        """Make the strategy once, to see whether it can be used.

        `asks`: under Flower's own runtime, so many nodes are asked by the strategy itself.

        Raises:
            UserError: it cannot, or a cohort's updates would take too much memory.
        """
        assert federated.flower is not None
        if asks is None:
            identify()
        self.sampling = EVERYBODY if asks is None else so_many(asks)
        self.settings = federated.flower
        self.layout = layout
        self.state = State()
        check(self.make(federated.needed))
        try:
            self.check_size(federated.cohort)
        except RoundFailed as error:
            raise JobError(str(error)) from None

    def begin(
        self,
        round_: int,
        start: torch.Tensor,
        federated: FederatedSection,
    ) -> Round:
        """An attempt at a round from the model `start`, float32 (N).

        Raises:
            RoundFailed: too many updates to hold at once.
        """
        self.check_size(federated.cohort)
        strategy = self.make(federated.needed)
        self.state.put_into(strategy)
        return Round(self, strategy, round_, start, federated.needed)

    def make(self, quorum: int) -> Strategy:
        """A new one, that remembers nothing."""
        with captured_warnings():
            return make(
                self.settings.strategy,
                quorum,
                clips=self.settings.app is not None,
                sampling=self.sampling,
            )

    def check_size(self, cohort: int) -> None:
        """Refuse a cohort whose updates could not be held.

        Raises:
            RoundFailed: with what they take.
        """
        takes = cohort * self.layout.nbytes
        if takes > self.settings.max_bytes:
            raise RoundFailed(
                f"{self.settings.strategy.name} needs all updates of a round at once, and "
                f"{cohort} of this model take {takes} bytes where federated.flower.max_bytes="
                f"{self.settings.max_bytes}; raise it, or lower federated.cohort"
            )

    def forget(self) -> None:
        """Begin anew: no moments, no norms."""
        self.state = State()

    # -- beside the server optimizer's state -------------------------------------------------------

    def add_state(self, tensors: dict[str, torch.Tensor], numbers: dict[str, Any]) -> None:
        """Add what the strategy remembers."""
        tensors |= {PREFIX + name: tensor for name, tensor in self.state.tensors.items()}
        numbers |= {PREFIX + name: how for name, how in self.state.numbers.items()}

    def take_state(self, tensors: dict[str, torch.Tensor], numbers: dict[str, Any]) -> None:
        """Take back what `add_state` added."""
        self.state = State(_take(tensors), _take(numbers))


def _take(table: dict[str, Any]) -> dict[str, Any]:
    ours = [name for name in table if name.startswith(PREFIX)]
    return {name.removeprefix(PREFIX): table.pop(name) for name in ours}


class Round:
    """A strategy in one attempt at a round: what it sends, and what it makes of the replies."""

    def __init__(
        self,
        guest: FlowerStrategyAdapter,
        strategy: Strategy,
        round_: int,
        start: torch.Tensor,
        needed: int,
    ) -> None:
        self.guest = guest
        self.strategy = strategy
        self.round = round_
        self.start = start
        self.needed = needed
        self.state = guest.state
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
            model = record_of(self.guest.layout.parts(self.start))
            config = ConfigRecord(dict(self.guest.settings.config))
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
            read_record(made, self.guest.layout.parts(result))
            self.state = State.of(self.strategy, self.guest.make(self.needed))
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


class UpdateCollector:
    """The updates of our own devices in one attempt, as the replies a strategy knows."""

    def __init__(self, round_: Round, layout: TensorLayout, cohort: Mapping[str, int]) -> None:
        self.round = round_
        self.layout = layout
        self.cohort = cohort
        self.nodes = {name: SERVER_NODE + 1 + place for place, name in enumerate(cohort)}
        self.arrays: dict[str, ArrayRecord] = {}
        self.figures: dict[str, dict[str, float]] = {}

    @property
    def state(self) -> State:
        """What the strategy remembers after `aggregate`."""
        return self.round.state

    def take(self, name: str, trained: link_pb2.Trained, spool: Spool) -> None:
        """Check an update and keep the model it stands for.

        Raises:
            UpdateError: another layout, a bad value, or a weight beyond what was declared.
        """
        most = 2 * max(self.cohort[name], 1)
        if not 1 <= trained.examples <= most:
            raise UpdateError(
                f"its weight={trained.examples} does not fit: it must be at least 1 and at most "
                f"{most}, twice the examples declared at the start"
            )
        end = spool.read(self.layout)
        torch.sub(self.round.start, end, out=end)
        self.arrays[name] = record_of(self.layout.parts(end))
        figures = {self.round.weighted_by: float(trained.examples), **trained.training}
        if "loss" in trained.training:
            figures["train_loss"] = trained.training["loss"]
        self.figures[name] = figures

    def aggregate(self) -> torch.Tensor:
        """The pseudo-gradient to the strategy's model, a new float32 vector (N).

        Messages are in the cohort's order, whatever order they came in.

        Raises:
            RoundFailed: the strategy failed, or made no model that can be used.
        """
        self.round.configure(Cohort(list(self.nodes.values())))
        return self.round.aggregate(self._replies())

    def _replies(self) -> list[Message]:
        """Each with the figures that every one of them has: strategies take no others."""
        shared = set.intersection(*(set(figures) for figures in self.figures.values()))
        return [
            message(
                RecordDict(
                    {
                        "arrays": self.arrays.pop(name),
                        "metrics": MetricRecord(
                            {key: self.figures[name][key] for key in sorted(shared)}
                        ),
                    }
                ),
                kind="train",
                source=self.nodes[name],
                to=SERVER_NODE,
                id_=name,
                answers=f"{self.round.round}/{name}",
            )
            for name in self.cohort
            if name in self.arrays
        ]


class Cohort(OneRun):
    """The nodes of a round, for a strategy to choose from. It sends nothing."""

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
