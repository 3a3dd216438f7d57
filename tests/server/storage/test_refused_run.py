"""The corrected job can have the directory of one that was refused; a run that began keeps it."""

import dataclasses

import pytest
from tests.server.storage.rounds import commit_round, plan_round

from isthmus.errors import UserError
from isthmus_server.runs.local.session import LocalRun
from isthmus_server.storage.events import ParticipantJoined
from isthmus_server.storage.head_file import HeadFile
from isthmus_server.storage.run_description import remove_refused_run


@pytest.fixture
def refused_run(new_run):
    """The store of a run that was refused once its task was loaded."""
    store = new_run()
    with pytest.raises(UserError), store.locked():
        raise UserError("'nothing.*' matches no exchanged tensor")
    return store


def test_the_corrected_job_can_have_the_directory(refused_run, make_job, tmp_path):
    refused_run.close()
    store = LocalRun.new(make_job("rounds=3"), tmp_path, refused_run.directory).store
    assert (store.status(), store.job.rounds) == (("running", "", None), 3)
    assert store.run_id != refused_run.run_id
    store.close()


def test_nothing_of_a_refused_run_is_left(refused_run):
    directory = refused_run.directory
    refused_run.close()
    remove_refused_run(directory)
    left = sorted(path.name for path in directory.iterdir())
    assert left == ["checkpoints", "lock", "logs"]
    remove_refused_run(directory)
    remove_refused_run(directory / "nowhere")


def plan(store):
    plan_round(store, 1)


def commit(store):
    commit_round(store, 1)


def be_joined(store):
    store.log_event(ParticipantJoined(participant="a"))


def wait(store):
    store.save_elapsed(3.0)


def run_on(store):
    store.reopen()


def finish(store):
    store.finish("finished", "done", None)


def keep_a_log(store):
    (store.directory / "logs" / "client-0.log").write_text("it failed")


def keep_a_ledger(store):
    (store.directory / "privacy.ledger").write_text("{}")


def keep_a_checkpoint(store):
    store.checkpoints.write_model(0, bytes(8))


def lose_the_log(store):
    (store.directory / "run.sqlite").write_bytes(b"damaged")


def lose_the_end_of_the_log(store):
    """As a copy without the write-ahead log; the rest says that nothing has begun."""
    head = HeadFile(store.directory / "run.head")
    newest = head.read()
    head.write(dataclasses.replace(newest, changes=newest.changes + 3))


def have_a_file_for_a_folder(store):
    (store.directory / "logs").rmdir()
    (store.directory / "logs").write_bytes(b"")


@pytest.mark.parametrize(
    "begin",
    [
        plan,
        commit,
        be_joined,
        wait,
        run_on,
        finish,
        keep_a_log,
        keep_a_ledger,
        keep_a_checkpoint,
        lose_the_log,
        lose_the_end_of_the_log,
        have_a_file_for_a_folder,
    ],
)
def test_a_run_that_may_have_begun_stays_as_it_is(refused_run, make_job, tmp_path, begin):
    begin(refused_run)
    directory = refused_run.directory
    refused_run.close()

    def files():
        paths = (path for path in directory.rglob("*") if path.is_file())
        return {path: path.read_bytes() for path in paths if "run.sqlite-" not in path.name}

    before = files()
    with pytest.raises(UserError, match="already contains a run"):
        LocalRun.new(make_job(), tmp_path, directory)
    assert files() == before


def test_a_run_that_another_process_holds_stays_as_it_is(refused_run, open_again):
    with (
        open_again(refused_run).locked(),
        pytest.raises(UserError, match=r"^another process runs "),
    ):
        remove_refused_run(refused_run.directory)
    assert (refused_run.directory / "job.json").exists()
