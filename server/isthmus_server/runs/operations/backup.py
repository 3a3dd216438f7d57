"""Back up the state directory of a server or an authority, also while it runs."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from isthmus.errors import UserError
from isthmus.system.private_files import make_private_directory, write_private_file
from isthmus_privacy.dp.ledger import Ledger, LedgerHead
from isthmus_server.budgets.populations import RESTORED
from isthmus_server.fleet import presence, registry_file
from isthmus_server.runs.jobs import queue
from isthmus_server.runs.operations.databases import copy_database
from isthmus_server.runs.operations.manifest import (
    CopyManifest,
    copy_private,
    drafted,
    refuse_existing,
    write_manifest,
)
from isthmus_server.runs.operations.run_copies import copy_ledger, copy_run, copy_tree
from isthmus_server.storage.fence import STANDBY

JOBS = "jobs.sqlite"
AUDIT = ("audit.log", "audit.head")
PRIVACY = "privacy"
_COPIES = ("registry.copy", "registry.head")
"""Copies of a separate authority's registry, which are not backed up: an older one could lack a
revocation, and the server copies it again."""


def back_up(state: Path, target: Path) -> CopyManifest:
    """Copy a state directory into a new directory, which is complete when it has its manifest.

    Databases are copied with SQLite's online backup, and runs as of one commit each.

    Raises:
        UserError: there is no server or authority, a file is damaged, or the target is not empty or
            inside the state directory.
    """
    if not (state / "authority.pem").exists():
        raise UserError(f"{state} is the state directory of no server and no authority")
    refuse_existing(target)
    if target.resolve().is_relative_to(state.resolve()):
        raise UserError(f"{target} is inside {state}: later backups would contain it; give another")
    with drafted(target) as draft:
        make_private_directory(draft)
        _copy(state, draft)
        return write_manifest(draft, "server")


def _copy(state: Path, draft: Path) -> None:
    runs = state / "runs"
    # Listed before the queue is copied: the job of every run here is in the copy of the queue.
    listed = sorted(runs.iterdir()) if runs.is_dir() else []
    with _audit_log_held(state):
        if (state / registry_file.NAME).exists():
            copy_database(
                state / registry_file.NAME, draft / registry_file.NAME, registry_file.SCHEMA
            )
        for name in AUDIT:
            if (state / name).exists():
                copy_private(state / name, draft / name)
    if (state / JOBS).exists():
        copy_database(state / JOBS, draft / JOBS, queue.SCHEMA)
    apart = {registry_file.NAME, JOBS, *AUDIT, *_COPIES, "lock", "runs", PRIVACY}
    apart |= {presence.FILE, STANDBY}  # about the processes of now
    for path in state.iterdir():
        if path.name in apart or path.name.startswith(".") or ".sqlite-" in path.name:
            continue
        if path.name not in ("fleet.head", "jobs.head"):
            copy_tree(path, draft / path.name)
    if listed:
        make_private_directory(draft / "runs")
    for run in listed:
        if (run / "job.json").exists():  # one that has begun
            copy_run(run, draft / "runs" / run.name, with_key=True)
    if (state / PRIVACY).is_dir():
        make_private_directory(draft / PRIVACY)
        for ledger in sorted((state / PRIVACY).glob("*.ledger")):
            head_file = ledger.with_suffix(".head")
            known = LedgerHead.of(head_file.read_text()) if head_file.exists() else None
            head = copy_ledger(ledger, draft / PRIVACY / ledger.name, known)
            write_private_file(draft / PRIVACY / head_file.name, str(head).encode())
        if (state / PRIVACY / RESTORED).exists():
            copy_private(state / PRIVACY / RESTORED, draft / PRIVACY / RESTORED)


@contextlib.contextmanager
def _audit_log_held(state: Path) -> Iterator[None]:
    """Let nobody write to the audit log during the block."""
    path = state / AUDIT[0]
    if not path.exists():
        yield
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def ledger_heads(directory: Path) -> dict[str, LedgerHead]:
    """The last line of each population's ledger in a state directory, by population.

    Raises:
        LedgerDamaged: one is not the one that was written.
    """
    return {
        path.stem: Ledger.read(path).head for path in sorted((directory / PRIVACY).glob("*.ledger"))
    }
