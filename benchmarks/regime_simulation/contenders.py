"""The policies that `regimes.py` compares, as keys of a job's `strategy` in a scenario.

A fixed policy determines the regime of each round beforehand; the other policies are compared with
the best of them in hindsight. They are included with several outer optimizers (`-half` is half of
the outer learning rate), so that no policy looks good only because the baselines were not tuned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regime_simulation.leave_one_out import VARIANTS
from regime_simulation.scenario import HOURS, Scenario, max_transfer_weight

Changes = Mapping[str, Any]

WARM_TICKS = 15
CHOOSERS = ("adaptive", "plateau", "ucb", "thompson")
"""Policies that decide from the results of earlier rounds."""
LIGHT = 0.25
"""Factor on the weight of the datacenter's gradient in `transfer-light`."""
STEPPED = ("federated", "transfer", "hybrid", "warm")
"""Fixed policies that are included with half of the outer learning rate too."""
PROBLEM_POLICIES = (
    "datacenter",
    *(f"{name}{half}" for name in STEPPED for half in ("", "-half")),
    "transfer-light",
    "rule",
    "adaptive",
)
"""The policies that are compared in the problems of each data set."""


def contenders(scenario: Scenario) -> dict[str, Changes]:
    """Every policy by name, the fixed ones first."""
    return {**fixed(scenario), **_choosers()}


def fixed(scenario: Scenario) -> dict[str, Changes]:
    """The fixed policies; the best of them in hindsight defines a regret of zero."""
    federated = {"policy": "federated"}
    policies: dict[str, Changes] = {
        "datacenter": {"policy": "datacenter"},
        "federated": federated,
        "federated-fedavg": {**federated, "outer_lr": 1.0, "outer_momentum": 0.0},
        "alternate": {"policy": "alternate"},
        "warm": {
            "policy": "schedule",
            "schedule": [
                {"regime": "datacenter", "rounds": WARM_TICKS},
                {"regime": "federated"},
            ],
        },
        "hybrid": {"policy": "hybrid", "merge": "weighted", "datacenter_weight": 0.25},
        "projected": {"policy": "hybrid", "merge": "projected", "datacenter_weight": 0.25},
        "transfer": {"policy": "hybrid", "merge": "transfer"},
        "transfer-light": {
            "policy": "hybrid",
            "merge": "transfer",
            "transfer_weight": LIGHT * max_transfer_weight(scenario.federated),
        },
        "rule": {"policy": "rule"},
    }
    half = scenario.federated.outer_lr / 2
    policies |= {f"{name}-half": {**policies[name], "outer_lr": half} for name in STEPPED}
    if scenario.windows:
        policies["fill"] = {"policy": "schedule", "schedule": _fill(scenario)}
    return policies


def _choosers() -> dict[str, Changes]:
    return {
        "adaptive": {"policy": "adaptive"},
        "plateau": {"policy": "plateau"},
        "ucb": {"policy": "bandit", "settings": {"method": "ucb"}},
        "thompson": {"policy": "bandit", "settings": {"method": "thompson"}},
        **{
            name: {"policy": "adaptive", "settings": dict(settings)}
            for name, settings in VARIANTS.items()
        },
    }


def _fill(scenario: Scenario) -> list[dict[str, Any]]:
    """Federated rounds while devices are available, datacenter rounds in every other hour."""
    hours = [
        {"opens": f"{zone.opens:02d}:00", "closes": f"{zone.closes % HOURS:02d}:00"}
        for zone in scenario.windows
    ]
    return [{"regime": "federated", "hours": hours}, {"regime": "datacenter"}]
