"""List the runs of a folder, and delete those that a retention policy does not keep."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import secrets
import shutil
import sqlite3
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from isthmus.errors import IsthmusError, UserError
from isthmus.system.private_files import make_private_directory, write_private_file
from isthmus_privacy.dp.ledger import HEAD_FILE, LEDGER_FILE, LedgerDamaged, last_known
from isthmus_server.budgets.charged_runs import PRUNED, absent_from, charged_run
from isthmus_server.budgets.populations import of_server_of
from isthmus_server.runs.operations.run_copies import copy_ledger
from isthmus_server.storage import audit
from isthmus_server.storage.run_description import alone_in
from isthmus_server.storage.store import Store


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListedRun:
    """A run of a folder."""

    name: str
    """Name of the run's directory."""
    job: str = ""
    """The name in the job."""
    state: str = "damaged"
    """running, paused, failed, finished, cancelled, or damaged."""
    rounds: int = 0
    """Committed rounds."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Metrics of the delivered model, once the run has finished."""
    modes: Mapping[str, Literal["max", "min"]] = dataclasses.field(default_factory=dict)
    """Whether higher or lower values are better, of the metric that the job follows."""
    changed: float = 0.0
    """When its log was written last, Unix seconds."""
    bytes: int = 0
    problem: str = ""
    """Why it cannot be read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    """Which ended runs are kept: all for which one of these says so."""

    keep_last: int = 0
    """The newest runs of each job."""
    older_than: float = 0.0
    """Seconds; younger runs are kept."""
    keep_best: str = ""
    """A metric: the best run of each job is kept."""
    mode: Literal["", "max", "min"] = ""
    """Whether higher or lower values of it are better. Empty: as the runs' jobs say, which follow
    this metric; without one, lower if its name ends with loss."""
    failed: bool = False
    """Failed runs may go, although they could be resumed."""


def list_runs(folder: Path) -> list[ListedRun]:
    """The runs in a folder, newest first.

    Raises:
        UserError: there is no such folder.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder of runs {folder}; give one, such as fleet/runs")
    runs = [
        _listed(path)
        for path in folder.iterdir()
        if not path.name.startswith(".") and (path / "run.sqlite").exists()
    ]
    return sorted(runs, key=lambda run: (-run.changed, run.name))


def _listed(path: Path) -> ListedRun:
    size = sum(map(_size, path.rglob("*")))
    head = path / "run.head"  # to read the log may touch the files of SQLite
    changed = head.stat().st_mtime if head.exists() else 0.0
    run = ListedRun(name=path.name, changed=changed, bytes=size)
    try:
        with contextlib.closing(Store.open(path)) as store:
            state, _, final = store.status()
            best = store.job.evaluation.keep_best
            return dataclasses.replace(
                run,
                job=store.job.name,
                state=state,
                rounds=store.last_round(),
                metrics={} if final is None else dict(final.metrics),
                modes={} if best is None else {best.name: best.mode},
            )
    except (IsthmusError, OSError, sqlite3.Error) as error:
        return dataclasses.replace(run, problem=str(error))


def _size(path: Path) -> int:
    """Bytes of a file; none of a link, or of one that a running run has just removed."""
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        return status.st_size if stat.S_ISREG(status.st_mode) else 0
    return 0


def to_prune(
    runs: Sequence[ListedRun], policy: RetentionPolicy, now: float
) -> list[tuple[ListedRun, str]]:
    """The runs with why each is kept; an empty text for those that go.

    Args:
        runs: newest first.
        policy: what is kept.
        now: Unix seconds.
    """
    seen: dict[str, int] = {}
    best: dict[str, ListedRun] = {}
    for run in runs:
        value = run.metrics.get(policy.keep_best)
        if value is not None and not math.isnan(value):
            sign = -1.0 if _mode(run, policy) == "min" else 1.0
            known = best.get(run.job)
            if known is None or sign * value > sign * known.metrics[policy.keep_best]:
                best[run.job] = run
    decided = []
    for run in runs:
        why = ""
        seen[run.job] = seen.get(run.job, 0) + 1
        if run.problem:
            why = "it is damaged: isthmus runs verify"
        elif run.state not in ("finished", "cancelled") and not (
            policy.failed and run.state == "failed"
        ):
            why = f"it is {run.state} and can go on"
        elif seen[run.job] <= policy.keep_last:
            why = f"it is among the last {policy.keep_last} of its job"
        elif now - run.changed < policy.older_than:
            why = "it is not old enough"
        elif best.get(run.job) == run:
            why = f"it has the best {policy.keep_best} of its job"
        decided.append((run, why))
    return decided


def _mode(run: ListedRun, policy: RetentionPolicy) -> Literal["max", "min"]:
    """Whether higher or lower values of the metric of a policy are better."""
    if policy.mode:
        return policy.mode
    usual: Literal["max", "min"] = "min" if policy.keep_best.endswith("loss") else "max"
    return run.modes.get(policy.keep_best, usual)


def prune(folder: Path, policy: RetentionPolicy, *, dry_run: bool) -> list[tuple[ListedRun, str]]:
    """Delete the runs that a policy does not keep; returns all, with why each is kept.

    The ledgers of a server's populations are elsewhere and stay, and so do those of its runs: they
    show whether that of a population is an older copy. A run is kept if its ledger has a charge
    that those of the server's populations do not have.

    Raises:
        UserError: there is no such folder, or no finished run has the metric of the policy.
    """
    decided = []
    # "." has no name by which the runs of a server are known.
    folder = folder.resolve() if folder.is_dir() else folder
    listed = list_runs(folder)
    known = sorted({name for run in listed for name in run.metrics})
    if policy.keep_best and known and policy.keep_best not in known:
        raise UserError(
            f"--keep-best {policy.keep_best!r}: no run in {folder} has this metric; they have "
            f"{', '.join(known)}"
        )
    if not dry_run:
        for path in folder.glob(".*.pruned"):  # left by one that was killed while it deleted
            shutil.rmtree(path, ignore_errors=True)
    for run, why in to_prune(listed, policy, time.time()):
        path = folder / run.name
        kept = why
        if not kept and path.is_symlink():
            kept = "it is a link; prune the folder that it leads to"
        if not kept:
            kept = _why_its_ledger_is_needed(path)
        if not kept and not dry_run:
            kept = _delete(path)
        decided.append((run, kept))
    return decided


def _why_its_ledger_is_needed(path: Path) -> str:
    """Why a run must stay for the sake of what it has charged; empty if others have it all.

    A directory `privacy` next to the folder is not enough: it may be that of other runs.
    """
    only = "its privacy ledger is the only record of what devices were asked"
    try:
        run = charged_run(path)
        if run is None:
            return ""
        populations = of_server_of(path)
        for name in {entry.charge.population for entry in run.ledger.entries.values()}:
            if populations is None or not populations.has(name):
                return only
            absent = absent_from(populations.read(name), run.charges_of(name))
            if absent.lost or absent.unasked:
                return only
    except LedgerDamaged as error:
        return str(error)
    return ""


def _delete(path: Path) -> str:
    """Delete a run; returns why not, if another process has it open."""
    gone = path.with_name(f".{path.name}.pruned")
    try:
        with alone_in(path):
            if (path / LEDGER_FILE).exists():
                _keep_ledger(path)
            shutil.rmtree(gone, ignore_errors=True)
            path.rename(gone)  # at once: half a run would be a damaged one
    except LedgerDamaged as error:
        return str(error)
    except UserError:
        return "another process has it open"
    shutil.rmtree(gone)
    state = path.parent.parent
    if path.parent.name == "runs" and (state / "audit.log").exists():
        audit.record(state, "prune", by=audit.local_user(), run=path.name)
    return ""


def _keep_ledger(run: Path) -> None:
    """Copy the ledger of a run of a server that is about to be deleted.

    Raises:
        LedgerDamaged: it is not the one that was written.
    """
    kept = run.parent.parent / PRUNED
    make_private_directory(kept)
    # The name of a run may be used again, as in a state directory that was restored.
    folder = kept / f"{run.name}-{secrets.token_hex(4)}"
    make_private_directory(folder)
    try:
        head = copy_ledger(run / LEDGER_FILE, folder / LEDGER_FILE, last_known(run, ""))
    except BaseException:
        shutil.rmtree(folder)
        raise
    write_private_file(folder / HEAD_FILE, str(head).encode())
