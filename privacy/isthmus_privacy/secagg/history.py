"""What a client remembers between rounds, so that no two rounds can be played against each other.

>>> history = History()
>>> config = RoundConfig(
...     run_id="demo", round=3, attempt=0, model_hash=bytes(32), size=8, clients_max=20
... )
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

_KEPT = 32
"""Released cohorts remembered for one run."""
_RUNS = 8
"""Runs that a device can go on with. It is in one at a time, and of one that so many came after no
more is remembered than that it is over: a device in a thousand runs must not write down them all
with every round."""
_OVER = (1 << 64, 0)
"""The last attempt of such a run: none is after it."""


@dataclasses.dataclass
class _Run:
    last: tuple[int, int] | None = None
    participations: int = 0
    released: list[tuple[int, str, frozenset[str]]] = dataclasses.field(default_factory=list)
    """Round, model hash (hex) and survivors of sums this client helped to open."""


class History:
    """One client's memory. Keep it as long as its identity key; `state` says what to write down.

    Guarantees:
      * an attempt is never taken part in twice, nor one before an attempt already seen;
      * for the same model or the same round, no second sum whose cohort differs from an earlier
        one by so few clients that the difference of the two sums would show theirs;
      * what is kept of a run does not grow with its rounds, and is next to nothing once eight more
        runs have begun: it can then not be gone on with.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        """`state` is what `state()` returned before."""
        self._runs: dict[str, _Run] = {}
        for run_id, kept in (state or {}).items():
            self._runs[run_id] = _Run(
                last=None if kept["last"] is None else (kept["last"][0], kept["last"][1]),
                participations=kept["participations"],
                released=[(r, model, frozenset(names)) for r, model, names in kept["released"]],
            )

    def state(self) -> dict[str, Any]:
        """All of it, as JSON takes it."""
        return {
            run_id: {
                "last": run.last,
                "participations": run.participations,
                "released": [[r, model, sorted(names)] for r, model, names in run.released],
            }
            for run_id, run in self._runs.items()
        }

    def begin(self, config: RoundConfig, policy: ClientRequirements) -> None:
        """Note that an attempt begins.

        Raises:
            PeerMisbehaved: it is not after the last one, or this device has done its part.
        """
        run, now = self._run(config), (config.round, config.attempt)
        if run.last is not None and now <= run.last:
            _replayed(config, run.last)
        if policy.participations is not None and run.participations >= policy.participations:
            refusal.refuse(
                "participation-spent",
                f"this device has taken part in {run.participations} rounds of run "
                f"{config.run_id!r}, its own limit",
            )
        run.last = now
        run.participations += 1
        self._runs[config.run_id] = self._runs.pop(config.run_id)  # the latest are at the end
        for before in list(self._runs.values())[:-_RUNS]:
            before.last, before.released = _OVER, []

    def check_survivors(self, config: RoundConfig, survivors: frozenset[str]) -> None:
        """Refuse a cohort that, beside an earlier one, would show a few clients' sum.

        Raises:
            PeerMisbehaved: it differs by 1 .. clients_min - 1 clients, and there is no noise; or
                the earlier ones are not known any more.
        """
        run, model = self._run(config), config.model_hash.hex()
        if run.last == _OVER:  # while this attempt was made
            _replayed(config, run.last)
        for round_, earlier_model, earlier in run.released:
            if round_ != config.round and earlier_model != model:
                continue
            if 0 < len(survivors ^ earlier) < config.clients_min and not config.noise:
                refusal.refuse(
                    "survivors-differ-by-few",
                    f"these survivors differ by {len(survivors ^ earlier)} from those of round "
                    f"{round_}, whose sum of updates to the same model is known",
                )

    def note_unmasked(self, config: RoundConfig, survivors: frozenset[str]) -> None:
        """Note that this client helps to open the sum over `survivors`."""
        run = self._run(config)
        run.released.append((config.round, config.model_hash.hex(), survivors))
        del run.released[:-_KEPT]

    def _run(self, config: RoundConfig) -> _Run:
        return self._runs.setdefault(config.run_id, _Run())


def _replayed(config: RoundConfig, last: tuple[int, int]) -> NoReturn:
    seen = f"round {last[0]} attempt {last[1]}, which this device has seen"
    if last == _OVER:
        seen = f"its end: this device has been in {_RUNS} others since"
    refusal.refuse(
        "config-replayed",
        f"round {config.round} attempt {config.attempt} of run {config.run_id!r} is not after "
        f"{seen}",
    )
