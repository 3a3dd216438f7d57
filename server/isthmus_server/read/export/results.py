"""What an operator fetches of a job: the final model and the report, as files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import tempfile
from io import BufferedRandom, BufferedReader
from pathlib import Path

from isthmus.errors import AdmissionRefused, DamagedError
from isthmus_server.read.report.report import read_report
from isthmus_server.storage.damage_checks import FINAL_MODEL
from isthmus_server.storage.sealed_database import database_error
from isthmus_server.storage.store import Store

PART_BYTES = 512 << 10
"""Bytes in one message."""


class JobResult:
    """An open file that is sent, with its size and digest."""

    def __init__(self, file: BufferedReader | BufferedRandom) -> None:
        """Read the file once for its digest."""
        self.file = file
        file.seek(0)
        self.sha256 = hashlib.file_digest(file, "sha256").digest()
        self.size = os.fstat(file.fileno()).st_size
        file.seek(0)

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def open_result(directory: Path, what: str) -> JobResult:
    """Open a result of the job whose run is in a directory.

    Args:
        directory: of the run.
        what: `model` or `report`.

    Raises:
        AdmissionRefused: there is no such result, or not yet.
        DamagedError: the run, or its final model, is damaged.
    """
    if what not in ("model", "report"):
        raise AdmissionRefused(f"a job has a model and a report, and no {what!r}")
    if not (directory / "job.json").exists():
        raise AdmissionRefused(f"{directory.name} has not begun; see `isthmus jobs`")
    with contextlib.closing(Store.open(directory)) as store:
        try:
            if what == "report":
                # The report of a long run is large: a file, not memory.
                file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by the caller
                file.write(json.dumps(read_report(store).to_json(), indent=1).encode() + b"\n")
                file.flush()
                return JobResult(file)
            _, _, final = store.status()
        except sqlite3.Error as error:
            raise database_error(directory / "run.sqlite", error) from error
    if final is None:
        raise AdmissionRefused(
            f"{directory.name} has no final model yet; `isthmus logs -f {directory.name}` waits"
        )
    result = JobResult((directory / FINAL_MODEL).open("rb"))
    if result.sha256.hex() != final.model_sha256:
        result.close()
        raise DamagedError(
            f"the final model of {directory.name} is not the one that was written; see `isthmus "
            "runs verify` on the server's machine"
        )
    return result
