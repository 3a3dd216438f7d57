"""Have a copy of a run take the place of the original, which an operator states to be gone."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

from isthmus.errors import UserError
from isthmus_server.storage import audit
from isthmus_server.storage.events import RunAdopted
from isthmus_server.storage.run_description import errors_named, resume_command
from isthmus_server.storage.run_place import branch_command, original_of, record_place
from isthmus_server.storage.store import Store


@dataclasses.dataclass(frozen=True)
class Adopted:
    """What has become of a copy."""

    run_id: str
    round: int
    """After which it goes on."""
    original: str
    """What must not be continued any more: a directory, in words if it is that of the copy."""
    consequence: str
    """What it means if the statement is not true."""


def adopt(directory: Path, *, nothing_ran_since: bool) -> Adopted:
    """Make a copy the run: it may be continued from now on. The statement is in the run's log.

    It is in the audit log as well if the directory is one of a server's runs.

    Args:
        directory: the copy.
        nothing_ran_since: it is stated that the original asked no device after the copy was made.
            A run with noise needs it: what a copy does not know was neither charged in its ledger,
            nor is its noise used up.

    Raises:
        UserError: it is no copy, has ended or is damaged, another process runs it, or the statement
            is needed and was not made.
    """
    with contextlib.closing(Store.open_to_write(directory)) as store, store.locked():
        with errors_named(directory):
            original = _original(store)
        if store.is_private and not nothing_ran_since:
            raise UserError(
                f"{directory} is of a run with privacy, and may be older than what devices have "
                "answered: state --nothing-ran-since if the original asked no device after this "
                f"copy was made, or make a new run with `{branch_command(directory)}`"
            )
        stated = ["original is gone", *["nothing ran since"] * nothing_ran_since]
        by = audit.local_user()
        # The statement first: a crash in between leaves one that has no effect, and not an effect
        # that nobody has stated.
        event = RunAdopted(original=original, by=by, stated=", ".join(stated))
        store.log_event(event)
        if event not in store.events():  # a full disk is no error of other events
            raise UserError(f"the log of {directory} cannot be written, so nothing was changed")
        state = directory.resolve().parent.parent
        if directory.resolve().parent.name == "runs" and (state / "audit.log").exists():
            audit.record(state, "adopt", by=by, run=directory.name, stated=", ".join(stated))
        with errors_named(directory):
            record_place(directory)
        elsewhere = Path(original) != directory.resolve()
        original = original if elsewhere else "what was here before, or another copy of it,"
        return Adopted(store.run_id, store.last_round(), original, _consequence(store))


def _original(store: Store) -> str:
    directory = store.directory
    status, reason, _ = store.status()
    if status == "finished":
        raise UserError(f"{directory} has finished: there is nothing to continue")
    if status == "cancelled":
        raise UserError(
            f"{directory} is cancelled ({reason}), and nothing continues it; make a new run of it "
            f"with `{branch_command(directory)}`"
        )
    with contextlib.suppress(FileNotFoundError):
        if (original := original_of(directory)) is not None:
            return original
    raise UserError(f"{directory} is no copy; continue it with `{resume_command(directory)}`")


def _consequence(store: Store) -> str:
    privacy = store.job.privacy
    if privacy is not None and privacy.mechanism == "correlated":
        return (
            "if it is continued too, or asked devices after this copy was made, the same noise is "
            "in two models, whose difference has none"
        )
    if store.is_private:
        return (
            "if it is continued too, or asked devices after this copy was made, each ledger leaves "
            "out what the other one has spent"
        )
    return "if it is continued too, devices are asked twice for a round, and two models go on"
