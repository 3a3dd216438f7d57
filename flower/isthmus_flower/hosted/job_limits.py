"""Read a job for Flower's own runtime, and refuse what it does not support."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from isthmus.errors import JobError
from isthmus.job.flower import evaluates
from isthmus.job.schema import Job, load_job

DIRECTORY = "directory"
"""The only key of an app's run config that is not a key of the job: the output directory."""


def hosted_job(path: Path, run_config: Mapping[str, bool | int | float | str]) -> Job:
    """Load a job file with the changes of the app's run config.

    Raises:
        JobError: the job is invalid, or uses a feature that Flower's runtime does not support.
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
    elif federated.flower is not None and evaluates(federated.flower):
        refused = "fraction_evaluate in federated.flower.strategy: its evaluation is central"
    elif federated.flower is not None and federated.flower.app is not None:
        refused = "federated.flower.app: the app is the one in pyproject.toml"
    elif job.exchange.has_personal or job.exchange.buffers == "recompute":
        refused = "[exchange]: its devices keep nothing between rounds, and it has no datacenter"
    if refused:
        raise JobError(f"{path} cannot run under Flower's runtime because of {refused}")
    return job
