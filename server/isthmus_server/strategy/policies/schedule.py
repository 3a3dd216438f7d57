"""Follow a schedule of phases, some of which are limited to hours of the day.

>>> schedule = [{"regime": "datacenter", "rounds": 1}, {"regime": "federated"}]
>>> policy = Schedule(StrategySection(policy="schedule", schedule=schedule))
>>> observation = Observation(round=2, rounds=4, history=(), clients_ready=8, datacenter_ready=True,
...                           spent=0.0, budget=None, state={"done": [1, 0]})
>>> policy.plan(observation).reason
'phase 2 of 2 is federated, to the end'
"""

from __future__ import annotations

import math

from isthmus.job import Phase, StrategySection
from isthmus_server.strategy.policy import Observation, Plan, Wait, no_settings
from isthmus_server.strategy.windows import forecast_hours


class Schedule:
    """Runs the first phase of `strategy.schedule` that has rounds left and is within its hours."""

    def __init__(self, strategy: StrategySection) -> None:
        no_settings(strategy)
        self.phases = strategy.schedule
        self.regimes = tuple(phase.regime for phase in self.phases)

    def plan(self, observation: Observation) -> Plan | Wait:
        """Find the phase of the next round and count the round."""
        done = list(observation.state.get("done", [0] * len(self.phases)))
        waits: list[float] = []
        for number, phase in enumerate(self.phases, 1):
            last = number == len(self.phases)
            # The last phase goes on to the end, whatever its number of rounds.
            if phase.rounds is not None and done[number - 1] >= phase.rounds and not last:
                continue
            hours = forecast_hours(phase.hours, observation.now, None) if phase.hours else None
            if hours is not None and not hours.ready:
                waits.append(hours.changes_in or math.inf)
                continue
            done[number - 1] += 1
            return Plan(
                phase.regime,
                f"phase {number} of {len(self.phases)} is {phase.regime}, "
                f"{_phase_progress(phase, done[number - 1], last)}",
                {"done": done},
            )
        return Wait(min(waits), "no phase of the schedule has its hours now")


def _phase_progress(phase: Phase, done: int, last: bool) -> str:
    hours = " and ".join(
        f"{entry.opens} to {entry.closes}{' ' if entry.days else ''}{', '.join(entry.days)}"
        for entry in phase.hours
    )
    within = f" from {hours} UTC" if hours else ""
    if last or phase.rounds is None:
        return f"to the end{within}"
    return f"its round {done} of {phase.rounds}{within}"
