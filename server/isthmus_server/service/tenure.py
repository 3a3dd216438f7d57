"""Which of several servers serves a state directory, and when a standby takes over.

A server that was started with `--standby` waits while another one serves the directory. It takes
over at once if the lock of the directory is free, and after `SILENT_SECONDS` without a beat of a
server that still has the lock: one that is stopped, or whose machine is cut off or lost. What
keeps the earlier one from changing anything afterwards is the fence (`storage.fence`), and not
that it was gone for certain.

Beats are rows of a small database, `standby.sqlite`, and not files: SQLite's locks make a machine
read what another one has written on a volume that both have mounted.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from isthmus.errors import TakenOver, UserError
from isthmus.system.file_lock import LockTaken, file_lock, is_locked
from isthmus.system.private_files import create_state_file
from isthmus_server.runs.jobs.queue import JobQueue, check
from isthmus_server.storage.fence import (
    QUEUE,
    STANDBY,
    Fence,
    KeptTakeover,
    Takeover,
    epoch_of,
    write_lock,
)
from isthmus_server.storage.sealed_database import database_error

BEAT_SECONDS = 2.0
"""Interval of the beats of a server that has a standby."""

SILENT_SECONDS = 15.0
"""Time without a beat after which a server that has the lock counts as gone."""

_UNLOCKED_SECONDS = 3 * BEAT_SECONDS
"""Time without a beat for one on another machine whose lock is free: the volume may have none."""

_LOOK_SECONDS = 0.5
"""Interval at which a standby looks."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS serving (
    one INTEGER PRIMARY KEY CHECK (one = 1), epoch INTEGER NOT NULL, beat INTEGER NOT NULL,
    host TEXT NOT NULL, boot TEXT NOT NULL, pid INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS takeovers (epoch INTEGER PRIMARY KEY, takeover TEXT NOT NULL) STRICT;
"""

_TAKEOVERS = 100
"""Takeovers that are kept for runs that no server has opened since."""

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Serving:
    """The server that serves a directory, as it has written itself."""

    epoch: int
    beat: int
    host: str
    boot: str
    """Which start of its machine; empty where that is not known."""
    pid: int

    def __str__(self) -> str:
        """For sentences."""
        return f"process {self.pid} on {self.host}"


class Tenure:
    """The time in which this server serves a state directory."""

    def __init__(
        self,
        state: Path,
        fence: Fence,
        *,
        beats: bool,
        takeover: Takeover | None = None,
        earlier: Sequence[KeptTakeover] = (),
    ) -> None:
        """The directory is locked, and its epoch raised; `beats`: a standby may wait."""
        self.fence = fence
        self.takeover = takeover
        """From whom this server took over; None if it did not wait as a standby for another one."""
        self.earlier = earlier
        """The last takeovers by other servers, the oldest first."""
        self._state = state
        self._beats = beats
        self._ended = threading.Event()
        self._when_lost: Callable[[], object] = lambda: None

    @contextlib.contextmanager
    def _beating(self) -> Iterator[None]:
        """Beat during the block, in a thread: the event loop may be busy for longer."""
        if not self._beats:
            yield
            return
        thread = threading.Thread(target=self._beat, name="standby", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()
            with contextlib.suppress(sqlite3.Error), _written(self._state) as database:
                database.execute("DELETE FROM serving WHERE epoch=?", (self.fence.epoch,))

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            try:
                self.fence.check()
                self._beat_once()
            except TakenOver:
                self._when_lost()  # with each beat: the work may not have begun
            except (sqlite3.Error, OSError) as error:
                log.warning("this server cannot say that it is alive: %s", error)

    def _beat_once(self) -> None:
        _make_standby(self._state)  # if it was lost
        with _written(self._state) as database:
            beat = "UPDATE serving SET beat=beat+1 WHERE epoch=?"
            if database.execute(beat, (self.fence.epoch,)).rowcount:
                return
        _write_serving(self._state, self.fence.epoch)

    async def during(
        self, work: Coroutine[Any, Any, T], give_up: Callable[[], object] = lambda: None
    ) -> T:
        """Do the work, and cancel it as soon as another server has taken over.

        Args:
            work: what this server does.
            give_up: is called before the work is cancelled, on the event loop.

        Raises:
            TakenOver: another server has.
        """
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()

        def end() -> None:
            give_up()
            task.cancel()

        def lost() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(end)

        self._when_lost = lost
        try:
            return await task
        finally:
            self._refuse_lost()

    def _refuse_lost(self) -> None:
        try:
            self.fence.check()
        except sqlite3.Error:  # whatever ended the work says more
            return
        except TakenOver as error:
            other = None
            with contextlib.suppress(sqlite3.Error):
                other = read_serving(self._state)
            by = "another server" if other is None else str(other)
            raise TakenOver(
                f"{by} has taken over {self._state}: this server has changed nothing there since, "
                "and ends"
            ) from error


@contextlib.contextmanager
def begin(state: Path, *, standby: bool, tell: Callable[[str], object]) -> Iterator[Tenure]:
    """Serve a state directory during the block; with `standby`, wait until no other server does.

    Args:
        state: the directory, which has a server.
        standby: wait, and let another standby take over from this server.
        tell: is called with a sentence when this server waits, and when it takes over.

    Raises:
        UserError: another server serves it or, for a standby, one that nobody may take over from;
            the queue of jobs is damaged or cannot be used.
    """
    if not (state / QUEUE).exists():
        JobQueue(state).close()
    with contextlib.ExitStack() as stack:
        try:
            takeover = None
            if standby:
                fence, takeover = _in_turn(state, stack, tell)
            else:
                fence = _at_once(state, stack)
        except sqlite3.Error as error:
            raise database_error(state / QUEUE, error) from error
        earlier = _takeovers_before(state, fence.epoch)
        tenure = Tenure(state, fence, beats=standby, takeover=takeover, earlier=earlier)
        stack.enter_context(tenure._beating())
        yield tenure


def _at_once(state: Path, stack: contextlib.ExitStack) -> Fence:
    """Serve the directory now, without a standby.

    Raises:
        UserError: another server serves it.
    """
    fence = _raised(state, None, stack, forced=False)
    assert fence is not None
    if (state / STANDBY).exists():  # what it says of an earlier server is over
        with contextlib.suppress(sqlite3.Error), _written(state) as database:
            database.execute("DELETE FROM serving")
    return fence


def _in_turn(
    state: Path, stack: contextlib.ExitStack, tell: Callable[[str], object]
) -> tuple[Fence, Takeover | None]:
    """Wait until no server serves the directory, and then do; returns from whom it took over.

    Raises:
        UserError: nobody may take over from the one that serves it, or the file of beats is
            damaged.
    """
    _check_usable(state)
    watch = _Watch(state, tell)
    while True:
        epoch, forced = watch.wait()
        try:
            fence = _raised(state, epoch, stack, forced=forced)
        except sqlite3.OperationalError as error:
            watch.say_unusable(error)
            continue
        except LockTaken:  # since it was looked at, and not by a server, which raises the epoch
            watch.say(f"waits until no other command uses {state}")
            time.sleep(_LOOK_SECONDS)  # nothing says when another process gives the lock up
            continue
        if fence is None:  # another standby was faster
            watch = _Watch(state, tell)
            continue
        if watch.other is not None:
            tell(f"takes over from {watch.other}")
        takeover = watch.takeover(fence, forced=forced)
        if takeover is not None:
            _keep_takeover(state, fence.epoch, takeover)
        return fence, takeover


def _check_usable(state: Path) -> None:
    """Check now, and not when nobody serves, that this version and this user can take over.

    Raises:
        UserError: they cannot, or a file is damaged.
    """
    for path in (state, state / QUEUE, state / STANDBY):
        if path.exists() and not os.access(path, os.W_OK):
            raise UserError(f"{path} cannot be written: a standby has to, when it takes over")
    try:
        _make_standby(state)
        _check_queue(state)
    except OSError as error:
        raise database_error(state / STANDBY, error) from error
    except sqlite3.DatabaseError as error:
        if _is_busy(error):  # another server is writing, or is stopped within a write
            return
        raise UserError(
            f"{state / STANDBY} cannot be used ({error}); remove it while no server runs"
        ) from error


def _is_busy(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


def _raised(
    state: Path, expected: int | None, stack: contextlib.ExitStack, *, forced: bool
) -> Fence | None:
    """Lock the directory and raise its epoch, in one transaction.

    Args:
        state: the directory.
        expected: the epoch that it must have; None for any.
        stack: has the lock afterwards.
        forced: the lock is taken from an earlier server that has it.

    Returns:
        None if the directory has another epoch than expected.

    Raises:
        LockTaken: another process has the lock.
        UserError: the queue is damaged.
        sqlite3.OperationalError: another process has the write lock of the queue.
    """
    _check_queue(state)
    with contextlib.ExitStack() as locked, write_lock(state / QUEUE) as queue:
        found = epoch_of(queue)
        if expected not in (None, found):
            return None
        fence = Fence(state, found + 1, forced=expected is not None)
        lock = file_lock(
            state / "lock",
            f"another server runs from {state}",
            signature=fence.signature,
            follows=fence.follows if forced else lambda signature: False,
        )
        if not forced:
            locked.enter_context(lock)
        queue.execute(f"PRAGMA application_id={fence.epoch}")
        queue.execute("COMMIT")
        # Not before: if the commit fails, the earlier server goes on, and has its lock and its row.
        if forced:
            locked.enter_context(lock)
        if expected is not None:
            _introduce(state, fence.epoch)
        stack.enter_context(locked.pop_all())
        return fence


def _check_queue(state: Path) -> None:
    """Check the queue before it is written, which would remove what SQLite ignores.

    Raises:
        UserError: it is damaged.
        sqlite3.OperationalError: another process keeps others from reading it.
    """
    try:
        check(state)
    except UserError as error:
        if isinstance(error.__cause__, sqlite3.OperationalError):
            raise error.__cause__ from None
        raise


class _Watch:
    """What a standby has seen of the server that serves the directory."""

    def __init__(self, state: Path, tell: Callable[[str], object]) -> None:
        self.other: Serving | None = None
        """The server that serves it, or has; None if nobody knows of one."""
        self._last: Serving | None = None
        """The last one that was known."""
        self._state = state
        self._tell = tell
        self._told: set[str] = set()
        self._since = time.monotonic()
        """When there was a beat that is the last one so far, or the watch began."""
        self._epoch: int | None = None
        """The epoch of the directory when it was last looked at."""
        self._epoch_since = self._since
        """When it was first seen."""
        self._unlocked_at: int | None = None
        """The beat at which the lock was free first."""

    def say(self, sentence: str) -> None:
        """Tell a sentence, but not again."""
        if sentence not in self._told:
            self._told.add(sentence)
            self._tell(sentence)

    def say_unusable(self, error: sqlite3.OperationalError) -> None:
        """Tell why this server does not take over now."""
        if _is_busy(error):
            other = "another server" if self.other is None else str(self.other)
            self.say(
                f"{other} is stopped within a write to {self._state}, which it may still complete "
                f"({error}): end that process, and this server takes over"
            )
        else:
            self.say(f"cannot take over: {database_error(self._state / QUEUE, error)}")

    def takeover(self, fence: Fence, *, forced: bool) -> Takeover | None:
        """From whom this server has taken over, now that it has the fence; None if from nobody."""
        before = self._last
        if before is None or before.epoch != fence.epoch - 1:
            return None
        why = "was gone"
        if forced:
            why = f"had said nothing for {SILENT_SECONDS:g} s"
        elif self.other is None:  # it has removed what it had said of itself
            why = "had ended"
        me = f"process {os.getpid()} on {socket.gethostname()}"
        return Takeover(time.time(), me, str(before), why)

    def wait(self) -> tuple[int, bool]:
        """Wait until the server is gone; returns the epoch, and whether it may still have the lock.

        Raises:
            UserError: nobody may take over from it.
        """
        while True:
            try:
                found = self._look()
                if found is not None:
                    return found
            except sqlite3.OperationalError as error:  # a server is writing
                if time.monotonic() - self._since >= SILENT_SECONDS:
                    self.say_unusable(error)
            time.sleep(_LOOK_SECONDS)  # a volume of several machines tells of no change

    def _look(self) -> tuple[int, bool] | None:
        epoch = _epoch(self._state)
        try:
            serving = read_serving(self._state)
        except sqlite3.OperationalError:
            if self.other is None:
                raise
            serving = self.other  # a server that is stopped within a beat says no more than that
        locked = is_locked(self._state / "lock")
        if serving != self.other:
            self.other = serving
            self._last = serving or self._last
            self._since = time.monotonic()
        quiet = time.monotonic() - self._since
        if epoch != self._epoch:
            self._epoch = epoch
            self._epoch_since = time.monotonic()
        if serving is None or serving.epoch != epoch:
            if not locked:
                return epoch, False
            # It may just have begun: another standby raises the epoch, and then says who it is.
            of_epoch = time.monotonic() - self._epoch_since
            if min(quiet, of_epoch) > _UNLOCKED_SECONDS:
                if self._last is None or self._last.epoch != epoch:
                    raise UserError(
                        f"the server that runs from {self._state} was started without --standby, "
                        "so that nobody can tell whether it is alive; start it again with --standby"
                    )
                # The server of this epoch has ended, and a further one would have raised it.
                self.say(f"waits until no other command uses {self._state}")
            return None
        if locked:
            self.say(f"waits as a standby: {serving} serves {self._state}")
            return (epoch, True) if quiet >= SILENT_SECONDS else None
        if serving.boot and serving.boot == _boot():
            return epoch, False  # the kernel of this machine has released its lock
        if self._unlocked_at is None:
            self._unlocked_at = serving.beat
        if serving.beat != self._unlocked_at:
            raise UserError(
                f"{serving} serves {self._state}, and its lock is free on this machine: the volume "
                "does not lock files between machines, so no standby is possible; mount it with "
                "locks (for NFS without `nolock` and `local_lock`)"
            )
        return (epoch, False) if quiet >= _UNLOCKED_SECONDS else None


def read_serving(state: Path) -> Serving | None:
    """The server that serves a directory and may have a standby; None if none has said so.

    Raises:
        sqlite3.OperationalError: it cannot be read now.
    """
    if not (state / STANDBY).exists():
        return None
    with contextlib.closing(_connected(state)) as database:
        row = database.execute("SELECT epoch, beat, host, boot, pid FROM serving").fetchone()
    return None if row is None else Serving(*row)


def _make_standby(state: Path) -> None:
    with contextlib.suppress(FileExistsError):
        create_state_file(state / STANDBY)
    with _written(state) as database:
        database.executescript(_SCHEMA)


def _introduce(state: Path, epoch: int) -> None:
    """Write who serves now; without it this server serves all the same, and says so later."""
    try:
        try:
            _write_serving(state, epoch)
        except sqlite3.Error:
            # The earlier server may be stopped within a beat, and keep the file locked.
            for path in (state / STANDBY, state / f"{STANDBY}-journal"):
                path.unlink(missing_ok=True)
            _write_serving(state, epoch)
    except (sqlite3.Error, OSError) as error:
        log.warning("this server cannot say that it serves: %s", error)


def _write_serving(state: Path, epoch: int) -> None:
    _make_standby(state)
    row = (epoch, socket.gethostname(), _boot(), os.getpid())
    with _written(state) as database:
        database.execute(
            "INSERT INTO serving VALUES (1, ?, 0, ?, ?, ?) ON CONFLICT DO UPDATE SET "
            "epoch=excluded.epoch, beat=0, host=excluded.host, boot=excluded.boot, "
            "pid=excluded.pid WHERE epoch <> excluded.epoch",
            row,
        )


def _keep_takeover(state: Path, epoch: int, takeover: Takeover) -> None:
    """Keep a takeover for a later server: this one may end before it writes it to its runs."""
    try:
        runs = [each.parent.name for each in (state / "runs").glob("*/job.json")]
        with _written(state) as database:
            kept = {"takeover": dataclasses.asdict(takeover), "runs": runs}
            row = (epoch, json.dumps(kept))
            database.execute("INSERT OR REPLACE INTO takeovers VALUES (?, ?)", row)
            database.execute(
                "DELETE FROM takeovers WHERE epoch NOT IN "
                "(SELECT epoch FROM takeovers ORDER BY epoch DESC LIMIT ?)",
                (_TAKEOVERS,),
            )
    except (sqlite3.Error, OSError) as error:
        log.warning("this server cannot keep its takeover: %s", error)


def _takeovers_before(state: Path, epoch: int) -> list[KeptTakeover]:
    """The kept takeovers of servers before that of an epoch; none where they cannot be read."""
    if not (state / STANDBY).exists():
        return []
    query = "SELECT takeover FROM takeovers WHERE epoch < ? ORDER BY epoch"
    try:
        with contextlib.closing(_connected(state)) as database:
            rows = [json.loads(text) for (text,) in database.execute(query, (epoch,))]
        return [KeptTakeover(Takeover(**row["takeover"]), frozenset(row["runs"])) for row in rows]
    except (sqlite3.Error, OSError, ValueError, TypeError, KeyError):
        return []  # of another version, or damaged


def _epoch(state: Path) -> int:
    uri = f"{(state / QUEUE).absolute().as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True)) as queue:
        return epoch_of(queue)


@contextlib.contextmanager
def _written(state: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(_connected(state)) as database:
        yield database


def _connected(state: Path) -> sqlite3.Connection:
    uri = f"{(state / STANDBY).absolute().as_uri()}?mode=rw"
    database = sqlite3.connect(uri, uri=True, isolation_level=None)
    # A beat that is lost with the power says nothing wrong. Nor does it need space on the disk: a
    # server of which the disk is full would seem to be gone.
    database.execute("PRAGMA synchronous=OFF")
    database.execute("PRAGMA journal_mode=MEMORY")
    return database


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
