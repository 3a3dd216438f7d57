"""Which of several servers serves a directory, and when a standby takes over."""

import asyncio
import contextlib
import itertools
import os
import queue
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.server.waiting import wait_until

from isthmus.errors import DamagedError, TakenOver, UserError
from isthmus.system.file_lock import file_lock, is_locked
from isthmus_server.runs.jobs.queue import JobQueue, check
from isthmus_server.service import tenure
from isthmus_server.service.tenure import begin, read_serving
from isthmus_server.storage.fence import QUEUE, Takeover, epoch_of, write_lock

HERE = socket.gethostname()

SERVE = """
import sys
from pathlib import Path
from isthmus_server.service import tenure
tenure.BEAT_SECONDS = 0.05
with tenure.begin(Path(sys.argv[1]), standby=True, tell=print) as held:
    print("serves", flush=True)
    sys.stdin.read()
"""


BEAT = """
import os, resource, sys
from pathlib import Path
from isthmus_server.service import tenure
state = Path(sys.argv[1])
with tenure.begin(state, standby=True, tell=print) as held:
    before = tenure.read_serving(state).beat
    size = (state / "standby.sqlite").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    held._beat_once()
    print(tenure.read_serving(state).beat > before)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Beats and silences are shorter than those of a server."""
    monkeypatch.setattr(tenure, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(tenure, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(tenure, "_UNLOCKED_SECONDS", 0.5)
    monkeypatch.setattr(tenure, "_LOOK_SECONDS", 0.02)


@pytest.fixture
def state(tmp_path):
    folder = tmp_path / "state"
    folder.mkdir()
    return folder


@pytest.fixture
def serving(state):
    """Start a process that serves the directory with a standby; all end with the test."""
    with contextlib.ExitStack() as started:

        def serve():
            process = subprocess.Popen(
                [sys.executable, "-c", SERVE, str(state)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            started.enter_context(process)
            started.callback(process.kill)
            lines = iter(process.stdout.readline, "")
            assert any(line == "serves\n" for line in lines)
            return process

        yield serve


def epoch(state):
    return tenure._epoch(state)


def test_each_server_raises_the_epoch_and_a_second_one_is_refused(state):
    with begin(state, standby=False, tell=print) as one:
        assert one.fence.epoch == epoch(state) == 1
        with (
            pytest.raises(UserError, match=r"^another server runs from .*state$"),
            begin(state, standby=False, tell=print),
        ):
            pass
        assert epoch(state) == 1
    with begin(state, standby=False, tell=print) as two:
        assert two.fence.epoch == 2
        assert two.takeover is None


def test_a_standby_does_not_take_over_from_a_server_without_one(state):
    with (
        begin(state, standby=False, tell=print),
        pytest.raises(UserError, match=r"was started without --standby, so that nobody can tell"),
        begin(state, standby=True, tell=print),
    ):
        pass
    assert epoch(state) == 1


def test_nor_from_one_that_was_started_after_a_pair(state, serving):
    """What the pair has written about itself does not make it look silent."""
    serving().communicate("", timeout=50)
    with begin(state, standby=False, tell=print) as plain:
        assert read_serving(state) is None
        with (
            pytest.raises(UserError, match=r"was started without --standby"),
            begin(state, standby=True, tell=print),
        ):
            pass
        plain.fence.check()


def test_a_standby_begins_when_the_server_ends_in_order(state, serving):
    server = serving()
    told = queue.Queue()
    begun = threading.Event()
    found = []

    def wait():
        with begin(state, standby=True, tell=told.put) as mine:
            begun.set()
            found.append(mine.takeover)
            mine.fence.check()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        assert told.get(timeout=50) == (
            f"waits as a standby: process {server.pid} on {socket.gethostname()} serves {state}"
        )
        assert not begun.wait(1.5)  # it beats: longer than a silence that ends its time
    finally:
        server.communicate("", timeout=50)
        thread.join(50)
    assert begun.is_set()
    assert told.empty()
    assert found[0].before.startswith(f"process {server.pid} on ")
    assert found[0].why == "had ended"


@pytest.mark.parametrize("ending", ["kill", "stop"])
def test_a_standby_takes_over_from_a_server_that_is_killed_or_stopped(state, serving, ending):
    server = serving()
    server.send_signal({"kill": 9, "stop": 19}[ending])
    told = []
    with begin(state, standby=True, tell=told.append) as mine:
        assert mine.fence.epoch == epoch(state) == 2
        assert is_locked(state / "lock")
        assert told[-1].startswith(f"takes over from process {server.pid} on ")
        here = socket.gethostname()
        assert mine.takeover.before == f"process {server.pid} on {here}"
        assert mine.takeover.by == f"process {os.getpid()} on {here}"
        why = {"kill": "was gone", "stop": "had said nothing for 1 s"}
        assert mine.takeover.why == why[ending]
        with (
            pytest.raises(UserError, match="another server runs"),
            begin(state, standby=False, tell=print),
        ):
            pass
    server.kill()


@pytest.mark.parametrize("standby", [False, True])
def test_a_later_server_knows_of_standbys_that_were_killed_after_they_took_over(
    state, serving, standby
):
    """They may have written it nowhere else yet."""
    processes = [serving()]
    for _ in range(2):
        processes[-1].kill()
        processes.append(serving())
    processes[-1].kill()
    processes[-1].wait(50)
    with begin(state, standby=standby, tell=print) as mine:
        takeovers = [each.takeover for each in mine.earlier]
        assert [(each.by, each.before, each.why) for each in takeovers] == [
            (f"process {by.pid} on {HERE}", f"process {before.pid} on {HERE}", "was gone")
            for before, by in itertools.pairwise(processes)
        ]
        assert (mine.takeover is not None) == standby


def test_the_last_takeovers_are_kept_and_damage_to_them_ends_no_server(state):
    with begin(state, standby=True, tell=print):
        pass
    for name in ("begun", "queued"):
        (state / "runs" / name).mkdir(parents=True)
    (state / "runs" / "begun" / "job.json").touch()
    for epoch in range(tenure._TAKEOVERS + 5):
        tenure._keep_takeover(state, epoch, Takeover(float(epoch), "b", "a", "was gone"))
    kept = tenure._takeovers_before(state, epoch)
    assert [each.takeover.at for each in kept] == list(range(5, epoch))
    assert {each.runs for each in kept} == {frozenset({"begun"})}
    for damaged in ("of another version", "{}", "[]"):
        with contextlib.closing(sqlite3.connect(state / "standby.sqlite")) as database:
            database.execute("UPDATE takeovers SET takeover=?", (damaged,))
            database.commit()
        with begin(state, standby=True, tell=print) as mine:
            assert mine.earlier == []


def test_of_two_standbys_one_takes_over_and_the_other_waits_on(state, serving):
    serving().send_signal(19)
    with ThreadPoolExecutor(2) as pool:
        end = threading.Event()
        begun = queue.Queue()

        def stand_by():
            with begin(state, standby=True, tell=lambda line: None) as mine:
                begun.put(mine.fence.epoch)
                assert end.wait(50)
                mine.fence.check()

        both = [pool.submit(stand_by) for _ in range(2)]
        assert begun.get(timeout=50) == 2
        with pytest.raises(queue.Empty):
            begun.get(timeout=1.5)
        end.set()
        for each in both:
            each.result(50)
        assert begun.get(timeout=50) == 3


def test_a_standby_waits_for_one_that_has_yet_to_say_that_it_serves(state, serving, monkeypatch):
    """On a busy machine it may take a while, and the last beat is long ago then."""
    look = tenure._Watch._look
    introduce = tenure._introduce
    looks = threading.Semaphore(0)

    def counted(watch):
        found = look(watch)
        looks.release()
        return found

    def late(*arguments):
        while looks.acquire(blocking=False):
            pass
        for _ in range(3):  # of the other standby, with the new epoch
            assert looks.acquire(timeout=50)
        introduce(*arguments)

    monkeypatch.setattr(tenure._Watch, "_look", counted)
    monkeypatch.setattr(tenure, "_introduce", late)
    serving().send_signal(19)
    epochs = queue.Queue()
    first_ends = threading.Event()

    def stand_by():
        with begin(state, standby=True, tell=lambda line: None) as mine:
            epochs.put(mine.fence.epoch)
            monkeypatch.setattr(tenure, "_introduce", introduce)
            assert first_ends.wait(50)

    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(stand_by)]
        for _ in range(10):  # so that they are not both about to take over
            assert looks.acquire(timeout=50)
        both.append(pool.submit(stand_by))
        assert epochs.get(timeout=50) == 2
        first_ends.set()
        for each in both:
            each.result(50)
    assert epochs.get(timeout=50) == 3


def test_a_volume_that_does_not_lock_between_machines_is_refused(state):
    """The lock is free, and another machine's server beats all the same."""
    JobQueue(state).close()
    with contextlib.closing(sqlite3.connect(state / "standby.sqlite")) as db:
        db.executescript(tenure._SCHEMA)
        db.execute("INSERT INTO serving VALUES (1, 1, 0, 'other', 'another boot', 7)")
        db.commit()
    with write_lock(state / QUEUE) as queue:
        queue.execute("PRAGMA application_id=1")
        queue.execute("COMMIT")
    ended = threading.Event()

    def beat():
        with contextlib.closing(sqlite3.connect(state / "standby.sqlite", timeout=50)) as db:
            while not ended.wait(0.05):
                db.execute("UPDATE serving SET beat=beat+1")
                db.commit()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with (
            pytest.raises(UserError, match=r"process 7 on other serves .* does not lock files"),
            begin(state, standby=True, tell=print),
        ):
            pass
    finally:
        ended.set()
        thread.join()
    with begin(state, standby=True, tell=print) as mine:  # as soon as it is silent
        assert mine.fence.epoch == 2


def test_a_server_that_is_stopped_within_a_write_is_named(state, serving, monkeypatch):
    server = serving()
    server.send_signal(19)
    monkeypatch.setattr("isthmus_server.storage.fence._BUSY_SECONDS", 0.1)
    told = queue.Queue()

    def stand_by():
        with begin(state, standby=True, tell=told.put):
            pass

    with write_lock(state / QUEUE) as jobs:  # as that process would have it
        thread = threading.Thread(target=stand_by)
        thread.start()
        assert "waits as a standby" in told.get(timeout=50)
        assert "end that process, and this server takes over" in told.get(timeout=50)
        assert epoch_of(jobs) == 1
    assert told.get(timeout=50).startswith("takes over from")
    thread.join(50)
    server.kill()


def taking_over(state, told):
    """A standby in a thread, which ends as soon as it has taken over."""

    def stand_by():
        try:
            with begin(state, standby=True, tell=told.put) as mine:
                told.put(f"has epoch {mine.fence.epoch}")
        except UserError as error:
            told.put(str(error))

    return threading.Thread(target=stand_by)


def test_a_takeover_that_fails_leaves_the_lock_to_the_server_that_goes_on(
    state, serving, monkeypatch
):
    """As with a full disk: its lock keeps commands and other servers away."""
    server = serving()
    server.send_signal(19)
    epoch_before = epoch(state)
    real = tenure.write_lock

    @contextlib.contextmanager
    def full(file):
        with real(file) as database:
            database.set_authorizer(
                lambda action, name, *rest: (
                    sqlite3.SQLITE_DENY if name == "COMMIT" else sqlite3.SQLITE_OK
                )
            )
            yield database

    monkeypatch.setattr(tenure, "write_lock", full)
    with (
        contextlib.ExitStack() as stack,
        pytest.raises(sqlite3.DatabaseError),
    ):
        tenure._raised(state, epoch_before, stack, forced=True)
    assert epoch(state) == epoch_before
    assert is_locked(state / "lock")
    assert read_serving(state).epoch == epoch_before
    server.send_signal(18)
    server.communicate("", timeout=50)


def test_a_server_that_is_stopped_within_a_beat_is_followed(state, serving, monkeypatch):
    """It keeps the file of the beats locked, and that says nothing about who may commit."""
    server = serving()
    told = queue.Queue()
    real = sqlite3.connect
    monkeypatch.setattr(
        tenure.sqlite3, "connect", lambda *args, **more: real(*args, **{"timeout": 0.1, **more})
    )
    thread = taking_over(state, told)
    thread.start()
    assert "waits as a standby" in told.get(timeout=50)
    server.send_signal(19)
    with contextlib.closing(real(state / "standby.sqlite", isolation_level=None)) as beats:
        beats.execute("BEGIN EXCLUSIVE")  # as that process would have it
        assert told.get(timeout=50).startswith(f"takes over from process {server.pid} on ")
        assert told.get(timeout=50) == "has epoch 2"
        beats.execute("ROLLBACK")
    thread.join(50)
    server.kill()


def test_a_standby_that_starts_while_a_server_is_stopped_within_a_beat_says_so(
    state, serving, monkeypatch
):
    server = serving()
    server.send_signal(19)
    told = queue.Queue()
    real = sqlite3.connect
    monkeypatch.setattr(
        tenure.sqlite3, "connect", lambda *args, **more: real(*args, **{"timeout": 0.1, **more})
    )
    thread = taking_over(state, told)
    with contextlib.closing(real(state / "standby.sqlite", isolation_level=None)) as beats:
        beats.execute("BEGIN EXCLUSIVE")
        thread.start()
        assert "is stopped within a write" in told.get(timeout=50)
        beats.execute("ROLLBACK")
    assert "waits as a standby" in told.get(timeout=50)
    assert "takes over" in told.get(timeout=50)
    thread.join(50)
    server.kill()


def test_a_beat_needs_no_space_on_the_disk(state):
    """No file may become larger than that of the beats is."""
    beat = subprocess.run(
        [sys.executable, "-c", BEAT, state], capture_output=True, text=True, timeout=50
    )
    assert beat.stdout == "True\n", beat.stderr


def test_a_standby_waits_for_a_command_that_has_the_lock_when_it_takes_over(
    state, serving, monkeypatch
):
    server = serving()
    told = queue.Queue()
    raised = tenure._raised
    command = contextlib.ExitStack()

    def while_used(*arguments, **more):
        monkeypatch.setattr(tenure, "_raised", raised)
        command.enter_context(file_lock(state / "lock", "taken"))
        return raised(*arguments, **more)

    monkeypatch.setattr(tenure, "_raised", while_used)
    thread = taking_over(state, told)
    thread.start()
    assert "waits as a standby" in told.get(timeout=50)
    server.communicate("", timeout=50)
    with command:
        assert told.get(timeout=50) == f"waits until no other command uses {state}"
        time.sleep(2 * tenure._UNLOCKED_SECONDS)  # as a command that takes long
    assert told.get(timeout=50) == "has epoch 2"
    thread.join(50)


def test_beats_go_on_in_a_new_file_after_theirs_was_lost(state, serving):
    server = serving()
    (state / "standby.sqlite").unlink()
    told = queue.Queue()
    thread = taking_over(state, told)
    thread.start()
    assert "waits as a standby" in told.get(timeout=50)
    with pytest.raises(queue.Empty):
        told.get(timeout=1.5)
    server.communicate("", timeout=50)
    assert told.get(timeout=50) == "has epoch 2"
    thread.join(50)


def test_a_standby_of_a_version_with_other_tables_is_refused_when_it_starts(state, serving):
    """And not when the first server is gone."""
    server = serving()
    with contextlib.closing(sqlite3.connect(state / QUEUE)) as jobs:
        jobs.execute("CREATE TABLE of_another_version (number INTEGER)")
    with (
        pytest.raises(DamagedError, match=r"was written by another version"),
        begin(state, standby=True, tell=print),
    ):
        pass
    server.kill()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_standby_that_may_not_write_is_refused_when_it_starts(state, serving):
    server = serving()
    state.chmod(0o500)
    try:
        with (
            pytest.raises(UserError, match=r"state cannot be written: a standby has to"),
            begin(state, standby=True, tell=print),
        ):
            pass
    finally:
        state.chmod(0o700)
    server.kill()


async def test_the_work_of_a_server_ends_when_another_one_takes_over(state):
    begun = asyncio.Event()

    async def work():
        begun.set()
        await asyncio.Event().wait()

    with begin(state, standby=True, tell=print) as mine:
        task = asyncio.create_task(mine.during(work()))
        await begun.wait()
        with contextlib.ExitStack() as stack:
            taken = await asyncio.to_thread(tenure._raised, state, 1, stack, forced=True)
            assert taken.epoch == 2
            with pytest.raises(TakenOver, match=r"^process \d+ on \S+ has taken over .* ends$"):
                await task
            assert read_serving(state).epoch == 2
    await wait_until(lambda: not is_locked(state / "lock"))


async def test_work_that_ends_by_itself_ends_with_its_result(state):
    async def work():
        return 5

    for standby in (False, True):
        with begin(state, standby=standby, tell=print) as mine:
            assert await mine.during(work()) == 5
    assert read_serving(state) is None


def test_a_damaged_file_of_beats_is_named(state):
    (state / "standby.sqlite").write_bytes(b"nothing that SQLite knows" * 100)
    with (
        pytest.raises(UserError, match=r"standby.sqlite cannot be used .*; remove it"),
        begin(state, standby=True, tell=print),
    ):
        pass
    with (
        begin(state, standby=False, tell=print),
        pytest.raises(UserError, match="taken"),
        file_lock(state / "lock", "taken"),
    ):
        pass


@pytest.mark.parametrize("standby", [False, True])
def test_a_damaged_queue_is_refused_before_it_is_written(state, standby):
    JobQueue(state).close()
    file = state / QUEUE
    file.write_bytes(file.read_bytes().replace(b"submitted_by TEXT", b"submitted_by BLOB"))
    before = file.read_bytes()
    with (
        pytest.raises(DamagedError, match=r"jobs.sqlite"),
        begin(state, standby=standby, tell=print),
    ):
        pass
    assert file.read_bytes() == before


@pytest.mark.parametrize("standby", [False, True])
def test_a_queue_that_another_server_is_making_is_not_damaged(state, standby):
    """Two that start on a new directory, or one after a kill: there are no tables yet."""
    with contextlib.closing(sqlite3.connect(state / QUEUE)) as begun:
        begun.execute("PRAGMA journal_mode=WAL")
    with begin(state, standby=standby, tell=print) as held:
        JobQueue(state, held.fence).close()
    check(state)
