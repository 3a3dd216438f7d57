"""The request with which participants open a run, and checks of their answers."""

from __future__ import annotations

import logging
from pathlib import Path

from isthmus.errors import IsthmusError, JobError, UpdateError
from isthmus.job import Job, with_changes, write_job
from isthmus.job.section import Hours
from isthmus.names import is_name
from isthmus.task import packages
from isthmus.task.code_digest import code_digest
from isthmus.transport.requests import fingerprint_messages
from isthmus.wire import link_pb2
from isthmus_privacy.dp.calibration import SampledNoisePlan
from isthmus_server.model.global_model import GlobalModel
from isthmus_server.strategy.gradients import REST
from isthmus_server.transport.peer import Peer

log = logging.getLogger(__name__)

MAX_HOURS = 32
"""Entries in one device's hours; all of them are evaluated before every round."""
MAX_HOURS_LENGTH = 64
"""Characters in one entry."""
MAX_EXAMPLES = 1 << 30
"""Examples that a device may declare: the precision of a sum depends on the declared total."""


def opening_of(run_id: str, job: Job, base: Path, model: GlobalModel) -> link_pb2.OpenRun:
    """The request with which participants open a run.

    Args:
        run_id: of the run.
        job: of the run.
        base: directory of the job's relative paths.
        model: the server's, which that of every participant must equal.

    Raises:
        TaskError: the task's code cannot be read.
        JobError: no noise meets the budget of the datacenter's examples.
    """
    job = _with_noise(job)
    opening = link_pb2.OpenRun(
        run_id=run_id,
        job=write_job(job),
        base=str(base),
        layout=model.layout.header,
        frozen=fingerprint_messages(model.frozen),
        memory=link_pb2.Memory(frozen=model.memory.frozen, trained=model.memory.trained),
    )
    if model.personal.size:
        opening.personal = model.personal.header
    if job.federated.secure_aggregation:
        # A part of the purpose of each sum, which devices compute for themselves: a sum of updates
        # that came from different code means nothing.
        opening.task_digest = code_digest(job.task.source, base)
    return opening


def opening_of_ranks(opening: link_pb2.OpenRun, job: Job) -> link_pb2.OpenRun:
    """The request `opening` for datacenters, whose ranks train in the layout of `job`.

    Raises:
        JobError: no noise meets the budget of the datacenter's examples.
    """
    changed = link_pb2.OpenRun()
    changed.CopyFrom(opening)
    changed.job = write_job(_with_noise(job))
    return changed


def _with_noise(job: Job) -> Job:
    """The job with the noise of the datacenter's examples, if it has any.

    Found once for all ranks: the search can take seconds.
    """
    noise = SampledNoisePlan.of(job)
    if noise is None:
        return job
    return with_changes(job, {"datacenter.privacy.noise": noise.multiplier})


def installed_package(job: Job, base: Path) -> packages.Package | None:
    """The package that a job's task was installed from; devices may fetch it."""
    try:
        return packages.installed(base, packages.name_of(job))
    except IsthmusError as error:
        log.warning("devices are not offered the task: %s", error)
        return None


def check_examples(peer: Peer, opened: link_pb2.Opened) -> None:
    """Refuse a number of examples that would leave no precision for other updates.

    Raises:
        UpdateError: a device declared more.
    """
    if peer.role == link_pb2.CLIENT and opened.examples > MAX_EXAMPLES:
        raise UpdateError(f"it has {opened.examples} examples; the maximum is {MAX_EXAMPLES}")


def group_of(opened: link_pb2.Opened, job: Job) -> str:
    """The group of a device in a job, `REST` if it is in none.

    Raises:
        UpdateError: what it declared is not a name.
    """
    if opened.group and not is_name(opened.group):
        raise UpdateError("its group is not 1 to 63 letters, digits, dots, dashes or underscores")
    groups = job.federated.groups
    return opened.group if groups is not None and groups.accepts(opened.group) else REST


def hours_of(opened: link_pb2.Opened) -> tuple[Hours, ...]:
    """The hours in which a device accepts invitations.

    Raises:
        UpdateError: too many or too long entries, or one that cannot be parsed.
    """
    entries = opened.hours
    if len(entries) > MAX_HOURS or any(len(entry) > MAX_HOURS_LENGTH for entry in entries):
        raise UpdateError(
            f"its hours have more than {MAX_HOURS} entries, or one of more than "
            f"{MAX_HOURS_LENGTH} characters; give fewer"
        )
    try:
        return tuple(Hours.parse(entry) for entry in entries)
    except JobError as error:
        raise UpdateError(str(error)) from None
