"""Checks of what a run continues from."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from isthmus.errors import DamagedError
from isthmus_server.storage.run_description import RunDescription, logged_description

if TYPE_CHECKING:
    from isthmus_server.storage.store import Store

FINAL_MODEL = "model.safetensors"


def check_run(store: Store) -> None:
    """Check what a run continues from, except the checkpoints, which are checked when read.

    Raises:
        DamagedError: with the first damage.
        sqlite3.Error: the log cannot be read for another reason.
    """
    store.log.check()
    check_description(store)
    check_no_newer_checkpoint(store)
    check_final_model(store)


def check_final_model(store: Store) -> None:
    """Check the model of a finished run.

    Raises:
        DamagedError: it is missing, or not the one that was written.
    """
    status, _, final = store.status()
    if status == "finished" and final is not None:
        store.checkpoints.check_file(store.directory / FINAL_MODEL, final.model_sha256)


def check_description(store: Store) -> None:
    """Check that `job.json` is as it was when the run began.

    Raises:
        DamagedError: it was changed, or the log describes no run.
    """
    found = RunDescription.read(store.directory)
    found.check_unchanged(store.directory, logged_description(store.log))


def check_no_newer_checkpoint(store: Store) -> None:
    """Check that the log is not older than the checkpoints.

    Raises:
        DamagedError: it is: there is a checkpoint that only a later commit can have led to.
    """
    last = store.last_round()
    newest = store.checkpoints.newest_round()
    if newest > last + 1:
        raise DamagedError(
            f"run.sqlite ends with round {last}, but there is a checkpoint of round {newest}: the "
            "log is older than its checkpoints; restore the log that belongs to them, or go back "
            f"with `isthmus runs rollback {shlex.quote(str(store.directory))}`"
        )
