"""Comparisons of models that the adaptive policy requests, and their results in words.

A comparison decides only if its confidence interval does (`Comparison.radius`). Without an answer
it excludes nothing.
"""

from __future__ import annotations

import dataclasses

from isthmus_server.strategy.policies.adaptive.state import (
    COLD,
    WARM,
    WITH_GRADIENT,
    AdaptiveSettings,
    AdaptiveState,
)
from isthmus_server.strategy.policy import (
    CURRENT,
    INITIAL,
    SERVED,
    Compare,
    Comparison,
    Observation,
)

REASONS = {
    "warm": "whether the warm start has made the model better for the devices",
    "probation": "whether rounds with devices have made the served model worse",
    "race": "whether the datacenter's gradient does harm",
}
"""Why a comparison is requested, by its purpose."""

NAMES = {
    CURRENT: "the new model",
    INITIAL: "the initial model",
    SERVED: "the served model",
    WARM: "the warm model",
    COLD: "the model before it",
    WITH_GRADIENT: "the model with the gradient",
}


class Comparisons:
    """Requests comparisons for one purpose at a time."""

    def __init__(self, settings: AdaptiveSettings) -> None:
        self._settings = settings

    def result(
        self, observation: Observation, state: AdaptiveState, purpose: str, models: tuple[str, ...]
    ) -> Compare | Comparison | str:
        """Return the comparison if it was made, why it was not, or the request for it."""
        # Before the request is repeated: asking again would end the run.
        if observation.refused:
            return f"no comparison could be made ({observation.refused[-1]})"
        # A comparison of this round for another purpose is no answer.
        if state.pending_comparison == purpose and observation.comparisons:
            return observation.comparisons[-1]
        state = dataclasses.replace(state, pending_comparison=purpose)
        devices = self._devices(observation)
        return Compare(models, devices, REASONS[purpose], state.to_json())

    def price(self, observation: Observation) -> float:
        """Return the price of comparing two models."""
        return 2 * self._devices(observation) * observation.comparison_price

    def _devices(self, observation: Observation) -> int:
        """Devices to ask: as many as a round of that size invites, so that as many may be lost."""
        wanted = observation.invited(self._settings.devices)
        return min(wanted, max(observation.clients_ready, 2))


def in_words(comparison: Comparison, model: str, reference: str) -> str:
    """Say by how much a model is better or worse than the first one."""
    difference = comparison.difference[model]
    error = comparison.standard_error[model]
    than = "better" if difference < 0 else "worse"
    return (
        f"{comparison.devices} devices found {NAMES[model]} {abs(difference):.4f} "
        f"{than} than {NAMES[reference]} (standard error {error:.4f})"
    )
