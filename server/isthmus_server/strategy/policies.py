"""The policies that come with Isthmus.

>>> from isthmus.job import StrategySection
>>> policy = Alternate(StrategySection())
>>> seen = Observation(round=2, rounds=4, history=(), clients_ready=8, datacenter_ready=True,
...                    spent=0.0, budget=None, state={})
>>> policy.plan(seen).reason
'even rounds are federated, odd ones datacenter'
"""

from __future__ import annotations

from collections.abc import Callable

from isthmus.job import StrategySection
from isthmus_server.strategy.policy import Kind, Observation, Plan, Policy


class Fixed:
    """The same regime every round."""

    def __init__(self, regime: Kind) -> None:
        self.regime = regime

    def plan(self, observation: Observation) -> Plan:
        """Always the one."""
        return Plan(self.regime, f"the job asks for {self.regime} rounds only")


class Alternate:
    """Datacenter, federated, datacenter, ..."""

    def __init__(self, strategy: StrategySection) -> None:
        pass

    def plan(self, observation: Observation) -> Plan:
        """By the parity of the round."""
        regime: Kind = "datacenter" if observation.round % 2 else "federated"
        return Plan(regime, "even rounds are federated, odd ones datacenter")


class Schedule:
    """The phases of `strategy.schedule`, in order; the last one goes on."""

    def __init__(self, strategy: StrategySection) -> None:
        self.phases = strategy.schedule

    def plan(self, observation: Observation) -> Plan:
        """Find the phase that the round falls into."""
        start = 1
        for number, phase in enumerate(self.phases, 1):
            end = start + phase.rounds
            last = number == len(self.phases)
            if observation.round < end or last:
                until = "to the end" if last else f"to {end - 1}"
                return Plan(
                    phase.regime,
                    f"phase {number} of {len(self.phases)} is {phase.regime}, "
                    f"from round {start} {until}",
                )
            start = end
        raise AssertionError("a schedule has at least one phase")


BUILT_IN: dict[str, Callable[[StrategySection], Policy]] = {
    "datacenter": lambda strategy: Fixed("datacenter"),
    "federated": lambda strategy: Fixed("federated"),
    "hybrid": lambda strategy: Fixed("hybrid"),
    "alternate": Alternate,
    "schedule": Schedule,
}
