"""Comparisons that a policy asks for: whom to visit, tries, their price, and the log of them.

How one visit goes is in `visit`. Each try is written down before devices are asked, and what it
came to after; a comparison that is in the log is not asked for again after a crash, and one that a
crash cut short asks the same devices again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from isthmus.errors import RoundFailed
from isthmus_server.regimes.base import AttemptFailed
from isthmus_server.regimes.context import FederatedContext
from isthmus_server.rounds.clock import Clock
from isthmus_server.rounds.model_comparison import comparison, visit
from isthmus_server.rounds.model_versions import ModelVersions
from isthmus_server.rounds.roster import Roster
from isthmus_server.storage.records import ComparisonRecord, Receipt
from isthmus_server.storage.run_state import RunState
from isthmus_server.storage.store import Store
from isthmus_server.strategy.device_selection import select_devices
from isthmus_server.strategy.policy import Compare, Comparison


class ComparisonRunner:
    """Has devices compare models."""

    def __init__(
        self,
        store: Store,
        roster: Roster,
        federation: FederatedContext,
        snapshots: ModelVersions,
        clock: Clock,
    ) -> None:
        self.store = store
        self.job = store.job
        self.roster = roster
        self.federation = federation
        self.snapshots = snapshots
        self.clock = clock

    async def visit(
        self, at: RunState, asked: Compare, bring_home: Callable[[], Awaitable[None]], *, last: bool
    ) -> ComparisonRecord:
        """One try at a comparison.

        Args:
            at: where the run stands.
            asked: what to compare.
            bring_home: fetches the current model from wherever it is.
            last: no further try is made if this one fails.

        Returns the record of the attempt, which has a `result` or the `error`.
        """
        number, attempt = at.comparisons_ended + 1, at.comparison_attempts + 1
        started = self.clock.now()
        self.store.begin_comparison(number, attempt, at.round + 1, asked)
        found: Comparison | None = None
        receipts: Sequence[Receipt] = ()
        error: str | None = None
        try:
            await bring_home()
            names = self._whom(asked, number)
            scores = await visit(
                self.federation, self.snapshots, at.models, asked, number, attempt, names
            )
            receipts = scores.receipts
            found = comparison(asked, scores, self._price(asked, receipts))
        except RoundFailed as failed:
            error = str(failed)
            receipts = failed.receipts if isinstance(failed, AttemptFailed) else ()
        record = ComparisonRecord(
            number=number,
            attempt=attempt,
            round=at.round + 1,
            ended=found is not None or last,
            reason=asked.reason,
            models=asked.models,
            result=found,
            error=error,
            price=self._price(asked, receipts),
            device_bytes=sum(r.bytes_in + r.bytes_out for r in receipts),
            seconds=self.clock.now() - started,
            receipts=receipts,
            policy_state=dict(at.policy_state if found is None else asked.state),
        )
        self.store.end_comparison(record)
        return record

    def _whom(self, asked: Compare, number: int) -> list[str]:
        """The same devices in every try."""
        # Numbers below 0 draw apart from the rounds' cohorts.
        able = self.roster.able()
        return select_devices(able, count=asked.devices, seed=self.job.seed, round_=-number)

    def _price(self, asked: Compare, receipts: Sequence[Receipt]) -> float:
        reached = sum(receipt.started for receipt in receipts)
        return reached * len(asked.models) * self.job.prices.client_evaluation
