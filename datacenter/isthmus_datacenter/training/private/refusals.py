"""Refuse data and ranks that differ from what the job's guarantee was computed for."""

from __future__ import annotations

from isthmus.errors import TaskError
from isthmus.job.datacenter import DatacenterSection


def check_numbers(section: DatacenterSection, examples: int, replicas: int) -> None:
    """Refuse data or ranks with which the sampling probability would be another.

    Raises:
        TaskError: with what to change.
    """
    assert section.privacy is not None
    if section.privacy.noise is None:
        raise TaskError(
            "the request to open the run does not say the noise of datacenter.privacy; the server "
            "may be older"
        )
    if examples != section.privacy.examples:
        raise TaskError(
            f"local_data() has {examples} examples, and the sampling probability follows from "
            f"datacenter.privacy.examples={section.privacy.examples}; set it to {examples}"
        )
    if section.batch_size * replicas != section.private_batch:
        raise TaskError(
            f"there are {replicas} ranks, and the sampling probability follows from "
            f"{section.private_batch // section.batch_size}; set datacenter.data_parallel to "
            f"{replicas}"
        )
