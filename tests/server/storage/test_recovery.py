"""`isthmus runs`: what is damaged in a run directory, and the way back."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.server.storage.records import FINAL
from tests.server.storage.rounds import checkpoint_files, commit_round, plan_round

from isthmus.errors import DamagedError, UserError
from isthmus_server.cli.runs import runs
from isthmus_server.storage.recovery import roll_back
from isthmus_server.storage.schema import SCHEMA
from isthmus_server.storage.sealed_database import SealedDatabase
from isthmus_server.storage.store import Store


@pytest.fixture
def run(new_run):
    """A closed run with three committed rounds, the fourth planned."""
    store = new_run()
    for round_ in (1, 2, 3):
        commit_round(store, round_)
    plan_round(store, 4)
    store.close()
    return store.directory


def damage(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def verify(directory):
    return CliRunner().invoke(runs, ["verify", str(directory)])


def state_of(directory):
    with contextlib.closing(Store.open(directory, check=True)) as store:
        return store.run_state()


def test_an_intact_run_is_verified_file_by_file(run):
    shown = verify(run)
    assert shown.exit_code == 0
    assert [line.split()[0] for line in shown.output.splitlines()] == ["intact"] * 7
    assert "checkpoints/model-000003.safetensors of round 3: 8 bytes" in shown.output


def test_each_damaged_file_is_named(run):
    damage(run / "checkpoints" / "model-000002.safetensors")
    (run / "checkpoints" / "optimizer-000003.safetensors").unlink()
    damage(run / "job.json")
    shown = verify(run)
    assert shown.exit_code == 1
    damaged = [line for line in shown.output.splitlines() if line.startswith("damaged")]
    assert [
        name for name in ("job.json", "model-000002", "optimizer-000003") if name in str(damaged)
    ]
    assert len(damaged) == 3


def test_a_changed_job_is_refused_with_the_key_and_restored_from_the_log(run):
    text = (run / "job.json").read_text()
    (run / "job.json").write_text(text.replace('"seed": 0', '"seed": 7'))
    with pytest.raises(DamagedError, match=r"\(job.seed was 0, is 7\); restore it, or"):
        Store.open(run)
    done = roll_back(run)
    assert (done.round, done.restored) == (3, True)
    assert (run / "job.json").read_text() == text
    assert '"seed": 7' in (done.dropped / "job.json").read_text()
    assert state_of(run).attempts == 1  # the attempt that was cut short


def test_an_intact_run_goes_back_one_round_and_keeps_what_it_drops(run):
    before = state_of(run)
    shown = CliRunner().invoke(runs, ["rollback", str(run)])
    assert shown.exit_code == 0, shown.output
    assert "continues after round 2" in shown.output
    at = state_of(run)
    assert (at.round, at.attempts, at.spent) == (2, 1, before.spent - 1)
    assert at.cut_short is not None  # its plan is carried out again
    (dropped,) = run.glob("dropped-*")
    assert sorted(path.name for path in dropped.iterdir()) == [
        "job.json",
        "model-000003.safetensors",
        "optimizer-000003.safetensors",
        "run.head",
        "run.sqlite",
    ]
    shown = verify(run)
    assert shown.exit_code == 0
    assert shown.output.count("of round 1: none, as after a rollback; the run cannot go back") == 1
    assert len(set(shown.output.splitlines())) == len(shown.output.splitlines())
    with pytest.raises(DamagedError, match="checkpoints of the last 2 committed rounds"):
        roll_back(run)  # the checkpoints of round 1 were not kept


def test_a_damaged_checkpoint_leads_to_the_round_before(run):
    damage(run / "checkpoints" / "optimizer-000003.safetensors")
    assert roll_back(run).round == 2
    assert state_of(run).models["current"].file == "model-000002.safetensors"


def test_the_first_round_can_be_dropped(new_run):
    store = new_run()
    commit_round(store, 1)
    store.close()
    assert roll_back(store.directory).round == 0
    assert (state_of(store.directory).round, checkpoint_files(store)) == (0, [])
    with pytest.raises(UserError, match="has no committed round to go back from"):
        roll_back(store.directory)


def test_a_log_that_lost_commits_is_refused_and_can_be_accepted(new_run, tmp_path):
    store = new_run()
    commit_round(store, 1)
    older = tmp_path / "older"
    shutil.copytree(store.directory, older)
    for round_ in (2, 3):
        commit_round(store, round_)
    store.close()
    assert checkpoint_files(store)[0] == "model-000002.safetensors"
    for path in store.directory.glob("run.sqlite*"):
        path.unlink()
    for path in older.glob("run.sqlite*"):
        shutil.copyfile(path, store.directory / path.name)
    with pytest.raises(DamagedError, match=r"run.sqlite has lost its last \d+ changes"):
        Store.open_to_continue(store.directory)
    (store.directory / "run.head").unlink()
    with pytest.raises(DamagedError, match=r"ends with round 1, but there is a checkpoint of roun"):
        Store.open_to_continue(store.directory)
    for path in (older / "checkpoints").iterdir():
        shutil.copyfile(path, store.directory / "checkpoints" / path.name)
    assert roll_back(store.directory).round == 1
    assert state_of(store.directory).round == 1


def test_a_damaged_final_model_is_refused_and_written_again_by_the_run(new_run):
    store = new_run()
    for round_ in (1, 2):
        commit_round(store, round_)
    store.write_final(b"model")
    store.finish("finished", "done", FINAL)
    with pytest.raises(DamagedError, match=r"model.safetensors is damaged: its digest differs"):
        Store.open_to_continue(store.directory)
    store.close()
    assert roll_back(store.directory).round == 2
    with contextlib.closing(Store.open_to_continue(store.directory)) as again:
        assert again.status() == ("running", "", None)


def test_a_round_that_its_participants_cannot_repeat_is_not_dropped(new_run):
    finished = new_run("finished")
    secure = new_run("secure", "federated.secure_aggregation=true", "federated.clients=0")
    for round_ in (1, 2):
        commit_round(finished, round_, datacenter_step=9)
        commit_round(secure, round_)
    finished.finish("finished", "", None)
    plan_round(secure, 3)
    for store, why in (
        (finished, "the datacenter has deleted its checkpoints since"),
        (secure, "devices have begun round 3 of "),
    ):
        store.close()
        with pytest.raises(UserError, match=why):
            roll_back(store.directory)
        assert state_of(store.directory).round == 2


def test_a_lost_job_file_is_no_reason_to_begin_anew(run, make_job, tmp_path):
    for lost in ("job.json", "run.head"):
        (run / lost).unlink()
        for use in (Store.open, lambda path: Store.create(path, make_job(), tmp_path)):
            with pytest.raises(DamagedError, match=r"job.json is missing; restore it, or let `ist"):
                use(run)
    assert roll_back(run).restored
    assert state_of(run).round == 3


def test_runs_of_other_versions_are_told_apart_from_damaged_ones(run):
    text = (run / "job.json").read_text()
    for found, logged, sentence in (
        (None, 0, "written by an older version of isthmus, before format 5; read it with that"),
        (6, 6, "written by a newer version of isthmus, in format 6; this version reads format 5"),
        (6, 5, "job.json has the format 6 and run.sqlite 5; restore it"),
    ):
        table = json.loads(text)
        table["format"] = found
        (run / "job.json").write_text(json.dumps(table))
        with (run / "run.sqlite").open("r+b") as file:
            file.seek(60)
            file.write(logged.to_bytes(4, "big"))
        with pytest.raises(UserError, match=sentence):
            Store.open(run)


def test_a_job_of_a_newer_version_is_told_apart_from_a_damaged_one(run):
    text = (run / "job.json").read_text().replace('"seed"', '"sead"')
    (run / "job.json").write_text(text)
    with pytest.raises(DamagedError, match=r"job.json has no valid job; restore it, or let `is"):
        Store.open(run)
    with contextlib.closing(SealedDatabase(run / "run.sqlite", SCHEMA)) as log:
        log.connection.execute("UPDATE run SET about=?", (text,))
    with pytest.raises(
        UserError, match="cannot read the job, which may be from a newer one"
    ) as told:
        Store.open(run)
    assert not isinstance(told.value, DamagedError)


def test_a_path_that_is_not_utf_8_is_refused(make_job, tmp_path):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/run-\xff"))
    for use in (Store.open, roll_back, lambda path: Store.create(path, make_job(), tmp_path)):
        with pytest.raises(UserError, match=r"the path b'.*run-\\xff' is not valid UTF-8; choose"):
            use(path)
