"""Which regime does the work of a round, with whom, and why."""

from isthmus_server.strategy.policy import Observation, Plan, Policy, load_policy

__all__ = ["Observation", "Plan", "Policy", "load_policy"]
