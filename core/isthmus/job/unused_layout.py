"""What a job says of the ranks of a datacenter that it does not have, or does not know yet.

Such keys are not refused: a job is run with and without a datacenter, by `--set datacenter.ranks=0`
for example, and on a server the datacenter that joins brings its ranks.
"""

from __future__ import annotations

import json

from isthmus.job.datacenter import DatacenterSection
from isthmus.job.tables import JobTables

SHARING_KEYS = (
    "layout",
    "zero_stage",
    "shard_groups",
    "data_parallel",
    "tensor_parallel",
    "sequence_parallel",
    "context_parallel",
    "expert_parallel",
    "pipeline_parallel",
    "schedule",
    "microbatches",
)
"""Keys of `[datacenter]` that say how ranks share a model."""


def unused_layout(job: JobTables, *, joinable: bool = False) -> str:
    """What is set of how ranks share the model, and has no effect or is not checked.

    Empty if there is no such key.

    Args:
        job: the tables of a job.
        joinable: a datacenter that the job does not start can take part.
    """
    section = job.datacenter
    fields = DatacenterSection.model_fields
    changed = [name for name in SHARING_KEYS if getattr(section, name) != fields[name].default]
    if not changed:
        return ""
    values = (f"{name} = {json.dumps(getattr(section, name))}" for name in changed)
    keys = f"[datacenter] {', '.join(values)}"
    has = "has" if len(changed) == 1 else "have"
    if job.strategy.policy == "federated":
        return (
            f'{keys} {has} no effect: strategy.policy="federated" has no datacenter rounds; '
            "remove what you do not need"
        )
    if section.ranks:
        return ""
    starts_devices = job.federated.clients or job.simulation.clients
    if starts_devices and not joinable:
        return (
            f"{keys} {has} no effect: datacenter.ranks=0 starts no datacenter; raise it, or remove "
            "what you do not need"
        )
    sharing = section.tensor_parallel * section.context_parallel * section.pipeline_parallel
    degrees = sharing * (section.data_parallel or 1)
    if degrees == 1:
        return ""
    multiple = "" if section.data_parallel else " or a multiple"
    return (
        f"{keys} needs a datacenter of {degrees} ranks{multiple}, and how many ranks it has is "
        "known when it joins: another number is refused then"
    )
