"""The settings of a job that a device's vector depends on.

A device gives one vector for a model, in all runs: it remembers a hash of these settings. All
settings count but those that are known to change nothing of what one device computes, so that a new
one counts until somebody has thought about it.

>>> from isthmus.job import parse_job
>>> text = 'name = "a"' + chr(10) + '[task]' + chr(10) + 'source = "task.py:A"'
>>> first = vector_settings(parse_job(text))
>>> vector_settings(parse_job(text, ["rounds=20", "time.round_seconds=60"])) == first
True
>>> vector_settings(parse_job(text, ["federated.max_examples=50"])) == first
False

The order of `task.settings` counts, whose names are the task's own: its code may go through them.

>>> orders = ("{cap=1, drop=2}", "{drop=2, cap=1}")
>>> first, second = (vector_settings(parse_job(text, [f"task.settings={each}"])) for each in orders)
>>> first == second
False
"""

from __future__ import annotations

import json
from typing import Any

from isthmus.job.schema import Job

_OF_SERVER = (
    "name",
    "budget",
    "seconds",
    "device_bytes",
    "attempts",
    "strategy",
    "datacenter",
    "time",
    "simulation",
    "prices",
)
"""Tables and keys that say when a run goes on, with whom, and what the server does."""

_OF_SELECTION = {
    "federated": (
        "clients",
        "over_selection",
        "quorum",
        "selection",
        "selection_settings",
        "utility",
        "participation",
        "hours",
        "max_clipped",
        "groups",
        "robust",
        "robust_settings",
        "robust_groups",
        "robust_minimum",
    ),
    "evaluation": (
        "every",
        "devices",
        "quorum",
        "same_devices",
        "keep_best",
        "patience",
        "deliver",
    ),
    "statistics": ("devices", "quorum", "minimum"),
}
"""Keys of other tables that say which devices are asked, and what is done with the sum."""


def vector_settings(job: Job) -> str:
    """The settings as JSON, without those that have their default.

    Tables are in the order in which a job defines their keys, whatever that of its file is.
    """
    table: dict[str, Any] = job.model_dump(mode="json", exclude_defaults=True)
    for key in _OF_SERVER:
        table.pop(key, None)
    for name, keys in _OF_SELECTION.items():
        kept = {key: value for key, value in table.pop(name, {}).items() if key not in keys}
        table[name] = kept  # always after all other tables, also where the job has none
    # The length of the run counts by its schedule of the learning rate, and by what its noise is
    # made for.
    if job.privacy is None and job.federated.privacy is None:
        table.pop("rounds", None)
    if job.learning_rate.needs_total:
        table["schedule_steps"] = job.schedule_steps
    return _written(table)


def statistics_settings(job: Job) -> str:
    """The settings that statistics of a device's data depend on: those of the task alone.

    Not what anything else depends on that a server may ask in a run that collects them.
    """
    table: dict[str, Any] = job.model_dump(mode="json", exclude_defaults=True)
    return _written({"task": table["task"], "statistics": True})


def _written(table: dict[str, Any]) -> str:
    return json.dumps(table, separators=(",", ":"))
