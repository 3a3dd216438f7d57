"""Creating, opening, locking and reading run directories."""

import contextlib
import json
import os
import re
import shlex
import shutil
import sqlite3
import stat
from types import SimpleNamespace

import pytest
from tests.server.storage.records import FINAL
from tests.server.storage.rounds import commit_round, plan_round

from isthmus.errors import DamagedError, UserError
from isthmus.system.file_lock import file_lock
from isthmus_server.storage.recovery import roll_back
from isthmus_server.storage.run_description import mark_simulated, unusable
from isthmus_server.storage.store import Store


@pytest.mark.parametrize("umask", [0, 0o077])
def test_only_their_owner_reads_the_files_of_a_run(umask, new_run):
    before = os.umask(umask)
    try:
        store = new_run("folder/run")
        for round_ in (1, 2):
            commit_round(store, round_)
        store.write_final(b"model" * 3)
        store.close()
        roll_back(store.directory)
    finally:
        os.umask(before)
    paths = [store.directory, *store.directory.rglob("*")]
    assert {"run.sqlite", "checkpoints", "model.safetensors"} <= {path.name for path in paths}
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in paths}
    for path, mode in modes.items():
        assert mode == (0o700 if path.is_dir() else 0o600), path
    # What is around it may be anybody's.
    assert stat.S_IMODE(store.directory.parent.stat().st_mode) == 0o777 & ~umask


def test_a_directory_that_exists_keeps_its_mode(new_run, tmp_path):
    (tmp_path / "run").mkdir(mode=0o750)
    store = new_run("run")
    assert stat.S_IMODE(store.directory.stat().st_mode) == 0o750
    assert stat.S_IMODE((store.directory / "run.sqlite").stat().st_mode) == 0o600


def test_an_opened_run_has_the_job_it_was_created_with(new_run, open_again, tmp_path):
    store = new_run()
    again = open_again(store)
    assert (again.run_id, again.job, again.base) == (store.run_id, store.job, tmp_path)
    assert again.status() == ("running", "", None)
    assert store.run_id.startswith("table-")


def test_creating_a_run_over_another_one_is_refused(new_run, make_job, tmp_path):
    new_run()
    command = re.escape(f"`isthmus run --resume --run-dir {tmp_path / 'run'}`")
    with pytest.raises(UserError, match=rf"already contains a run; .* {command}, or "):
        Store.create(tmp_path / "run", make_job(), tmp_path)


def test_the_command_that_continues_a_run_can_be_pasted_into_a_shell(make_job, tmp_path):
    directory = tmp_path / "it's mine"
    Store.create(directory, make_job(), tmp_path).close()
    with pytest.raises(UserError, match="already contains a run") as refused:
        Store.create(directory, make_job(), tmp_path)
    command = str(refused.value).split("`")[1]
    assert shlex.split(command) == ["isthmus", "run", "--resume", "--run-dir", str(directory)]


def test_after_a_disk_has_failed_the_command_that_continues_the_run_is_named(tmp_path):
    failure = OSError(5, "Input/output error")
    assert f"`isthmus run --resume --run-dir {tmp_path}`" in str(unusable(tmp_path, failure))
    mark_simulated(tmp_path / "run")
    said = str(unusable(tmp_path / "run", failure))
    assert f"; repair it; then `isthmus simulate --resume --run-dir {tmp_path / 'run'}`" in said


def test_a_directory_is_usable_after_a_crash_before_job_json(
    new_run, open_again, make_job, tmp_path
):
    (new_run().directory / "job.json").unlink()
    store = Store.create(tmp_path / "run", make_job(), tmp_path)
    assert store.status()[0] == "running"
    assert open_again(store).run_id == store.run_id
    store.finish("finished", "done", FINAL)
    assert store.status() == ("finished", "done", FINAL)
    store.close()


def test_a_directory_that_cannot_be_created_is_one_sentence(make_job, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^the run directory .* cannot be used"):
        Store.create(tmp_path / "file" / "run", make_job(), tmp_path)


def test_one_process_locks_a_run_and_others_can_read_it(new_run, open_again):
    store = new_run()
    with store.locked():
        other = open_again(store)
        assert other.status()[0] == "running"
        with (
            pytest.raises(UserError, match=r"^another process runs .*/run already$"),
            other.locked(),
        ):
            raise AssertionError("unreachable")
    with other.locked():
        pass


def test_only_one_of_two_concurrent_creations_succeeds(make_job, tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    with (
        file_lock(directory / "lock", ""),
        pytest.raises(UserError, match=r"^another process runs "),
    ):
        Store.create(
            directory, make_job(), tmp_path
        )  # while the other has not written its job.json
    assert [path.name for path in directory.iterdir()] == ["lock"]


def test_a_run_that_could_not_start_is_stored_as_failed(new_run):
    store = new_run()
    with pytest.raises(UserError), store.locked():
        raise UserError("there is no such policy")
    assert store.status() == ("failed", "there is no such policy", None)
    store.finish("finished", "done", FINAL)
    with pytest.raises(UserError), store.locked():
        raise UserError("the port is in use")
    assert store.status() == ("finished", "done", FINAL)


def test_a_cut_off_run_that_cannot_start_again_stays_resumable(new_run, open_again):
    store = new_run()
    plan_round(store, 1)
    with pytest.raises(UserError), store.locked():
        raise UserError("the port is in use")
    assert store.status()[0] == "running"
    assert open_again(store).run_state().cut_short is not None


def test_a_damaged_log_is_one_sentence_when_the_run_is_resumed(new_run):
    store = new_run()
    commit_round(store, 1)
    store._db.execute("DROP TABLE attempts")
    sentence = (
        r"^the run .* could not be used: .*run.sqlite is damaged \(no such table: attempts\); "
    )
    with pytest.raises(UserError, match=sentence), store.locked():
        store.run_state()


def test_a_run_on_a_read_only_medium_is_read_without_writes(new_run, monkeypatch):
    """Only `statvfs` is simulated, because a real read-only medium needs a mount."""
    store = new_run()
    commit_round(store, 1)
    interrupted = store.directory.with_name("interrupted")
    shutil.copytree(store.directory, interrupted, ignore=shutil.ignore_patterns("*-shm"))
    store.close()

    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    for directory in (store.directory, interrupted):
        files = {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
        with contextlib.closing(Store.open(directory, check=True)) as read:
            assert (read.last_round(), len(list(read.attempts()))) == (1, 1)
            with pytest.raises(sqlite3.OperationalError, match="readonly database"):
                plan_round(read, 2)
        assert files == {
            path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()
        }


def test_an_option_that_was_added_to_the_job_of_a_run_is_noticed(new_run):
    """As one of an optimizer, which had its default."""
    directory = new_run().directory
    path = directory / "job.json"
    table = json.loads(path.read_text())
    table["job"]["strategy"]["server_optimizer"]["options"]["momentum"] = 0.5
    path.write_text(json.dumps(table))
    with pytest.raises(
        DamagedError,
        match=r"job\.json was changed after the run began \(job\.strategy\.server_optimizer\."
        r"options\.momentum was None, is 0\.5\)",
    ):
        Store.open(directory, check=True)


def test_a_live_run_can_be_read_through_a_read_only_mount(new_run, monkeypatch):
    """As in a container that has it mounted so: its newest entries are not in the database yet."""
    store = new_run()
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    commit_round(store, 1)
    with contextlib.closing(Store.open(store.directory, check=True)) as read:
        assert read.last_round() == 1


def test_a_directory_without_a_run_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"contains no run \(no job\.json\)$"):
        Store.open(tmp_path)


def test_a_directory_of_runs_names_one_of_them(make_job, tmp_path):
    """As of a comparison or a sweep."""
    for name in ("federated-1", "adaptive-1"):
        Store.create(tmp_path / name, make_job(), tmp_path).close()
    with pytest.raises(UserError, match=r"below it, such as .*/adaptive-1$"):
        Store.open(tmp_path)


@pytest.mark.parametrize(
    ("file", "blob"),
    [
        ("job.json", "{"),
        ("job.json", "[]"),
        ("job.json", "{}"),
        ("job.json", '{"run_id": "a", "base": "/", "job": {"name": "a"}}'),
        ("run.sqlite", "this is no database, but long enough to look like one" * 100),
        ("run.sqlite", ""),
        ("run.sqlite", None),
    ],
    ids=str,
)
def test_a_damaged_run_directory_is_one_sentence(new_run, file, blob):
    store = new_run()
    store.close()
    for path in store.directory.glob(file + "*"):
        path.unlink()
    if blob is not None:
        (store.directory / file).write_text(blob)
    with pytest.raises(
        UserError, match=r"^the run (in|directory) .* cannot be used: .*[a-z]$"
    ) as told:
        Store.open(store.directory)
    assert "\n" not in str(told.value)
