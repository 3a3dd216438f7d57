"""A job under Flower's own runtime: what of it holds there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from isthmus.errors import JobError
from isthmus.job.schema import Job, load_job

DIRECTORY = "directory"
"""The one key of an app's run config that is no key of the job: where the result is written."""


def hosted_job(path: Path, run_config: Mapping[str, bool | int | float | str]) -> Job:
    """A job file with the keys changed that the app's run config has.

    Raises:
        JobError: the job cannot be used, or asks for what Flower's runtime does not give.
    """
    overrides = [
        f"{key}={json.dumps(value)}" for key, value in run_config.items() if key != DIRECTORY
    ]
    job = load_job(path, overrides)
    federated = job.federated
    refused = ""
    if job.strategy.policy != "federated":
        refused = f"strategy.policy={job.strategy.policy!r}: its rounds are all 'federated'"
    elif federated.secure_aggregation:
        refused = (
            "federated.secure_aggregation: its rounds need our link; set it to false if the server "
            "may see each update"
        )
    elif federated.mode != "rounds":
        refused = f"federated.mode={federated.mode!r}: Flower works in rounds"
    elif federated.flower is not None and federated.flower.app is not None:
        refused = "federated.flower.app: the app is the one in pyproject.toml"
    if refused:
        raise JobError(f"{path} cannot run under Flower's runtime because of {refused}")
    return job
