"""Built-in policies, by the names that jobs use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from isthmus.job import StrategySection
from isthmus_server.strategy.policies.adaptive import Adaptive
from isthmus_server.strategy.policies.availability import Availability
from isthmus_server.strategy.policies.bandit import Bandit
from isthmus_server.strategy.policies.budget import Budget
from isthmus_server.strategy.policies.fixed import Alternate, Fixed
from isthmus_server.strategy.policies.plateau import Plateau
from isthmus_server.strategy.policies.rule import Rule
from isthmus_server.strategy.policies.schedule import Schedule
from isthmus_server.strategy.policy import Policy

BUILT_IN: dict[str, Callable[[StrategySection], Policy]] = {
    "datacenter": partial(Fixed, regime="datacenter"),
    "federated": partial(Fixed, regime="federated"),
    "hybrid": partial(Fixed, regime="hybrid"),
    "alternate": Alternate,
    "schedule": Schedule,
    "plateau": Plateau,
    "budget": Budget,
    "availability": Availability,
    "bandit": Bandit,
    "rule": Rule,
    "adaptive": Adaptive,
}
