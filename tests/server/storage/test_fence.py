"""A server that another one has taken over from changes nothing any more, whatever it was doing."""

import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.privacy.dp.charges import charge
from tests.server.storage.records import round_record
from tests.server.storage.rounds import attempts_of, checkpoint_files, commit_round, plan_round

from isthmus.errors import TakenOver
from isthmus.job import parse_job
from isthmus.system import volumes
from isthmus_privacy.dp.ledger import Ledger
from isthmus_server.runs.jobs.queue import JobQueue
from isthmus_server.runs.jobs.running import open_run
from isthmus_server.storage import recovery
from isthmus_server.storage.fence import QUEUE, Fence, epoch_of, move_on, write_lock
from isthmus_server.storage.records import CommittedState, RoundRecord
from isthmus_server.storage.signed_sums import SignedSum, read_signed_sums

REFUSALS = (TakenOver, sqlite3.IntegrityError)
"""How a file and a database refuse an earlier server."""

HOLD = """
import os, signal, sys
from pathlib import Path
from isthmus.errors import TakenOver
from isthmus_server.storage.fence import Fence

fence = Fence(Path(sys.argv[1]), int(sys.argv[2]))
if sys.argv[3] == "before":
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    with fence.held():
        if sys.argv[3] == "within":
            os.kill(os.getpid(), signal.SIGSTOP)
        Path(sys.argv[1], "changed").touch()
except TakenOver as error:
    print(error)
"""


def begin(state):
    """What a server does when it begins to serve a directory, or takes over."""
    if not (state / QUEUE).exists():
        JobQueue(state).close()
    with write_lock(state / QUEUE) as queue:
        epoch = epoch_of(queue) + 1
        queue.execute(f"PRAGMA application_id={epoch}")
        queue.execute("COMMIT")
    return Fence(state, epoch, forced=True)


@pytest.fixture
def state(tmp_path):
    folder = tmp_path / "state"
    folder.mkdir()
    return folder


@pytest.fixture
def submitted(state, make_job):
    """A job in the queue."""
    with contextlib.closing(JobQueue(state)) as queue:
        return queue.submit(make_job(), "alice", "one")


@pytest.fixture
def serving(state, submitted, tmp_path):
    """Have a server begin, with the run of the job; all are closed at the end of the test."""
    with contextlib.ExitStack() as opened:

        def serve():
            fence = begin(state)
            directory = state / "runs" / submitted.id
            if (directory / "run.sqlite").exists():
                fence.claim(directory / "run.sqlite")
            store = open_run(submitted, directory, tmp_path, fence)
            opened.callback(store.close)
            return store

        yield serve


def test_a_round_of_an_earlier_server_is_not_committed(serving):
    first = serving()
    commit_round(first, 1)
    plan_round(first, 2)
    model = first.checkpoints.write_model(2, b"of the first")
    second = serving()
    with pytest.raises(sqlite3.Error) as refused:
        first.commit(round_record(2, []), CommittedState(models={"current": model}))
    error = first.unusable(refused.value)
    assert isinstance(error, TakenOver)
    assert str(error) == (
        f"another server has taken over {first.log.file}: this one has changed nothing there since"
    )
    for change in (
        lambda: plan_round(first, 2, 2),
        lambda: first.finish("finished", "", None),
        lambda: first.save_elapsed(9.0),
        first.reopen,
    ):
        with pytest.raises(sqlite3.IntegrityError):
            change()
    assert attempts_of(second, RoundRecord) == [(1, 1)]
    commit_round(second, 2, 2)
    assert attempts_of(second, RoundRecord) == [(1, 1), (2, 2)]
    found = [finding.damage for finding in recovery.verify(second.directory)]
    assert set(found) == {""}


def test_a_checkpoint_of_an_earlier_server_replaces_none_of_a_later_one(serving):
    first = serving()
    commit_round(first, 1)
    second = serving()
    commit_round(second, 2)
    (first.directory / "checkpoints/model-000003.safetensors.2.tmp").write_bytes(b"being written")
    before = {path.name: path.read_bytes() for path in first.checkpoints.directory.iterdir()}
    for change in (
        lambda: first.checkpoints.write_model(2, b"other contents"),
        lambda: first.checkpoints.keep_only(()),
        lambda: first.write_final(b"a final model"),
    ):
        with pytest.raises(TakenOver):
            change()
    for name, data in before.items():
        assert (first.checkpoints.directory / name).read_bytes() == data
    assert not (first.directory / "model.safetensors").exists()
    commit_round(second, 3)  # what is left of writes that were refused is removed
    assert checkpoint_files(second) == [
        "model-000002.safetensors",
        "model-000003.safetensors",
        "optimizer-000002.safetensors",
        "optimizer-000003.safetensors",
    ]


def test_what_a_killed_server_has_left_of_a_final_model_is_removed(serving):
    first = serving()
    left = first.directory / f"model.safetensors.{first.fence.epoch}.tmp"
    left.write_bytes(b"cut short")
    serving().write_final(b"a final model")
    assert not left.exists()
    assert (first.directory / "model.safetensors").read_bytes() == b"a final model"


def test_a_signed_sum_of_an_earlier_server_is_not_stored(serving):
    first = serving()
    signed = SignedSum(bytes(32), b"config", b"roster", b"survivors", b"signatures")
    first.signed_sums.add(signed, bytes(32), "job")
    serving()
    with pytest.raises(TakenOver):
        first.signed_sums.add(signed, bytes(32), "job")
    assert len(list(read_signed_sums(first.directory))) == 2


def test_the_queue_of_an_earlier_server_takes_no_job(state, make_job):
    first = begin(state)
    with contextlib.closing(JobQueue(state, first)) as queue:
        entry = queue.submit(make_job(), "alice", "one")
        with contextlib.closing(JobQueue(state, begin(state))) as other:
            with pytest.raises(sqlite3.IntegrityError) as refused:
                queue.mark(entry, "failed")
            assert isinstance(queue.error(refused.value), TakenOver)
            assert [each.state for each in other.entries(9)] == ["queued"]
        with pytest.raises(TakenOver):
            JobQueue(state, first)


def test_the_run_of_a_job_is_not_begun_twice(state, submitted, tmp_path):
    first, second = begin(state), begin(state)
    directory = state / "runs" / submitted.id
    with pytest.raises(TakenOver):
        open_run(submitted, directory, tmp_path, first)
    assert not (directory / "job.json").exists()
    with contextlib.closing(open_run(submitted, directory, tmp_path, second)) as store:
        assert store.status()[0] == "running"


def test_a_run_of_a_directory_with_a_higher_epoch_is_continued(serving, state):
    """As after a restore of the queue, or of a run that was moved to this server."""
    first = serving()
    commit_round(first, 1)
    with write_lock(first.log.file) as log:
        log.execute("PRAGMA application_id=77")
        log.execute("COMMIT")
    second = serving()
    commit_round(second, 2)
    assert attempts_of(second, RoundRecord) == [(1, 1), (2, 1)]


def test_a_ledger_is_taken_from_a_server_that_still_has_it_open(state):
    path = state / "devices.ledger"
    head = state / "devices.head"
    first, second = begin(state), begin(state)
    stopped = Ledger.open(path, guard=contextlib.nullcontext)
    stopped.reserve(charge(round=1))
    stopped._guard = first.held  # it was stopped just now
    with Ledger.open(path, stopped.head, second.held) as ledger:
        ledger.keep_head_in(head)
        ledger.reserve(charge(round=2))
        with pytest.raises(TakenOver):
            stopped.reserve(charge(round=3))
        assert [entry.charge.round for entry in ledger.entries.values()] == [1, 2]
    stopped.close()
    again = Ledger.read(path)
    assert [entry.charge.round for entry in again.entries.values()] == [1, 2]
    assert head.read_text() == str(again.head)
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_earlier_server_does_not_say_what_the_last_line_of_a_ledger_is(state):
    """It may have been stopped between opening the ledger and writing that."""
    path = state / "devices.ledger"
    head = state / "devices.head"
    first = begin(state)
    stopped = Ledger.open(path, guard=first.held)
    with Ledger.open(path, None, begin(state).held) as ledger:
        ledger.keep_head_in(head)
        ledger.reserve(charge(round=1))
        with pytest.raises(TakenOver):
            stopped.keep_head_in(head)
        assert head.read_text() == str(ledger.head)
    stopped.close()


def test_an_earlier_server_does_not_say_what_the_newest_commit_is(serving):
    first = serving()
    commit_round(first, 1)
    second = serving()
    second.log.head.unlink()
    first.log.write_head()
    assert not second.log.head.exists()
    commit_round(second, 2)
    assert {finding.damage for finding in recovery.verify(second.directory)} == {""}


def test_the_epochs_of_a_copy_are_not_those_of_the_original(state):
    """A server that was started once more after the copy has none that one of the copy gets."""
    begin(state)
    copy = state.with_name("copy")
    shutil.copytree(state, copy)
    stopped = begin(state)
    move_on(copy)
    state.rename(state.with_name("away"))
    copy.rename(state)  # at the place of the original
    assert begin(state).epoch > stopped.epoch + 1000
    with pytest.raises(TakenOver), stopped.held():
        pass


def waiting_at(state, fence, where):
    """A process that has stopped itself before or within a change of files."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(state), str(fence.epoch), where],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
    return process


def test_a_process_that_is_stopped_before_a_change_does_not_make_it(state):
    process = waiting_at(state, begin(state), "before")
    begin(state)
    process.send_signal(signal.SIGCONT)
    output, _ = process.communicate(timeout=50)
    assert output == (
        f"another server has taken over {state}: this one has changed nothing there since, and "
        "ends\n"
    )
    assert not (state / "changed").exists()


def test_nobody_takes_over_within_a_change(state):
    process = waiting_at(state, begin(state), "within")
    begun = threading.Event()

    def take_over():
        begin(state)
        assert (state / "changed").exists()  # it is complete by now
        begun.set()

    thread = threading.Thread(target=take_over)
    thread.start()
    thread.join(0.5)
    assert not begun.is_set()
    process.send_signal(signal.SIGCONT)
    process.communicate(timeout=50)
    thread.join()
    assert begun.is_set()


JOB = parse_job('name = "table"\n[task]\nsource = "task.py:Table"\n', [])


@settings(max_examples=25)
@given(
    st.lists(
        st.one_of(
            st.just("begin"),
            st.tuples(st.sampled_from(["commit", "plan", "file"]), st.integers(0, 4)),
        ),
        max_size=14,
    )
)
def test_only_the_last_server_changes_anything(tmp_path_factory, steps):
    state = tmp_path_factory.mktemp("state")
    with contextlib.ExitStack() as opened:
        with contextlib.closing(JobQueue(state)) as queue:
            entry = queue.submit(JOB, "alice", "one")
        directory = state / "runs" / entry.id
        stores = []

        def serve():
            fence = begin(state)
            stores.append(open_run(entry, directory, state, fence))
            opened.callback(stores[-1].close)

        serve()
        expected = []
        committed = 0
        for step in steps:
            if step == "begin":
                serve()
                continue
            what, number = step
            who = number % len(stores)
            store = stores[who]
            is_last = who == len(stores) - 1
            allowed = contextlib.nullcontext() if is_last else pytest.raises(REFUSALS)
            with allowed:
                if what == "file":
                    store.checkpoints.write_model(committed + 1, bytes([who]))
                elif what == "plan":
                    plan_round(store, committed + 1, 1 + who)
                else:
                    commit_round(store, committed + 1, 1 + who)
            if what == "commit" and is_last:
                committed += 1
                expected.append((committed, 1 + who))
        assert attempts_of(stores[-1], RoundRecord) == expected
        assert {finding.damage for finding in recovery.verify(directory)} == {""}


MOUNTS = """\
24 1 8:1 / / rw - ext4 /dev/vda rw
31 24 0:41 / {place} rw,relatime shared:1 - {kind} server:/export rw,vers=4.2
"""


@pytest.fixture
def on_nfs(state, tmp_path, monkeypatch):
    """The state directory is said to be on a volume that several machines have mounted."""
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS.format(place=str(state).replace(" ", "\\040"), kind="nfs4"))
    monkeypatch.setattr(volumes, "MOUNTS", mounts)


def test_a_volume_of_several_machines_has_no_write_ahead_log(on_nfs, serving, state):
    first = serving()
    commit_round(first, 1)
    assert not list(state.rglob("*-wal"))
    assert not list(state.rglob("*-shm"))
    second = serving()
    with pytest.raises(sqlite3.IntegrityError):
        plan_round(first, 2)
    commit_round(second, 2)
    with second.log.not_synced():  # a rollback journal that is not synchronised protects nothing
        assert second.log.connection.execute("PRAGMA synchronous").fetchone() == (3,)


CUT_SHORT = """
import os, sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA cache_spill=1")
db.execute("PRAGMA cache_size=1")
db.execute("BEGIN IMMEDIATE")
db.execute("UPDATE attempts SET planned = planned || zeroblob(900000)")
db.execute("UPDATE attempts SET planned = planned || zeroblob(900000)")
os.kill(os.getpid(), 9)
"""


def test_a_transaction_that_a_crash_cut_short_there_is_undone(on_nfs, serving):
    """This is so for those that only read, such as the check before a run is continued."""
    first = serving()
    commit_round(first, 1)
    file = first.log.file
    first.close()
    subprocess.run([sys.executable, "-c", CUT_SHORT, file])
    assert file.with_name("run.sqlite-journal").stat().st_size > 0
    second = serving()
    assert attempts_of(second, RoundRecord) == [(1, 1)]


@pytest.mark.parametrize(
    ("kind", "shared"),
    [("nfs4", True), ("pvfs2", True), ("fuse.glusterfs", True), ("xfs", False), ("9p", False)],
)
def test_which_volumes_have_several_machines(tmp_path, monkeypatch, kind, shared):
    folder = tmp_path / "a b"
    folder.mkdir()
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS.format(place=str(folder).replace(" ", "\\040"), kind=kind))
    monkeypatch.setattr(volumes, "MOUNTS", mounts)
    assert volumes.is_shared(folder) is shared
    assert not volumes.is_shared(tmp_path)
    monkeypatch.setattr(volumes, "MOUNTS", tmp_path / "none")
    assert not volumes.is_shared(folder)
