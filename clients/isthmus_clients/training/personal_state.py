"""What stays on a device between rounds: its personal parameters and statistics, in files.

Or its control variate, which differs in what a round starts from, see `PersonalState.begin`.

A state belongs to the round that it was trained in. The one before it is kept until the next round
begins, so that a repeated attempt at a round starts where the first one did. A file is named after
its round, the round that it was trained from, a random number, and its SHA-256, and is a valid
safetensors file.

Every training leaves a state with another random number, also one that fails, which leaves what it
began with. A device refuses what depends on another state than before, and what is missing is
noted, and a server sees both: neither may say whether a training on this device's data has failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path

from isthmus.errors import AdmissionRefused, TaskError
from isthmus.system.private_files import make_private_directory, write_private_file
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import Buffer
from isthmus.wire import link_pb2

log = logging.getLogger(__name__)

MAX_MB = 1024
"""Disk space for the states of all runs, where no owner has set another."""

_SUFFIX = ".safetensors"
_DRAWN_BYTES = 8
_DIGEST_CHARACTERS = 64

Work = link_pb2.TrainLocal | link_pb2.Score | link_pb2.Evaluate
"""Requests whose work may use a personal state."""


@dataclasses.dataclass(frozen=True, order=True)
class _Stored:
    """A file, by the round of its state."""

    round: int
    base: int
    """The round of the state that it was trained from; 0 for the initial values."""
    path: Path

    @property
    def drawn(self) -> str:
        """The random number in its name; empty for a file of an earlier version."""
        return self.path.stem.rpartition("-")[2][:-_DIGEST_CHARACTERS]

    @classmethod
    def of(cls, path: Path) -> _Stored:
        round_, base, _ = path.stem.split("-")
        return cls(int(round_), int(base), path)


class PersonalStates:
    """The personal states of a device, in a directory for each run.

    Guarantees:
      * files are written atomically and readable by their owner only;
      * together they are not larger than the limit: the run that was used longest ago goes first.
    """

    def __init__(self, directory: Path | None, max_mb: int = MAX_MB) -> None:
        """Set up; without a directory the states end with this object."""
        self._directory = directory
        self._max_mb = max_mb

    def check(self, layout: TensorLayout) -> None:
        """Refuse states of this layout if they are larger than the limit.

        Raises:
            AdmissionRefused: a state and the one before it are.
        """
        if layout.size and 2 * layout.nbytes > self._max_mb << 20:
            raise AdmissionRefused(
                f"this run keeps 2 x {layout.nbytes} bytes on each device, and its owner allows "
                f"personal_mb={self._max_mb} for all runs"
            )

    def open(
        self, key: str, layout: TensorLayout, *, follows_commits: bool = False
    ) -> PersonalState | None:
        """The states of a run; None if its job keeps nothing.

        Args:
            key: names the run, the device and the task, so that no other reads these states.
            layout: of a state.
            follows_commits: see `PersonalState`.

        Raises:
            AdmissionRefused: see `check`.
            UserError: the directory cannot be made.
        """
        if not layout.size:
            return None
        self.check(layout)
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="isthmus-personal-"))
            weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        folder = self._directory / hashlib.sha256(key.encode()).hexdigest()[:32]
        make_private_directory(self._directory)
        make_private_directory(folder)
        self._make_room(folder, 2 * layout.nbytes)
        return PersonalState(folder, layout, follows_commits=follows_commits)

    def _make_room(self, folder: Path, needed: int) -> None:
        assert self._directory is not None
        others = [each for each in self._directory.iterdir() if each != folder and each.is_dir()]
        # The newest are counted first, so that those used longest ago exceed the limit.
        others.sort(key=lambda each: each.stat().st_mtime, reverse=True)
        for other in others:
            needed += sum(file.stat().st_size for file in other.iterdir())
            if needed > self._max_mb << 20:
                log.info("removing the personal state of an earlier run, %s", other)
                shutil.rmtree(other, ignore_errors=True)


class PersonalState:
    """The personal states of one run on one device."""

    def __init__(
        self, folder: Path, layout: TensorLayout, *, follows_commits: bool = False
    ) -> None:
        """Set up for states of a layout.

        `follows_commits`: only the state of a round that the server has committed is one to start
        from, since the server has what belongs to it. Others are the last that was trained.
        """
        self.layout = layout
        self._folder = folder
        self._follows_commits = follows_commits
        self._base = 0
        """Round of the state that the current training began from."""
        self._drawn = ""
        """The random number of the state that was read last; empty for the initial values."""
        self._notes: list[str] = []

    def begin(self, round_: int, committed: int = 0) -> bytearray:
        """What training in a round starts from, encoded; zeros for the initial values.

        Attempts at the same round start from the same state. After `isthmus runs rollback` to a
        round before all stored ones, it is the oldest of them. In place of a damaged state the one
        before it is used, see `take_notes`.

        A state that follows commits starts from that of the round `committed`, the last one that
        has an update of this device; 0 for none. If it is lost, it starts from zeros.
        """
        stored = self._stored()
        if self._follows_commits:
            return self._begin_after(committed, stored)
        # A state of this round is that of an earlier attempt: this one begins where that began.
        own = next((each for each in stored if each.round == round_), None)
        if own is None:
            candidates = self._before(round_)
        else:
            candidates = [each for each in stored if each.round == own.base]
            if own.base and not candidates:
                self._note(f"the one of round {own.base} is missing", None)
        base, state = self._first_whole(candidates)
        self._base = 0 if base is None else base.round
        return state

    def _begin_after(self, committed: int, stored: list[_Stored]) -> bytearray:
        self._base = committed
        self._drawn = ""
        for each in stored:
            if each.round == committed:
                state = self._read(each)
                if state is not None:
                    self._drawn = each.drawn
                    return state
        if committed:
            self._base = 0
            note = (
                f"the control variate of this device after round {committed} is missing or "
                "damaged; it begins at zero again"
            )
            self._notes.append(note)
            log.warning("%s", note)
        return bytearray(self.layout.nbytes)

    def save(self, round_: int, state: Buffer) -> None:
        """Store the state that training in a round ended with.

        Raises:
            OSError: it cannot be written.
        """
        kept = self._base
        for each in self._stored():
            if each.round == round_ or each.round != kept:
                each.path.unlink()
        digest = hashlib.sha256(state).hexdigest()
        drawn = secrets.token_hex(_DRAWN_BYTES)
        path = self._folder / f"{round_}-{kept}-{drawn}{digest}{_SUFFIX}"
        write_private_file(path, bytes(state))

    def save_unchanged(self, round_: int) -> None:
        """Store what a failed training in a round has begun with as what it ended with.

        Raises:
            OSError: it cannot be written.
        """
        base = next((each for each in self._stored() if each.round == self._base), None)
        state = None if base is None else self._read(base)
        # Zeros stand for the initial values, also in a file.
        self.save(round_, bytearray(self.layout.nbytes) if state is None else state)

    def drop(self, round_: int) -> None:
        """Forget the state of a round whose update the server did not use."""
        if self._follows_commits:
            return  # the server says so in its next request, and may have used it after all
        for each in self._stored():
            if each.round == round_:
                each.path.unlink()

    def newest(self, until: int | None = None) -> bytearray:
        """The last state, of a round up to `until`, encoded; zeros for the initial values.

        In place of a damaged state it is the one before it, see `take_notes`.
        """
        stored = sorted(self._stored(), reverse=True)
        return self._first_whole(stored if until is None else self._before(until + 1))[1]

    def before(self, work: Work) -> bytearray:
        """What some work starts from, encoded; zeros for the initial values.

        Training starts from what `begin` says, and the others from what `newest` says.
        """
        if isinstance(work, link_pb2.TrainLocal):
            return self.begin(work.round, work.summed_round)
        return self.newest(work.round if isinstance(work, link_pb2.Evaluate) else None)

    def take_notes(self) -> list[str]:
        """What happened to states since the last call, for the owner and the operator."""
        notes = self._notes
        self._notes = []
        return notes

    def _before(self, round_: int) -> list[_Stored]:
        """The states that a round may start from, the one to be used first."""
        stored = sorted(self._stored(), reverse=True)
        earlier = [each for each in stored if each.round < round_]
        if earlier or not stored:
            return earlier
        return [stored[-1]] if stored[-1].base else []

    def _stored(self) -> list[_Stored]:
        return [_Stored.of(path) for path in self._folder.glob(f"*-*-*{_SUFFIX}")]

    def _first_whole(self, candidates: Iterable[_Stored]) -> tuple[_Stored | None, bytearray]:
        """The first undamaged state; None and zeros for the initial values."""
        for stored in candidates:
            state = self._read(stored)
            if state is not None:
                self._drawn = stored.drawn
                return stored, state
            # It would be in the way of each later round, and nothing of it can be used.
            with contextlib.suppress(OSError):
                stored.path.unlink()
            self._note(f"the one of round {stored.round} was damaged and is removed", stored.path)
        self._drawn = ""
        return None, bytearray(self.layout.nbytes)

    def name_before(self, work: Work) -> bytes:
        """Names what some work starts from, 32 bytes: its content, and the training that left it.

        By the content alone it would tell whether a training has changed anything.
        """
        state = self.before(work)
        return hashlib.sha256(self._drawn.encode() + hashlib.sha256(state).digest()).digest()

    def _read(self, stored: _Stored) -> bytearray | None:
        """The bytes of a state; None if they are not what was written."""
        state = bytearray(self.layout.nbytes)
        try:
            with stored.path.open("rb") as file:
                whole = file.readinto(state) == len(state) and not file.read(1)
        except OSError:  # as of a damaged sector
            return None
        digest = hashlib.sha256(state).hexdigest()
        return state if whole and stored.path.stem.endswith(digest) else None

    def _note(self, what: str, path: Path | None) -> None:
        """Tell the owner in the log, and the operator without the path."""
        note = (
            f"a personal state of this device cannot be used: {what}; it continues with the "
            "state before it, or with the initial values if there is none"
        )
        self._notes.append(note)
        log.warning("%s%s", note, "" if path is None else f" ({path})")


def digest_before(states: PersonalState | None, work: Work) -> bytes:
    """See `PersonalState.name_before`; empty for a run without personal states."""
    return b"" if states is None else states.name_before(work)


def is_initial(state: Buffer) -> bool:
    """Whether an encoded state stands for the model's initial values."""
    return not any(memoryview(state)[:8])


def check_agreed(layout: TensorLayout, header: bytes) -> None:
    """Check that the server, with this `header`, and a device agree on what is personal.

    Raises:
        TaskError: they do not.
    """
    if layout.size or header:
        difference = layout.explain_difference(TensorLayout.from_header(header))
        if difference is not None:
            raise TaskError(f"what stays on this device is not what the server says: {difference}")
