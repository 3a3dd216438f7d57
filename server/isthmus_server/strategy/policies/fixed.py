"""One regime in every round, or two regimes in turn.

>>> from isthmus.job import StrategySection
>>> policy = Alternate(StrategySection())
>>> observation = Observation(round=2, rounds=4, history=(), clients_ready=8, datacenter_ready=True,
...                           spent=0.0, budget=None, state={})
>>> policy.plan(observation).reason
'even rounds are federated, odd ones datacenter'
"""

from __future__ import annotations

from isthmus.job import StrategySection
from isthmus_server.strategy.policy import Kind, Observation, Plan, no_settings


class Fixed:
    """One regime for every round."""

    def __init__(self, strategy: StrategySection, regime: Kind) -> None:
        no_settings(strategy)
        self.regime = regime
        self.regimes = (regime,)

    def plan(self, observation: Observation) -> Plan:
        """Plan a round of the regime."""
        return Plan(self.regime, f"the job asks for {self.regime} rounds only")


class Alternate:
    """Datacenter and federated rounds in turn."""

    regimes: tuple[Kind, ...] = ("datacenter", "federated")

    def __init__(self, strategy: StrategySection) -> None:
        no_settings(strategy)

    def plan(self, observation: Observation) -> Plan:
        """Plan by the parity of the round number."""
        regime: Kind = "datacenter" if observation.round % 2 else "federated"
        return Plan(regime, "even rounds are federated, odd ones datacenter")
