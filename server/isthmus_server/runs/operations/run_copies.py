"""Copy a run as of one commit, also while a server runs it, and end a copy that is older."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from isthmus.errors import DamagedError, UserError
from isthmus.system.private_files import make_private_directory, write_private_file
from isthmus_privacy.dp.ledger import HEAD_FILE, LEDGER_FILE, Ledger, LedgerHead
from isthmus_server.runs.operations.databases import copy_database
from isthmus_server.runs.operations.manifest import copy_private
from isthmus_server.storage.damage_checks import FINAL_MODEL
from isthmus_server.storage.run_description import FILE as DESCRIPTION
from isthmus_server.storage.schema import SCHEMA
from isthmus_server.storage.store import Store

_TRIES = 10
_NOT_COPIED = {"checkpoints", "datacenter", "devices", "lock", "logs", "run.head", "run.sqlite"}
"""Copied in another way, or of no use elsewhere."""


def copy_run(source: Path, target: Path) -> int:
    """Copy a run, with the checkpoints of its last commit; returns the last committed round.

    Not the output of its processes, nor what devices and ranks on this machine keep.

    Raises:
        UserError: there is no run, it is damaged, or it commits faster than it can be copied.
    """
    for _ in range(_TRIES):
        make_private_directory(target)
        try:
            return _copy(source, target)
        except _Changed:  # a commit has replaced the checkpoints meanwhile
            shutil.rmtree(target)
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise
    raise UserError(f"{source} commits rounds faster than it can be copied; try it again later")


class _Changed(Exception):
    """The run has gone on, so the copy is begun anew."""


def _copy(source: Path, target: Path) -> int:
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
    for path in source.iterdir():
        name = path.name
        if name in _NOT_COPIED | {DESCRIPTION, LEDGER_FILE, HEAD_FILE} or name.startswith(
            ("run.sqlite-", "dropped-", ".")
        ):
            continue
        copy_tree(path, target / name)
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
    with contextlib.closing(Store.open_to_continue(directory)) as store, store.locked():
        if store.status()[0] in ("finished", "cancelled"):
            return False
        store.finish("cancelled", reason, None)
        return True
