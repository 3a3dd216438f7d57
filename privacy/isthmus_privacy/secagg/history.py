"""Persistent record of a client's earlier rounds, which prevents replay and differencing attacks.

>>> history = History()
>>> config = RoundConfig(
...     run_id="demo", round=3, attempt=0, model_hash=bytes(32), purpose=bytes(32), size=8,
...     clients_max=20)
>>> history.begin(config, ClientRequirements())
>>> history.begin(config, ClientRequirements())
Traceback (most recent call last):
    ...
isthmus.errors.PeerMisbehaved: round 3 attempt 0 of run 'demo' is not after round 3 attempt 0, ...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NoReturn

from isthmus_privacy.crypto import refusal
from isthmus_privacy.secagg.config import ClientRequirements, RoundConfig

_MAX_SUMS = 32
"""Unmasked sums that are recorded for each run."""
_MAX_OPEN_RUNS = 8
"""Runs that a device can continue. It takes part in one at a time. Once this many other runs have
begun, only the fact that a run has ended is kept: what is written with every round must not grow
with the number of earlier runs."""
_ENDED = (1 << 64, 0)
"""Last attempt of an ended run: no attempt is after it."""


@dataclasses.dataclass
class _RunHistory:
    last: tuple[int, int] | None = None
    participations: int = 0
    unmasked: list[tuple[int, str, frozenset[str]]] = dataclasses.field(default_factory=list)
    """Round, model hash (hex) and survivors of the sums that this client helped to unmask."""


class History:
    """One client's record. Keep it as long as its identity key; `state()` is what to persist.

    Guarantees:
      * a client never takes part in an attempt twice, nor in one before an attempt already begun;
      * for the same model or the same round, a second sum is refused if its cohort differs from an
        earlier one by so few clients that the difference of the sums would reveal their updates;
      * the memory of a run does not grow with its rounds, and is nearly empty once eight more runs
        have begun; the run cannot be continued then.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        """Restore a history from the result of `state()`; None starts an empty one."""
        self._runs: dict[str, _RunHistory] = {}
        self._draw: int = 0 if state is None else state["draw"]
        """The latest draw, of any run."""
        for run_id, saved in ({} if state is None else state["runs"]).items():
            self._runs[run_id] = _RunHistory(
                last=None if saved["last"] is None else (saved["last"][0], saved["last"][1]),
                participations=saved["participations"],
                unmasked=[(r, model, frozenset(names)) for r, model, names in saved["unmasked"]],
            )

    def state(self) -> dict[str, Any]:
        """The whole history as JSON-serialisable data."""
        runs = {
            run_id: {
                "last": run.last,
                "participations": run.participations,
                "unmasked": [[r, model, sorted(names)] for r, model, names in run.unmasked],
            }
            for run_id, run in self._runs.items()
        }
        return {"draw": self._draw, "runs": runs}

    def begin(self, config: RoundConfig, requirements: ClientRequirements) -> None:
        """Record that an attempt begins.

        Raises:
            PeerMisbehaved: it is not after the last one, its draw is before the last one, or the
                limit on participations is reached.
        """
        if requirements.selection_slack is not None and config.draw < self._draw:
            refusal.refuse(
                "draw-before-last",
                f"the draw of {config.draw} is before that of {self._draw}, in which this device "
                "has taken part",
            )
        run, attempt = self._run(config), (config.round, config.attempt)
        if run.last is not None and attempt <= run.last:
            _refuse_replay(config, run.last)
        limit = requirements.participations_max
        if limit is not None and run.participations >= limit:
            refusal.refuse(
                "participation-limit",
                f"this device has taken part in {run.participations} attempts of run "
                f"{config.run_id!r}, its own limit",
            )
        self._draw = max(self._draw, config.draw)
        run.last = attempt
        run.participations += 1
        self._runs[config.run_id] = self._runs.pop(config.run_id)  # the latest run is at the end
        for earlier in list(self._runs.values())[:-_MAX_OPEN_RUNS]:
            earlier.last, earlier.unmasked = _ENDED, []

    def check_survivors(self, config: RoundConfig, survivors: frozenset[str]) -> None:
        """Refuse a cohort whose sum, minus an earlier sum, would reveal the updates of a few.

        Raises:
            PeerMisbehaved: it differs from an earlier cohort by 1 .. clients_min - 1 clients, or
                the earlier cohorts are no longer known.
        """
        run, model = self._run(config), config.model_hash.hex()
        if run.last == _ENDED:  # other runs have begun during this attempt
            _refuse_replay(config, run.last)
        for earlier_round, earlier_model, earlier in run.unmasked:
            if earlier_round != config.round and earlier_model != model:
                continue
            if 0 < len(survivors ^ earlier) < config.clients_min:
                refusal.refuse(
                    "survivors-differ-by-few",
                    f"these survivors differ by {len(survivors ^ earlier)} from those of round "
                    f"{earlier_round}, whose sum of updates to the same model is known",
                )

    def note_unmasked(self, config: RoundConfig, survivors: frozenset[str]) -> None:
        """Record that this client helps to unmask the sum over `survivors`."""
        run = self._run(config)
        run.unmasked.append((config.round, config.model_hash.hex(), survivors))
        del run.unmasked[:-_MAX_SUMS]

    def _run(self, config: RoundConfig) -> _RunHistory:
        return self._runs.setdefault(config.run_id, _RunHistory())


def _refuse_replay(config: RoundConfig, last: tuple[int, int]) -> NoReturn:
    latest = f"round {last[0]} attempt {last[1]}, which this device has seen"
    if last == _ENDED:
        latest = f"its end: this device has been in {_MAX_OPEN_RUNS} others since"
    refusal.refuse(
        "config-replayed",
        f"round {config.round} attempt {config.attempt} of run {config.run_id!r} is not after "
        f"{latest}",
    )
