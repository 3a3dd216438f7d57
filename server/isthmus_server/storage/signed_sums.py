"""The sums of updates that devices of secure rounds have signed, in a file of the run directory.

A line is a JSON object: what devices had opened the run with (`job`), whenever it is another than
before, or a sum, with the messages as devices sign them, in base64. Their signatures protect the
lines, so that the file has no chain of its own. A line is on disk before the sum is unmasked.

It has the keys of all devices of a roster, as the signatures are of its hash: about 3.8 kB for each
device and sum.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.errors import DamagedError, PeerMisbehaved
from isthmus.system.chained_log import append_line
from isthmus_privacy.purpose import BufferedPurpose, TrainingPurpose
from isthmus_server.storage.checkpoints import replacing
from isthmus_server.storage.fence import Fence, held

if TYPE_CHECKING:
    from isthmus_privacy.secagg.config import RoundConfig

FILE = "signed-sums.jsonl"
MAX_LINE = 16 << 20
"""Bytes of a line; a roster of the largest cohort takes half of them."""

_MOST_PURPOSES = 256


@dataclasses.dataclass(frozen=True)
class SignedSum:
    """What the survivors of one sum have signed, each message in its canonical bytes."""

    authority: bytes
    """Ed25519 key that has signed the certificates in the roster."""
    config: bytes
    roster: bytes
    survivors: bytes
    signatures: bytes
    purpose: bytes = b""
    """What the sum is for; empty if this process does not know it."""
    set_up: bytes = b""
    """The configuration of the sum of the same devices before, for which they have signed the keys
    in the roster; empty if they have signed them for this sum."""

    def to_json(self) -> dict[str, str]:
        """One key for each message, in base64; the authority in hexadecimal."""
        values = {name: base64.b64encode(data).decode() for name, data in vars(self).items()}
        if not self.set_up:
            del values["set_up"]
        return values | {"authority": self.authority.hex()}


class SignedSums:
    """Appends to the file of one run; without a directory nothing is kept."""

    def __init__(self, directory: Path | None = None, fence: Fence | None = None) -> None:
        """Write to the file of the run in a directory, which is created with the first sum.

        `fence` is that of the server that writes it.
        """
        self._fence = fence
        self._path = None if directory is None else directory / FILE
        self._purposes: dict[bytes, bytes] = {}
        self._writing = threading.Lock()
        """Groups are summed at the same time, and half of a line looks like one of a crash."""
        self._job = ""
        """The job of the last line that has one, as far as this process wrote it."""

    def named(self, purpose: TrainingPurpose | BufferedPurpose) -> bytes:
        """The hash of a purpose, which is kept for the sum that is for it."""
        self._purposes[purpose.hash] = purpose.to_bytes()
        if len(self._purposes) > _MOST_PURPOSES:
            del self._purposes[next(iter(self._purposes))]
        return purpose.hash

    def add(self, signed: SignedSum, purpose: bytes, job: str) -> None:
        """Store a sum; it is on disk when this returns.

        Args:
            signed: what devices have signed, without the purpose.
            purpose: its hash.
            job: what the devices have opened, as it was sent to them.

        Raises:
            OSError: it cannot be stored.
            TakenOver: another server has taken over, and asks devices for a sum of its own.
        """
        if self._path is None:
            return
        signed = dataclasses.replace(signed, purpose=self._purposes.get(purpose, b""))
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        with self._writing, held(self._fence):
            file = os.open(self._path, flags, 0o600)
            try:
                _remove_torn_line(file)
                if job != self._job:
                    append_line(file, _line({"job": job}))
                    self._job = job
                append_line(file, _line(signed.to_json()))
            finally:
                os.close(file)


def read_signed_sums(directory: Path) -> Iterator[dict[str, str]]:
    """The lines of a run, one in memory; none if the run has no file.

    Those that a crash cut short were of sums that were never opened, and are left out.

    Raises:
        DamagedError: a line is none that was written.
        OSError: the file cannot be read.
    """
    path = directory / FILE
    if not path.exists():
        return
    expected = {field.name for field in dataclasses.fields(SignedSum)}
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE + 1):
            number += 1
            if not line.endswith(b"\n") and len(line) <= MAX_LINE:
                return
            try:
                table = json.loads(line)
                fits = table.keys() in (expected, expected - {"set_up"}, {"job"})
                fits = fits and all(isinstance(value, str) for value in table.values())
                fits = fits and table.get("set_up") != ""  # it is left out then
            except (ValueError, AttributeError, RecursionError):
                fits = False
            if not fits:
                raise DamagedError(
                    f"line {number} of {path} is damaged; restore the file from a backup, or "
                    "remove it, and the run has no signed sums any more"
                )
            yield table


def drop_after(directory: Path, round_: int) -> None:
    """Remove the sums of rounds after one, to which the run goes back.

    Their attempts may be numbered again, and others be in their sums.

    Raises:
        DamagedError, OSError: as `read_signed_sums`, or the file cannot be written.
    """
    _keep(directory, lambda about: about.round <= round_)


def drop_unplanned(directory: Path, run_id: str, planned: Collection[tuple[int, int]]) -> None:
    """Remove the sums of a run that its log does not have, as of a copy that was made meanwhile.

    Args:
        directory: of the run.
        run_id: of the run; sums of others are kept.
        planned: rounds and attempts in its log.

    Raises:
        DamagedError, OSError: as `read_signed_sums`, or the file cannot be written.
    """
    _keep(
        directory, lambda about: about.run_id != run_id or (about.round, about.attempt) in planned
    )


def config_of(line: dict[str, str], directory: Path) -> RoundConfig:
    """The configuration of a sum.

    Args:
        line: of the sum.
        directory: of the run that has it.

    Raises:
        DamagedError: the line has none.
    """
    from isthmus_privacy.secagg.config import RoundConfig  # loads PyTorch

    try:
        return RoundConfig.from_bytes(base64.b64decode(line["config"]))
    except (PeerMisbehaved, ValueError) as error:
        raise DamagedError(
            f"a sum of {directory / FILE} has no configuration ({error}); restore the file from a "
            "backup, or remove it, and the run has no signed sums any more"
        ) from error


def _keep(directory: Path, kept: Callable[[RoundConfig], bool]) -> None:
    """Leave only some sums, and all jobs."""
    if not (directory / FILE).exists():
        return
    with replacing(directory / FILE) as file:
        for line in read_signed_sums(directory):
            if "job" in line or kept(config_of(line, directory)):
                file.write(_line(line) + b"\n")


def _line(table: dict[str, Any]) -> bytes:
    return json.dumps(table, sort_keys=True, separators=(",", ":")).encode()


def _remove_torn_line(file: int) -> None:
    """Cut off a last line without its end, which a crash left."""
    size = os.fstat(file).st_size
    if not size or os.pread(file, 1, size - 1) == b"\n":
        return
    end = os.pread(file, MAX_LINE, max(0, size - MAX_LINE))
    torn = len(end) - (end.rfind(b"\n") + 1)
    os.ftruncate(file, size - torn)
