"""Changes of a scenario that should not matter, or under which a policy should not break.

A metamorphic test: nobody knows the right result of a run, but these know how two runs relate.

- loss=F: the loss times F, and the devices' learning rate divided by it. The training is the same,
  so every decision has to be.
- steps=N: N times the local steps at a learning rate of 1/N: nearly the same training.
- dropout=S: devices do not answer a share S of the requests, and more of them are invited.
- renamed: the classes exchange their numbers. Sums have another order, so losses are rounded
  otherwise.
- shuffled: the devices exchange their names, so the cohorts have other devices.
"""

from __future__ import annotations

from regime_simulation.data_sets import DATA_SETS
from regime_simulation.scenario import Scenario

from isthmus.errors import UserError

KINDS = ("loss", "steps", "dropout")
PLAIN = ("renamed", "shuffled")
"""Changes without a value."""
MARGIN = 1.5
"""Devices invited for each that is expected to answer, so that a quorum nearly always does."""


def changed(scenario: Scenario, change: str) -> Scenario:
    """The scenario with a change, which is in its name: `heart-A` becomes `heart-A-loss-10`.

    Raises:
        UserError: an unknown change, or a value that it cannot have.
    """
    if change in PLAIN:
        if change == "renamed" and not DATA_SETS[scenario.data].labels:
            raise UserError(f"the data set {scenario.data!r} has no classes to be renamed")
        split = scenario.split.model_copy(update={change: True})
        name = f"{scenario.name}-{change}"
        return scenario.model_copy(update={"name": name, "split": split})
    kind, _, text = change.partition("=")
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    known = kind in KINDS and value > 0 and (kind != "dropout" or value < 1)
    if not known or (kind == "steps" and value != int(value)):
        raise UserError(
            f"{change!r} is no change of a scenario; give loss=FACTOR, steps=WHOLE-NUMBER, "
            "dropout=SHARE, renamed or shuffled"
        )
    federated = scenario.federated
    settings = {
        "loss": {"loss_scale": value},
        "steps": {"steps": federated.steps * int(value), "lr": federated.lr / value},
        "dropout": {"dropout": value, "over_selection": MARGIN / (1 - value)},
    }
    return scenario.model_copy(
        update={
            "name": f"{scenario.name}-{kind}-{value:g}",
            "federated": federated.model_copy(update=settings[kind]),
        }
    )
