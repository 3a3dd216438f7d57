"""Check that a submitted job can run on a server, and loads no code that is not installed there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.job.flower import SERVER_APP
from isthmus.task import check_installed
from isthmus_server.budgets.run_budgets import check_budgets
from isthmus_server.regimes.aggregation.loading import load_rule
from isthmus_server.strategy import load_policy
from isthmus_server.strategy.selection import CheckedSelection


def check_job(job: Job, tasks: Path, lease: float) -> None:
    """Refuse a job that cannot run on a server.

    Args:
        job: the job.
        tasks: the server's directory of tasks.
        lease: of the server's link, in seconds.

    Raises:
        UserError: with what to change.
    """
    _check_participants(job)
    federated = job.federated
    if federated.selection != "uniform" and federated.secure_aggregation:
        raise UserError(
            f'federated.selection="{federated.selection}" lets the server choose the devices of a '
            "secure sum, which the devices of this server refuse: they are selected by lottery; "
            "remove it, or set federated.secure_aggregation=false"
        )
    if job.time.lease_seconds != lease:
        raise UserError(
            f"time.lease_seconds={job.time.lease_seconds:g}, but this server has one "
            f"lease for all jobs: add --set time.lease_seconds={lease:g}"
        )
    if federated.server_app is None:
        check_installed(job.task.source, tasks, movable=False)
    else:
        check_installed(federated.server_app, tasks, SERVER_APP, movable=False)
    for key, name in _named_code(job):
        _check_module(job, tasks, key, name)
    if ":" not in job.strategy.policy:  # an external module is in the folder of the task
        load_policy(job.strategy)
    CheckedSelection(federated)
    if federated.names_codecs or job.datacenter.compression is not None:
        from isthmus_privacy.compression.codecs import check_codecs  # loads PyTorch

        check_codecs(job)
    load_rule(federated)
    if federated.robust is not None:
        from isthmus_server.regimes.secure_sums.robust_rule import check_robust  # loads PyTorch

        check_robust(federated)
    check_budgets(job)
    job.model.check_inside()
    if job.task.data is not None:
        path = (tasks / job.task.data).resolve()
        if not path.is_relative_to(tasks.resolve()):
            raise UserError(
                f"task.data={job.task.data!r} is not below {tasks}; put the data there, and name "
                "it from there on, such as task.data='data'"
            )


def _check_module(job: Job, tasks: Path, key: str, name: str) -> None:
    """Refuse `module:Name` unless the module is in the task's folder: loading it executes it.

    Raises:
        UserError: with the key to change.
    """
    folder = (tasks / job.task.source.rpartition(":")[0]).parent
    module = name.partition(":")[0]
    file = folder / f"{module}.py"
    if not module.isidentifier() or module in sys.stdlib_module_names or not file.is_file():
        raise UserError(
            f"{key}={name!r} is not in the task's folder; this server loads only built-in "
            f"policies and strategies, and those in {folder}"
        )


def _named_code(job: Job) -> Iterator[tuple[str, str]]:
    """Yield the keys and values `module:Name` of a job that name code for the server to load."""
    if ":" in job.strategy.policy:
        yield "strategy.policy", job.strategy.policy
    if job.federated.flower is not None:
        yield from job.federated.flower.named_code()


def _check_participants(job: Job) -> None:
    """Refuse a job whose participants would have to be started by this server.

    Raises:
        UserError: with the keys to change.
    """
    for key, count in (
        ("federated.clients", job.federated.clients),
        ("datacenter.ranks", job.datacenter.ranks),
    ):
        if count:
            raise UserError(
                f"{key}={count} applies to `isthmus run`; participants of this server join "
                f"by themselves: add --set {key}=0"
            )
