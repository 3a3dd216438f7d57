"""Would the constants of `adaptive`, chosen on the other data sets, do as well on this one?

Each constant is varied alone. For each data set, the variant with the lowest mean regret over the
problems of all *other* data sets is chosen, and its regret on the data set that was left out is
compared with the default's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from harness import figures
from regime_simulation.scenario import Scenario

DEFAULT = "adaptive"
VARIED: Mapping[str, Sequence[float]] = {
    "gradient_pull": (0.25, 1.0),
    "rehearsal_pull": (0.125, 0.5),
    "apart": (0.85, 3.4),
}
"""Settings of `adaptive` and the values that are tried next to the default: half and twice that."""
VARIANTS: Mapping[str, Mapping[str, float]] = {
    f"adaptive-{name}-{value:g}": {name: value}
    for name, values in VARIED.items()
    for value in values
}
"""Settings by the name under which a variant is run."""

Regrets = Callable[[Scenario], Mapping[str, Mapping[int, float]]]


def chosen(
    scenarios: Sequence[Scenario], regrets: Regrets
) -> dict[str, tuple[str, dict[str, tuple[float, float]]]]:
    """Choose a variant for each data set from the other ones.

    Returns the name of the variant, and its regret and the default's by scenario of the data set.

    Args:
        scenarios: problems of several data sets.
        regrets: the regret by policy and seed in a scenario.
    """
    means = {
        scenario.name: {
            policy: statistics.mean(by_seed.values())
            for policy, by_seed in regrets(scenario).items()
        }
        for scenario in scenarios
    }
    data_sets = list(dict.fromkeys(scenario.data for scenario in scenarios))
    result = {}
    for left_out in data_sets:
        others = [means[each.name] for each in scenarios if each.data != left_out]
        known = [
            name for name in (DEFAULT, *VARIANTS) if others and all(name in each for each in others)
        ]
        if not known:
            continue
        best = min(known, key=lambda name: statistics.mean(each[name] for each in others))
        own = [each.name for each in scenarios if each.data == left_out]
        result[left_out] = (
            best,
            {
                name: (means[name][best], means[name][DEFAULT])
                for name in own
                if best in means[name]
            },
        )
    return result


def table(choices: Mapping[str, tuple[str, Mapping[str, tuple[float, float]]]]) -> str:
    """The choices as a table for people."""
    lines = [
        (name, variant, f"{left_out:.1f}", f"{default:.1f}")
        for variant, by_scenario in choices.values()
        for name, (left_out, default) in by_scenario.items()
    ]
    header = ("problem", "chosen on the other data sets", "regret", "regret of the default")
    return figures.table(header, lines)
