"""Restore a backup, without forgetting what devices were asked since it was made.

A backup is older than the server that was lost. What happened in between and must not be undone:
revocations, uses of tokens, charges of the privacy ledgers, and shares that devices have revealed
for a sum. Where it is not known, the restored server refuses what would depend on it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

from isthmus.errors import IsthmusError, UserError
from isthmus.system.clocks import utc
from isthmus.system.private_files import make_private_directory, write_private_file
from isthmus_privacy.dp.ledger import Ledger, LedgerHead
from isthmus_server.budgets.charged_runs import charged_runs, refuse_older
from isthmus_server.budgets.populations import folders_of_runs, mark_restored
from isthmus_server.fleet import registry_file
from isthmus_server.fleet.registry import Registry
from isthmus_server.runs.jobs.queue import JobQueue
from isthmus_server.runs.operations.backup import AUDIT, JOBS, PRIVACY, ledger_heads
from isthmus_server.runs.operations.manifest import (
    CopyManifest,
    checked_manifest,
    copy_listed,
    drafted,
    refuse_existing,
)
from isthmus_server.runs.operations.run_copies import close_run
from isthmus_server.storage import audit
from isthmus_server.storage.fence import move_on
from isthmus_server.storage.run_place import record_place
from isthmus_server.storage.store import Store


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a restore has done."""

    manifest: CopyManifest
    newer: list[str]
    """What the lost directory had that the backup has not, in words."""
    closed: list[str]
    """Runs that were cancelled, because they may have gone on after the backup."""
    populations: list[str]
    """Populations of which nobody is asked, because later charges are not known."""
    revocations_known: bool
    """Whether the audit log of the lost directory was used, which has all revocations."""


def restore(
    backup: Path, target: Path, *, lost: Path | None = None, nothing_ran_since: bool = False
) -> Restored:
    """Make a state directory of a backup.

    Args:
        backup: made by `back_up`.
        target: a new directory.
        lost: what is left of the directory that was lost: its audit log and privacy ledgers are
            used where they are intact and continue those of the backup.
        nothing_ran_since: the server was stopped before the backup and never started again, as
            when it moves to another machine; nothing is marked then.

    Raises:
        DamagedError: the backup is damaged.
        UserError: it is no backup, the target is not empty, or `lost` has nothing to use.
    """
    manifest = checked_manifest(backup, "server")
    refuse_existing(target)
    if lost is not None and not (lost / AUDIT[0]).exists() and not (lost / PRIVACY).is_dir():
        raise UserError(f"--lost {lost} has no audit log and no privacy ledgers; leave it out")
    with drafted(target) as draft:
        make_private_directory(draft)
        copy_listed(manifest, backup, draft)
        restoring = _Restoring(draft, manifest, lost)
        if nothing_ran_since:
            restoring.refuse_if_it_ran()
            restoring.keep_runs(target)
        else:
            restoring.take_over()
            restoring.close()
        move_on(draft)
        details = {"backup": utc(manifest.made_at)}
        if nothing_ran_since:
            details["stated"] = "nothing ran since"
        audit.record(draft, "restore", by=audit.local_user(), **details)
    return Restored(
        manifest,
        restoring.newer,
        restoring.closed,
        restoring.populations,
        restoring.revocations_known,
    )


class _Restoring:
    """A copy of a backup that is made safe to start."""

    def __init__(self, draft: Path, manifest: CopyManifest, lost: Path | None) -> None:
        self.draft = draft
        self.lost = lost
        self.newer: list[str] = []
        self.closed: list[str] = []
        self.populations: list[str] = []
        self.revocations_known = False
        self._current: list[str] = []
        self._when = utc(manifest.made_at)

    def refuse_if_it_ran(self) -> None:
        """Compare with the lost directory, if there is one.

        Raises:
            UserError: it has something newer.
        """
        if self.lost is not None and (found := [*self._newer_runs(), *self._newer_records()]):
            raise UserError(
                f"{self.lost} is newer than the backup: {'; '.join(found)}; restore without "
                "--nothing-ran-since"
            )

    def keep_runs(self, target: Path) -> None:
        """Have the runs continued in `target`: nobody continues them where they came from."""
        for path in _runs_in(self.draft):
            record_place(path, target / path.relative_to(self.draft))

    def take_over(self) -> None:
        """Use what the lost directory has that continues the backup."""
        if self.lost is None:
            return
        self.newer += [*self._newer_runs(), *self._newer_records()]
        with contextlib.suppress(IsthmusError, OSError):
            ours = audit.read(self.draft)
            theirs = audit.read(self.lost)
            if [entry.digest for entry in theirs[: len(ours)]] == [each.digest for each in ours]:
                found = {name: (self.lost / name).read_bytes() for name in AUDIT}
                for name, data in found.items():
                    write_private_file(self.draft / name, data)
                self.revocations_known = True
        for path in sorted((self.lost / PRIVACY).glob("*.ledger")):
            own = self.draft / PRIVACY / path.name
            head_file = path.with_suffix(".head")
            with contextlib.suppress(IsthmusError, OSError):
                known = LedgerHead.of(head_file.read_text())
                if known is None:
                    continue
                ledger = Ledger.read(path, known)
                head = ledger.head
                # It may have been older than its own runs before it was lost.
                there = charged_runs(folders_of_runs(self.lost))
                refuse_older(path, ledger, path.stem, there)
                if own.exists():
                    Ledger.read(path, Ledger.read(own).head)  # it continues the one of the backup
                make_private_directory(own.parent)
                write_private_file(own, path.read_bytes())
                write_private_file(own.with_suffix(".head"), str(head).encode())
                self._current.append(path.stem)

    def _newer_runs(self) -> Iterator[str]:
        """Runs of the lost directory that have more rounds than their copies."""
        assert self.lost is not None
        for path in sorted((self.lost / "runs").glob("*")):
            with contextlib.suppress(IsthmusError, OSError):
                there = _last_round(path)
                here = _last_round(self.draft / "runs" / path.name)
                if there > here:
                    yield f"{path.name} had committed round {there}, in the backup {here}"

    def _newer_records(self) -> Iterator[str]:
        assert self.lost is not None
        with contextlib.suppress(IsthmusError, OSError):
            more = len(audit.read(self.lost)) - len(audit.read(self.draft))
            if more > 0:
                yield f"the audit log had {more} more records"
        with contextlib.suppress(IsthmusError, OSError):
            here = ledger_heads(self.draft)
            for name, head in ledger_heads(self.lost).items():
                before = here[name].number if name in here else 0
                if head.number > before:
                    yield f"the ledger of {name!r} had {head.number - before} more lines"

    def close(self) -> None:
        """Mark what may have gone on after the backup, so that nothing depends on it."""
        reason = (
            f"restored from a backup of {self._when}: what its participants were asked since then "
            "is not known; submit the job again"
        )
        for path in _runs_in(self.draft):
            if close_run(path, reason):
                self.closed.append(path.name)
        if (self.draft / JOBS).exists():
            with contextlib.closing(JobQueue(self.draft)) as queue:
                for entry in queue.entries(0):
                    # A queued one may have begun since then, too: it would get the name of the run.
                    queue.mark(entry, "cancelled", reason)
                    if entry.id not in self.closed:
                        self.closed.append(entry.id)
        self.populations = [name for name in ledger_heads(self.draft) if name not in self._current]
        if not (self.draft / "serves").exists():  # an authority runs no jobs
            mark_restored(self.draft / PRIVACY, time.time(), self._current)
        if (self.draft / registry_file.NAME).exists():
            identities, _ = audit.revoked(audit.read(self.draft))
            with contextlib.closing(Registry(self.draft)) as registry:
                registry.end_tokens()
                for known in registry.participants():
                    if known.revoked is None and known.identity.hex() in identities:
                        registry.revoke(known.name)


def _runs_in(state: Path) -> list[Path]:
    runs = state / "runs"
    return sorted(runs.iterdir()) if runs.is_dir() else []


def _last_round(run: Path) -> int:
    if not run.is_dir():
        return 0
    with contextlib.closing(Store.open(run)) as store:
        return store.last_round()
