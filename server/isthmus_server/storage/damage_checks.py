"""Checks of what a run continues from."""

from __future__ import annotations

import shlex
from pathlib import Path

from isthmus.errors import DamagedError
from isthmus_server.storage.checkpoints import Checkpoints
from isthmus_server.storage.records import FinalModel
from isthmus_server.storage.run_description import RunDescription, logged_description
from isthmus_server.storage.sealed_database import SealedDatabase

FINAL_MODEL = "model.safetensors"


def check_final_model(
    directory: Path, checkpoints: Checkpoints, status: str, final: FinalModel | None
) -> None:
    """Check the model of a finished run.

    Args:
        directory: of the run.
        checkpoints: of the run.
        status: of the run, by its log.
        final: the model that the log describes; None for a run that delivers none.

    Raises:
        DamagedError: it is missing, or not the one that was written.
    """
    if status == "finished" and final is not None:
        checkpoints.check_file(directory / FINAL_MODEL, final.model_sha256)


def check_description(directory: Path, log: SealedDatabase) -> None:
    """Check that `job.json` is as it was when the run began.

    Raises:
        DamagedError: it was changed, or the log describes no run.
    """
    RunDescription.read(directory).check_unchanged(directory, logged_description(log))


def check_no_newer_checkpoint(directory: Path, checkpoints: Checkpoints, last_round: int) -> None:
    """Check that the log is not older than the checkpoints.

    Args:
        directory: of the run.
        checkpoints: of the run.
        last_round: the last round that the log has as committed; 0 if none.

    Raises:
        DamagedError: it is: there is a checkpoint that only a later commit can have led to.
    """
    newest = checkpoints.newest_round()
    if newest > last_round + 1:
        raise DamagedError(
            f"run.sqlite ends with round {last_round}, but there is a checkpoint of round {newest}:"
            " the log is older than its checkpoints; restore the log that belongs to them, or go "
            f"back with `isthmus runs rollback {shlex.quote(str(directory))}`"
        )
