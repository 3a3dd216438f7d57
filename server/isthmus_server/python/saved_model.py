"""`isthmus.load_model`: a run's model as the task's PyTorch module."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from isthmus.errors import UserError
from isthmus.job import Job, read_job
from isthmus.task import Task, load_task
from isthmus_server.storage.damage_checks import FINAL_MODEL
from isthmus_server.storage.run_description import FILE
from isthmus_server.storage.store import Store
from isthmus_server.strategy.policy import BEST, SERVED

if TYPE_CHECKING:
    from torch import nn

DELIVERED = "delivered"
LAST = "last"
REPORT = "report.json"
"""File with the report, in a folder that `isthmus fetch` has written."""


class HasDirectory(Protocol):
    """What is read of a run, such as an `isthmus.Run`."""

    @property
    def directory(self) -> Path:
        """The run directory."""


def load_model(
    run: HasDirectory | Path | str,
    round: str | int = DELIVERED,  # noqa: A002 - as users call it
    task: type[Task] | None = None,
) -> nn.Module:
    """The task's model with the weights of a run, on the CPU and in evaluation mode.

    Args:
        run: the run, its directory, or the folder that `isthmus fetch` has written.
        round: `delivered`, the model that a finished run has written; `last`, that of the last
            committed round; `best` by `evaluation.keep_best`; or the number of such a round.
        task: the task, in place of the job's `task.source`. For a fetched model that is relative
            to the current folder.

    Raises:
        UserError: the run has no such model, its file is not the one that the run recorded, or its
            task cannot be loaded.
    """
    directory = Path(run) if isinstance(run, Path | str) else run.directory
    if (directory / REPORT).is_file() and not (directory / FILE).exists():
        return _fetched_model(directory, round, task)
    with contextlib.closing(Store.open(directory)) as store:
        made = task_of(store) if task is None else task.at(store.base, store.job.task.settings)
        return _loaded(made, store.job, store.base, lambda size: _payload(store, round, size))


def _fetched_model(folder: Path, round_: str | int, task: type[Task] | None) -> nn.Module:
    """The model of a folder of `isthmus fetch`, which has a report and the delivered model only."""
    try:
        report = json.loads((folder / REPORT).read_bytes())
        job = read_job(json.dumps(report["job"]))
        final = report["final"]
        digest = final["model_sha256"]
        delivered = (DELIVERED, final["round"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / REPORT} is not the report of a finished job: {error}") from None
    if round_ not in delivered:
        raise UserError(
            f"{folder} was fetched and has no model of round {round_!r}; it has {DELIVERED}"
        )
    path = folder / FINAL_MODEL
    if not path.is_file():
        raise UserError(f"{folder} has a report and no {FINAL_MODEL}; fetch the job again")

    def payload(size: int) -> bytearray:
        with path.open("rb") as file:
            found = bytearray(file.read(size + 1))
        if hashlib.sha256(found).hexdigest() != digest:
            raise UserError(f"{path} is not the model of {folder / REPORT}; fetch the job again")
        return found

    if task is None:
        table = job.task
        made = load_task(table.source, table.settings, base=Path(), data=table.data_in(Path()))
    else:
        made = task(job.task.settings)
    return _loaded(made, job, Path(), payload)


def _loaded(task: Task, job: Job, base: Path, read: Callable[[int], bytearray]) -> nn.Module:
    """The task's model with the weights of an encoded model, which `read` reads by its size.

    What was not exchanged has the values of the start, which is only read for them.
    """
    from isthmus.task.scoring import build_model
    from isthmus.task.scoring.building import fill_from_start, is_all_exchanged
    from isthmus.tensors.division import divide

    module = build_model(task, job.seed)
    division = divide(module, job.exchange)
    if not is_all_exchanged(module, division):
        fill_from_start(module, task, job, base)
    layout = division.exchanged
    layout.scatter(layout.decode(read(layout.nbytes)), module)
    return module.eval()


def task_of(store: Store) -> Task:
    """The task of a run, loaded on this machine.

    Raises:
        TaskError: it cannot be loaded.
    """
    table = store.job.task
    data = table.data_in(store.base)
    return load_task(table.source, table.settings, base=store.base, data=data)


def _payload(store: Store, round_: str | int, size: int) -> bytearray:
    """The encoded model."""
    state, (_, _, final) = store.run_state(), store.status()
    if final is not None and round_ in (DELIVERED, final.round):
        return store.checkpoints.read_file(store.directory / FINAL_MODEL, final.model_sha256, size)
    names: dict[Any, str] = {LAST: SERVED, state.round: SERVED, BEST: BEST}
    if BEST in state.models and state.models[BEST] == state.models.get(SERVED):
        names[BEST] = SERVED
    saved = None if state.model_in_datacenter else state.models.get(names.get(round_, ""))
    if saved is None:
        kept = [DELIVERED] if final is not None else []
        kept += [] if state.model_in_datacenter or not state.models else [LAST]
        kept += [BEST] if BEST in state.models else []
        raise UserError(
            f"{store.directory} has no model of round {round_!r}; it has "
            f"{', '.join(kept) or 'none yet'} (evaluation.keep_best keeps the best one)"
        )
    payload = bytearray(size)
    store.checkpoints.read_model(saved, payload)
    return payload
