"""The aggregation rule of a run: loads it, gives it the updates, and keeps its state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from isthmus.errors import JobError, RoundFailed, UserError
from isthmus.job.federated import FederatedSection
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.stream import to_the_end
from isthmus.wire import link_pb2
from isthmus_server.model.update_decoding import UpdateSpool
from isthmus_server.regimes.aggregation.rule import (
    AggregatedRound,
    AggregationRule,
    RoundAggregation,
    RuleWithState,
    SingleUpdate,
)
from isthmus_server.regimes.base import AttemptSpec, FederatedAttempt
from isthmus_server.regimes.plaintext import PlaintextAttempt, check_weight
from isthmus_server.regimes.received_update import decoded_update

if TYPE_CHECKING:
    from isthmus_server.regimes.context import FederatedContext
    from isthmus_server.regimes.upload_places import UploadPlaces


class RuleExtension:
    """The rule that `federated.aggregation` names, as a `FederatedExtension`.

    Guarantees:
      * the rule's state is committed with the round, or not at all;
      * the updates of a rule that needs all of them take at most `aggregation_max_bytes`.
    """

    def __init__(
        self, rule: AggregationRule, federated: FederatedSection, layout: TensorLayout
    ) -> None:
        """Use a rule that `load_rule` has checked.

        Raises:
            JobError: the updates of a cohort would take too much memory.
        """
        self._shown = f"federated.aggregation={federated.aggregation!r}"
        self._max_bytes = federated.aggregation_max_bytes
        self._layout = layout
        self._rule = rule
        try:
            self._check_size(federated.cohort)
        except RoundFailed as error:
            raise JobError(str(error)) from None

    def attempt(self, context: FederatedContext, spec: AttemptSpec) -> FederatedAttempt:
        """An attempt whose updates the rule aggregates.

        Raises:
            RoundFailed: the rule cannot aggregate a cohort of this size.
        """
        self._check_size(spec.settings.cohort)
        facts = AggregatedRound(
            round=spec.round,
            size=self._layout.size,
            cohort=dict(spec.cohort),
            quorum=spec.settings.needed,
            max_updates=spec.settings.cohort,
        )
        aggregator = RuleAggregator(context, self._rule, facts, self._shown)
        return PlaintextAttempt(context, spec, aggregator)

    def _check_size(self, cohort: int) -> None:
        takes = cohort * self._layout.nbytes
        if self._rule.needs_all and takes > self._max_bytes:
            raise RoundFailed(
                f"{self._shown} needs all updates of a round at once, and {cohort} of this model "
                f"take {takes} bytes where federated.aggregation_max_bytes={self._max_bytes}; "
                "raise it, or lower federated.cohort"
            )

    # -- state -------------------------------------------------------------------------------------

    def commit(self, state: Any) -> None:
        """Make the state of an attempt the current one."""
        if isinstance(self._rule, RuleWithState):
            self._called(self._rule.commit, state)

    def reset(self) -> None:
        """Discard what the rule has kept of earlier rounds."""
        if isinstance(self._rule, RuleWithState):
            self._called(self._rule.reset)

    def export_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The rule's state as tensors and JSON values; empty without one."""
        if isinstance(self._rule, RuleWithState):
            tensors, values = self._called(self._rule.export_state)
            return tensors, values
        return {}, {}

    def import_state(self, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:
        """Restore what `export_state` returned."""
        if isinstance(self._rule, RuleWithState):
            self._called(self._rule.import_state, tensors, values)

    def _called(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function about the rule's state, whose exceptions end the run with its name."""
        try:
            return function(*arguments)
        except UserError:
            raise
        except Exception as error:  # third-party code may raise anything
            what = getattr(function, "__name__", "its state")
            raise UserError(
                f"{self._shown} failed in {what}(): {type(error).__name__}: "
                f"{' '.join(str(error).split())}"
            ) from error


class RuleAggregator:
    """An `Aggregator` that passes the updates of one attempt to a rule."""

    def __init__(
        self, context: FederatedContext, rule: AggregationRule, facts: AggregatedRound, shown: str
    ) -> None:
        """Begin the rule's round.

        Raises:
            RoundFailed: the rule cannot aggregate this cohort, or it failed.
        """
        self._context = context
        self._facts = facts
        self._shown = shown
        self._round: RoundAggregation = self._called(rule.begin, facts)
        self._has_state = isinstance(rule, RuleWithState)
        self._kept: dict[str, SingleUpdate] | None = {} if rule.needs_all else None
        """Updates for a rule that needs all of them, which gets them in the cohort's order."""
        self._failure: RoundFailed | None = None
        self._adding = asyncio.Lock()

    async def add(
        self,
        name: str,
        trained: link_pb2.Trained,
        accept: Callable[[], None],
        places: UploadPlaces,
    ) -> None:
        """Fetch an update and give it to the rule; see `Aggregator.add`."""
        blob = trained.result
        link = self._context.link
        async with link.stored(name, blob, self._context.spool) as stored, places.place(name):
            with UpdateSpool(self._context.spool, expected_bytes=blob.size) as spool:
                await link.fetch(name, blob, spool.write, spool.take, stored)
                await to_the_end(self._add(name, trained.examples, spool, accept))

    async def _add(
        self, name: str, examples: int, spool: UpdateSpool, accept: Callable[[], None]
    ) -> None:
        async with self._adding:  # so that a streaming rule has one vector at a time
            check_weight(examples, self._facts.cohort[name])
            round_ = self._facts.round
            vector = await asyncio.to_thread(decoded_update, self._context, round_, spool)
            accept()
            update = SingleUpdate(device=name, examples=examples, vector=vector)
            if self._kept is not None:
                self._kept[name] = update
                return
            try:
                await asyncio.to_thread(self._called, self._round.add, update)
            except RoundFailed as error:
                # The device did nothing wrong: its receipt stays, and the attempt fails at its end.
                self._failure = self._failure or error

    def end(self) -> None:
        """Nothing is kept elsewhere; see `Aggregator.end`."""

    async def settle(self) -> Mapping[str, str]:
        """Nothing is summed elsewhere; see `Aggregator.settle`."""
        return {}

    async def result(self) -> tuple[torch.Tensor, Any]:
        """The rule's pseudo-gradient, float32 (N), and its state after it.

        Raises:
            RoundFailed: the rule failed, or returned something else than such a vector.
        """
        try:
            if self._failure is not None:
                raise self._failure
            return await asyncio.to_thread(self._result, self._round, self._kept or {})
        finally:
            # The attempt is kept until the next one begins; the updates are not.
            del self._round
            self._kept = None
            self._failure = None

    def _result(
        self, round_: RoundAggregation, kept: dict[str, SingleUpdate]
    ) -> tuple[torch.Tensor, Any]:
        for name in self._facts.cohort:
            if name in kept:
                self._called(round_.add, kept.pop(name))
        vector = self._called(round_.result)
        if not isinstance(vector, torch.Tensor) or vector.shape != (self._facts.size,):
            raise RoundFailed(
                f"{self._shown} returned no vector of the {self._facts.size} elements of an update"
            )
        vector = vector.detach().to("cpu", torch.float32)
        if not bool(vector.isfinite().all()):
            raise RoundFailed(f"{self._shown} returned a vector that is not finite")
        if not self._has_state:
            return vector, None
        if not hasattr(round_, "state"):
            raise RoundFailed(
                f"{self._shown} has the methods of a rule with state, and its round has no "
                "attribute `state` after result()"
            )
        # The server's step may change the result in place, which the rule's state may share.
        return vector.clone(), round_.state

    def _called(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the rule, whose exceptions fail the round with the rule's name."""
        try:
            return function(*arguments)
        except RoundFailed:
            raise
        except Exception as error:  # third-party code may raise anything
            reason = " ".join(str(error).split())
            if not isinstance(error, UserError):
                reason = f"{type(error).__name__}: {reason}"
            raise RoundFailed(
                f"{self._shown} failed in round {self._facts.round}: {reason}"
            ) from error
