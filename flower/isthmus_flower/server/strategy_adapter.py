"""The Flower strategy of a run, in place of the weighted mean of updates.

The strategy receives what Flower would give it: messages with each device's final model and
figures, and the model that they started from. Its result counts as the final model of the
devices, so the server optimizer and the merge with a datacenter work as without a strategy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from flwr.serverapp.strategy import Strategy

from isthmus.errors import JobError, RoundFailed
from isthmus.job.federated import FederatedSection
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_flower.messages import captured_warnings, identify
from isthmus_flower.server.attempt import FlowerAttempt
from isthmus_flower.server.state import StrategyState, check_storable
from isthmus_flower.server.strategies import ALL_NODES, make_strategy, sampling_options
from isthmus_flower.server.strategy_round import StrategyAggregator, StrategyRound
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
        self.sampling = ALL_NODES if sampled_nodes is None else sampling_options(sampled_nodes)
        self.settings = federated.flower
        self.layout = layout
        self.state = StrategyState()
        check_storable(self.make(federated.needed))
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
        self.state.apply_to(strategy)
        return StrategyRound(
            strategy,
            settings=self.settings,
            layout=self.layout,
            round_=round_,
            start=start,
            fresh=self.make(federated.needed),
            state=self.state,
        )

    def make(self, quorum: int) -> Strategy:
        """A new strategy without state."""
        with captured_warnings():
            return make_strategy(
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

    def commit(self, state: StrategyState) -> None:
        """Make the state of an attempt the current one."""
        self.state = state

    def reset(self) -> None:
        """Discard all moments and norms."""
        self.state = StrategyState()

    def export_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The strategy's state as tensors and JSON values."""
        return dict(self.state.tensors), dict(self.state.numbers)

    def import_state(self, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:
        """Restore what `export_state` returned."""
        self.state = StrategyState(dict(tensors), dict(values))
