"""Copy a run as of one commit, also while a server runs it; end a copy, or branch from it."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections import Counter
from pathlib import Path

from isthmus.errors import DamagedError, UserError
from isthmus.system.private_files import make_private_directory, write_private_file
from isthmus_privacy.dp.ledger import HEAD_FILE, LEDGER_FILE, Ledger, LedgerHead
from isthmus_server.budgets.populations import SHARED, Populations, shared_by, shared_with
from isthmus_server.budgets.server_noise import KEY_FILE
from isthmus_server.runs.operations.databases import copy_database
from isthmus_server.runs.operations.manifest import copy_private
from isthmus_server.storage import signed_sums
from isthmus_server.storage.damage_checks import FINAL_MODEL
from isthmus_server.storage.run_description import FILE as DESCRIPTION
from isthmus_server.storage.run_description import RunDescription, new_run_id
from isthmus_server.storage.run_place import (
    original_of,
    record_copy,
    record_place,
    shared_by_original,
)
from isthmus_server.storage.schema import SCHEMA
from isthmus_server.storage.store import Store

_TRIES = 10
_NOT_COPIED = {"checkpoints", "datacenter", "devices", "lock", "logs", "run.head", "run.sqlite"}
"""Copied in another way, or of no use elsewhere."""


def copy_run(source: Path, target: Path, *, with_key: bool) -> int:
    """Copy a run, with the checkpoints of its last commit; returns the last committed round.

    Not the output of its processes, nor what devices and ranks on this machine keep.

    Args:
        source: directory of the run.
        target: the new directory, which is marked as a copy.
        with_key: also the key of its noise, with which the copy can be continued where the run is
            lost. Who has it can subtract the noise.

    Raises:
        UserError: there is no run, it is damaged, or it commits faster than it can be copied.
    """
    for _ in range(_TRIES):
        make_private_directory(target)
        try:
            last = _copy(source, target, set() if with_key else {KEY_FILE})
            record_copy(target, _original(source), _shared(source))
            return last
        except _Changed:  # a commit has replaced the checkpoints meanwhile
            shutil.rmtree(target)
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise
    raise UserError(f"{source} commits rounds faster than it can be copied; try it again later")


class _Changed(Exception):
    """The run has gone on, so the copy is begun anew."""


def _shared(source: Path) -> set[str]:
    """The populations whose budget a run, or that of which it is a copy, shares with others."""
    found = {name for name in _populations(source) if _where_shared(source, name)}
    return found | set(shared_by_original(source)) | set(shared_by(source))


def _populations(run: Path) -> list[str]:
    """Populations whose data a run's job protects."""
    job = RunDescription.read(run).job
    sections = (job.privacy, job.datacenter.privacy)
    return sorted({section.population for section in sections if section is not None})


def _where_shared(source: Path, population: str) -> list[Populations]:
    """Ledgers of a population in which a run, or its original, is charged."""
    found = (shared_with(run, population) for run in (source, Path(_original(source))))
    return list({each.directory: each for each in found if each is not None}.values())


def _original(source: Path) -> str:
    """Where the run of a directory is continued: a copy of a copy is one of the original."""
    with contextlib.suppress(FileNotFoundError):  # of a version that recorded nothing
        return original_of(source) or str(source.resolve())
    return str(source.resolve())


def _copy(source: Path, target: Path, left_out: set[str]) -> int:
    with contextlib.closing(Store.open(source)) as store:
        before = store.last_round()
    copy_private(source / DESCRIPTION, target / DESCRIPTION)
    copy_database(source / "run.sqlite", target / "run.sqlite", SCHEMA)
    for name in ("checkpoints", "logs"):
        make_private_directory(target / name)
    with contextlib.closing(Store.open(target)) as copy:
        last = copy.last_round()
        for round_, state in copy.newest_commits():
            for saved in state.files:
                path = copy.checkpoints.directory / saved.file
                if path.exists():
                    continue
                try:
                    copy_private(source / "checkpoints" / saved.file, path)
                    copy.checkpoints.check(saved)
                except (OSError, DamagedError) as error:
                    path.unlink(missing_ok=True)
                    if round_ == last:
                        raise _changed_or(error, source, before) from error
        head = LedgerHead.of(copy.run_state().ledger_head)
        finished, _, final = copy.status()
        run_id = copy.run_id
        planned = copy.planned_attempts()
    for path in source.iterdir():
        name = path.name
        copied = {DESCRIPTION, LEDGER_FILE, HEAD_FILE}
        if name in _NOT_COPIED | copied | left_out or name.startswith(
            ("run.sqlite-", "dropped-", ".")
        ):
            continue
        copy_tree(path, target / name)
    # The run may have gone on since its log was copied.
    signed_sums.drop_unplanned(target, run_id, planned)
    if (source / LEDGER_FILE).exists():
        copy_ledger(source / LEDGER_FILE, target / LEDGER_FILE, head)
    if finished == "finished" and final is not None:
        with contextlib.closing(Store.open(target)) as copy:
            copy.checkpoints.check_file(target / FINAL_MODEL, final.model_sha256)
    return last


def _changed_or(error: Exception, source: Path, before: int) -> Exception:
    with contextlib.closing(Store.open(source)) as store:
        return _Changed() if store.last_round() != before else error


def copy_tree(source: Path, target: Path) -> None:
    """Copy a file, or a directory with its plain files; links are left out."""
    if source.is_symlink():
        return
    if source.is_dir():
        make_private_directory(target)
        for path in source.iterdir():
            copy_tree(path, target / path.name)
    elif source.is_file() and not source.name.endswith(".tmp"):
        copy_private(source, target)


def _take_shared_charges(source: Path, target: Path) -> None:
    """Add to the ledger of a branch what others have charged of the budget of its run.

    Raises:
        UserError: they are known to have charged it, and their ledger is not found.
        LedgerDamaged: it is not the one that was written.
    """
    for population in _populations(source):
        own = shared_with(target, population)
        found = _where_shared(source, population)
        if not found and own is None and population in _shared(source):
            raise UserError(
                f"{source} has a run of {_original(source)} that shares the budget of "
                f"{population!r} with other runs, and what these have spent is not known here; "
                "make the branch where their ledger is"
            )
        for shared in found:
            if own is None or own.directory != shared.directory:
                _add_charges(shared.read(population), target)
    (target / SHARED).unlink(missing_ok=True)  # its ledger has it all


def _add_charges(shared: Ledger, target: Path) -> None:
    """Add what a ledger has, and that of the run in a directory has not."""
    with Ledger.open(target / LEDGER_FILE) as own:
        known = Counter(entry.charge for entry in own.entries.values())
        for entry in shared.entries.values():
            # Charges can be equal, as of a round that was done again, so they are counted.
            known[entry.charge] -= 1
            if known[entry.charge] >= 0 or not entry.is_spent:
                continue
            number = own.reserve(entry.charge)
            if entry.outcome is not None:
                own.settle(number, entry.outcome)
        own.keep_head_in(target / HEAD_FILE)


def copy_ledger(source: Path, target: Path, known: LedgerHead | None = None) -> LedgerHead:
    """Copy the whole lines of a ledger, which may be written meanwhile; returns its head.

    Raises:
        LedgerDamaged: it is not the one that was written.
    """
    data = source.read_bytes()
    write_private_file(target, data[: data.rfind(b"\n") + 1])
    return Ledger.read(target, known).head


def close_run(directory: Path, reason: str) -> bool:
    """End a run that is an older copy, so that nothing continues it; returns whether it was open.

    Raises:
        UserError: it is damaged.
    """
    with contextlib.closing(Store.open_to_write(directory)) as store, store.locked():
        # The key of its noise, which another run has used since, or will.
        (directory / KEY_FILE).unlink(missing_ok=True)
        if store.status()[0] in ("finished", "cancelled"):
            return False
        store.finish("cancelled", reason, None)
        return True


def branch_run(source: Path, target: Path, place: Path | None = None) -> tuple[str, int]:
    """Make a new run that begins with the last committed model of another one.

    It has the log, the model and the privacy ledger of the other one, and an id of its own: devices
    and datacenters have not seen it, and the key of its noise is made when it is first used. What
    was asked for after that commit is left out of its log, and stays charged in its ledger. Its
    ledger also has what all runs have charged that share a budget with the other one, unless it
    shares it, too.

    Returns its id, and the round after which it begins.

    Args:
        source: directory of the other run.
        target: the new directory.
        place: where `target` will be renamed to; None if it stays.

    Raises:
        UserError: the run has finished, it is damaged, only a datacenter has its model, or what
            was spent of its budget is not known here.
    """
    round_ = copy_run(source, target, with_key=False)
    _take_shared_charges(source, target)
    with contextlib.closing(Store.open_to_write(target)) as store, store.locked():
        if store.status()[0] == "finished":
            raise UserError(f"{source} has finished: there is nothing to continue")
        commits = store.newest_commits()
        if commits and commits[0][1].model_in_datacenter:
            raise UserError(
                f"the model of the last round of {source} is in the datacenter "
                f"{commits[0][1].holder!r} only, where no other run can have it; go back to an "
                "earlier round of the original with `isthmus runs rollback`"
            )
        description = dataclasses.replace(store.description, run_id=new_run_id(store.job))
        store.become(description, commits[0] if commits else None)
        description.write(target)
        record_place(target, place)
    return description.run_id, round_
