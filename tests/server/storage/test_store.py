import os
import pickle
import shutil
import sqlite3
from types import SimpleNamespace

import pytest
import torch
from tests.server.storage.records import FINAL, failed_attempt, planned_attempt, round_record
from tests.server.strategy.observations import observe

from isthmus.errors import UserError
from isthmus.system.file_lock import file_lock
from isthmus_server.storage.checkpoints import Saved
from isthmus_server.storage.events import ParticipantJoined, ParticipantLeft
from isthmus_server.storage.records import (
    CommittedState,
    FailedAttempt,
    Receipt,
    RoundRecord,
)
from isthmus_server.storage.store import Store
from isthmus_server.strategy import Plan


@pytest.fixture
def create(make_job, tmp_path):
    """A run in a directory that did not exist."""
    opened = []

    def create(name="run"):
        opened.append(Store.create(tmp_path / name, make_job(), tmp_path))
        return opened[-1]

    yield create
    for store in opened:
        store.close()


@pytest.fixture
def crash():
    """Open a run anew beside the one that is open, as after a kill."""
    opened = []

    def crash(store):
        opened.append(Store.open(store.directory))
        return opened[-1]

    yield crash
    for store in opened:
        store.close()


def receipts_of(devices):
    return [
        Receipt(participant=f"phone-{number}", regime="federated", status="accepted", bytes_in=9)
        for number in range(devices)
    ]


def plan(store, round_, attempt=1):
    store.plan(planned_attempt(round_, attempt))


def commit(store, round_, attempt=1, price=1.0, model=None, optimizer=None, devices=0, **state):
    plan(store, round_, attempt)
    model = model or store.checkpoints.write_model(round_, bytes([round_]) * 8)
    optimizer = optimizer or store.checkpoints.write_tensors(round_, {"0.momentum": torch.ones(2)})
    record = round_record(round_, receipts_of(devices), price, attempt=attempt)
    store.commit(record, CommittedState(models={"current": model}, optimizer=optimizer, **state))


def attempts(store, kind):
    """Round and attempt of all that were committed, have failed or were cut short."""
    if kind is None:
        unfinished = [one.planned for one in store.logged_attempts() if one.record is None]
        return [(planned.round, planned.attempt) for planned in unfinished]
    return [(one.round, one.attempt) for one in store.attempts() if isinstance(one, kind)]


def checkpoints(store):
    return sorted(path.name for path in (store.directory / "checkpoints").iterdir())


def test_a_new_run_stands_before_its_first_round(create):
    at = create().run_state()
    assert (at.round, at.attempts, at.models, at.spent, at.history) == (0, 0, {}, 0, [])
    assert (at.datacenter_step, at.model_in_datacenter, at.policy_state) == (0, False, {})


def test_a_run_is_found_again_as_it_was_made(create, crash, tmp_path):
    store = create()
    again = crash(store)
    assert (again.run_id, again.job, again.base) == (store.run_id, store.job, tmp_path)
    assert again.status() == ("running", "", None)
    assert store.run_id.startswith("table-")


def test_creating_over_a_run_is_refused(create, make_job, tmp_path):
    create()
    with pytest.raises(
        UserError, match=r"already holds a run; go on with it by `isthmus run --resume"
    ):
        Store.create(tmp_path / "run", make_job(), tmp_path)


def test_a_crash_before_the_run_was_made_leaves_the_directory_usable(
    create, crash, make_job, tmp_path
):
    (create().directory / "job.json").unlink()
    store = Store.create(tmp_path / "run", make_job(), tmp_path)
    assert store.status()[0] == "running"
    assert crash(store).run_id == store.run_id
    store.finish("finished", "done", FINAL)
    assert store.status() == ("finished", "done", FINAL)
    store.close()


def test_a_directory_that_cannot_be_used_is_one_sentence(make_job, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^the run directory .* cannot be used"):
        Store.create(tmp_path / "file" / "run", make_job(), tmp_path)


def test_a_planned_round_that_was_not_committed_did_not_happen(create, crash):
    store = create()
    commit(store, 1, devices=1, datacenter_step=50, policy_state={"turn": 1})
    plan(store, 2)
    store.checkpoints.write_model(2, b"half a round")
    store.checkpoints.write_tensors(2, {"0.momentum": torch.zeros(3)})

    again = crash(store)
    at = again.run_state()
    assert (at.round, at.attempts, at.spent) == (1, 1, 1.0)
    assert (at.device_bytes, at.elapsed) == (9, 4.0)
    assert (at.models["current"].file, at.datacenter_step) == ("model-000001.safetensors", 50)
    assert at.policy_state == {"turn": 1}
    assert attempts(again, None) == [(2, 1)]
    payload = bytearray(8)
    again.checkpoints.read_model(at.models["current"], payload)
    assert payload == b"\1" * 8


def test_a_round_is_repeated_over_its_own_leftovers(create, crash):
    store = create()
    commit(store, 1)
    plan(store, 2)
    store.checkpoints.write_model(2, b"an interrupted attempt")
    (store.directory / "checkpoints" / "model-000002.safetensors.tmp").write_bytes(b"cut sho")

    again = crash(store)
    commit(again, 2)
    assert attempts(again, None) == []
    assert attempts(again, RoundRecord) == [(1, 1), (2, 1)]
    assert checkpoints(again) == [
        "model-000001.safetensors",
        "model-000002.safetensors",
        "optimizer-000001.safetensors",
        "optimizer-000002.safetensors",
    ]


def test_a_file_no_recent_commit_names_is_dropped(create):
    store = create()
    store.checkpoints.write_model(9, b"of an attempt that ended")
    for round_ in (1, 2, 3):
        commit(store, round_)
    assert checkpoints(store) == [
        "model-000002.safetensors",
        "model-000003.safetensors",
        "optimizer-000002.safetensors",
        "optimizer-000003.safetensors",
    ]


def test_a_model_the_datacenter_rounds_still_stand_on_is_kept(create):
    store = create()
    commit(store, 1)
    at = store.run_state()
    files = {"model": at.models["current"], "optimizer": at.optimizer}
    for round_ in (2, 3, 4, 5):
        commit(store, round_, **files, model_in_datacenter=True)
    assert checkpoints(store) == ["model-000001.safetensors", "optimizer-000001.safetensors"]
    assert store.run_state().model_in_datacenter


def test_failed_attempts_count_and_cost(create, crash):
    store = create()
    commit(store, 1, price=4.0)
    for attempt in (1, 2):
        plan(store, 2, attempt)
        store.fail(failed_attempt(2, price=3.0, attempt=attempt))
    at = crash(store).run_state()
    assert (at.round, at.attempts, at.spent) == (1, 2, 10.0)
    assert [(past.round, past.price) for past in at.history] == [(1, 4.0)]
    commit(store, 2, attempt=3, price=1.0)
    at = crash(store).run_state()
    assert (at.round, at.attempts, at.spent) == (2, 0, 11.0)


def test_what_is_held_of_a_round_does_not_grow_with_its_devices(create, crash):
    store = create()
    for round_, devices in ((1, 1), (2, 1000)):
        commit(store, round_, devices=devices)
    few, many = crash(store).run_state().history
    assert many.accepted == 1000
    assert len(pickle.dumps(many)) < len(pickle.dumps(few)) + 10


def test_a_plan_that_was_given_up_is_not_taken_up_after_a_second_crash(create, crash):
    store = create()
    plan(store, 1, 1)
    store.fail(failed_attempt(1))
    assert crash(store).run_state().cut_short is not None
    plan(store, 1, 2)
    store.fail(failed_attempt(1, attempt=2, given_up=True))
    store.finish("failed", "round 1 failed 2 times", None)
    store.reopen()  # somebody resumes it, and it is killed before it has decided anew
    assert crash(store).run_state().cut_short is None


def test_after_an_interrupted_attempt_the_next_has_a_number_of_its_own(create, crash):
    store = create()
    plan(store, 1, 1)
    store.fail(failed_attempt(1))
    plan(store, 1, 2)
    again = crash(store)
    assert again.run_state().attempts == 2  # devices refuse an attempt they have seen
    plan(again, 1, 3)
    commit(again, 1, attempt=3)
    assert attempts(again, FailedAttempt) == [(1, 1)]
    assert attempts(again, None) == [(1, 2)]
    assert attempts(again, RoundRecord) == [(1, 3)]


def test_what_was_planned_and_seen_is_read_back(create):
    store = create()
    planned = planned_attempt(1, plan=Plan("hybrid", "why not"), observation=observe(spent=0.5))
    store.plan(planned)
    (logged,) = store.logged_attempts()
    assert (logged.planned.round, logged.planned.attempt, logged.record) == (1, 1, None)
    assert logged.planned.decision.answer == Plan("hybrid", "why not")
    assert logged.planned.to_json() == planned.to_json()


def test_events_are_kept_in_order(create):
    store = create()
    events = [ParticipantJoined(participant="a"), ParticipantLeft(participant="a", reason="lost")]
    for event in events:
        store.log_event(event)
    assert store.events() == events
    assert [event.at for event in store.events()] == [event.at for event in events]


def test_a_run_that_ended_can_go_on(create, crash):
    store = create()
    store.finish("failed", "too few devices", None)
    assert crash(store).status() == ("failed", "too few devices", None)
    store.reopen()
    assert crash(store).status() == ("running", "", None)


@pytest.mark.parametrize("value", [torch.zeros(()), torch.zeros(0), torch.randn(3, 2).t()])
def test_tensors_survive_with_their_shapes(create, value):
    store = create()
    name = store.checkpoints.write_tensors(
        1, {"0.step": torch.tensor(7.0), "10.a": value, "2.b": torch.ones(2)}
    )
    found = store.checkpoints.read_tensors(name)
    assert found.keys() == {"0.step", "10.a", "2.b"}
    assert found["10.a"].shape == value.shape
    assert torch.equal(found["10.a"], value)
    assert found["0.step"].item() == 7.0


def test_tensors_of_another_precision_are_refused(create):
    with pytest.raises(UserError, match=r"keeps '0\.a' as torch\.float64, which cannot be stored"):
        create().checkpoints.write_tensors(1, {"0.a": torch.zeros(1, dtype=torch.float64)})


def test_no_tensors_are_no_file(create):
    store = create()
    assert store.checkpoints.write_tensors(1, {}) is None
    assert checkpoints(store) == []


def test_the_final_model_lies_beside_the_log(create):
    store = create()
    path = store.write_final(b"first")
    assert store.write_final(b"second") == path
    assert path.read_bytes() == b"second"
    assert path == store.directory / "model.safetensors"


def test_a_checkpoint_that_is_missing_or_of_another_task_is_one_sentence(create):
    store = create()
    with pytest.raises(UserError, match=r"^the checkpoint .*nothing\.safetensors cannot be read"):
        store.checkpoints.read_model(Saved("nothing.safetensors", ""), bytearray(8))
    with pytest.raises(UserError, match="cannot be read"):
        store.checkpoints.read_tensors(Saved("nothing.safetensors", ""))
    name = store.checkpoints.write_model(1, b"12345678")
    with pytest.raises(UserError, match=r"is not a model of this task any more"):
        store.checkpoints.read_model(name, bytearray(9))
    with pytest.raises(UserError):
        store.checkpoints.read_tensors(name)


@pytest.mark.parametrize("at", [0, 9, 15])
def test_a_checkpoint_that_is_not_what_was_written_is_one_sentence(create, at):
    store = create()
    saved = store.checkpoints.write_model(1, bytes(16))
    tensors = store.checkpoints.write_tensors(1, {"0.momentum": torch.ones(4)})
    for one in (saved, tensors):
        path = store.directory / "checkpoints" / one.file
        damaged = bytearray(path.read_bytes())
        damaged[at] ^= 4
        path.write_bytes(damaged)
    with pytest.raises(UserError, match=r"model-000001\.safetensors is damaged: it is not"):
        store.checkpoints.read_model(saved, bytearray(16))
    with pytest.raises(UserError, match=r"optimizer-000001\.safetensors is damaged"):
        store.checkpoints.read_tensors(tensors)


def test_one_process_at_a_time_goes_on_with_a_run_and_others_read_it(create, crash):
    store = create()
    with store.locked():
        other = crash(store)
        assert other.status()[0] == "running"
        with (
            pytest.raises(UserError, match=r"^another process runs .*/run already$"),
            other.locked(),
        ):
            raise AssertionError("unreachable")
    with other.locked():
        pass


def test_of_two_who_begin_a_run_together_one_does(make_job, tmp_path):
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


def test_a_run_that_could_not_begin_is_not_said_to_be_running(create):
    store = create()
    with pytest.raises(UserError), store.locked():
        raise UserError("there is no such policy")
    assert store.status() == ("failed", "there is no such policy", None)
    store.finish("finished", "done", FINAL)
    with pytest.raises(UserError), store.locked():
        raise UserError("the port is in use")
    assert store.status() == ("finished", "done", FINAL)


def test_a_run_that_was_cut_off_and_cannot_go_on_yet_goes_on_where_it_was(create, crash):
    store = create()
    plan(store, 1)
    with pytest.raises(UserError), store.locked():
        raise UserError("the port is in use")
    assert store.status()[0] == "running"
    assert crash(store).run_state().cut_short is not None


def test_a_log_that_is_damaged_is_one_sentence_to_who_goes_on_with_the_run(create):
    store = create()
    commit(store, 1)
    store._db.execute("DROP TABLE attempts")
    sentence = r"^the run directory .* could not be used: no such table: attempts; see to it, then"
    with pytest.raises(UserError, match=sentence), store.locked():
        store.run_state()


def test_a_run_on_a_read_only_medium_is_read_as_it_lies(create, crash, monkeypatch):
    """Here only what the medium says of itself: to have it be so takes a mount."""
    store = create()
    commit(store, 1)
    cut_off = store.directory.with_name("cut-off")
    shutil.copytree(store.directory, cut_off, ignore=shutil.ignore_patterns("*-shm"))
    store.close()
    files = {path.name for path in store.directory.iterdir()}

    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    read = crash(store)
    assert (read.last_round(), len(list(read.attempts()))) == (1, 1)
    assert {path.name for path in store.directory.iterdir()} == files
    with pytest.raises(sqlite3.OperationalError, match="readonly database"):
        commit(read, 2)
    with pytest.raises(UserError, match="it was cut off and lies on a read-only medium; copy it"):
        Store.open(cut_off)


def test_a_run_that_goes_on_is_read_where_its_directory_is_read_only(create, crash, monkeypatch):
    """As in a container that has it mounted so: its newest entries are not in the database yet."""
    store = create()
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    commit(store, 1)
    assert crash(store).last_round() == 1


def test_who_may_not_write_there_is_told_to_copy_the_run(create, monkeypatch):
    """SQLite says no more than that it cannot open the log, as it does of a folder."""
    store = create()
    store.close()
    (store.directory / "run.sqlite").unlink()
    (store.directory / "run.sqlite").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match=r"cannot be read: that takes leave to write there \("):
        Store.open(store.directory)


def test_a_directory_without_a_run_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"does not hold a run \(no job\.json\)$"):
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
def test_a_damaged_run_is_one_sentence(create, file, blob):
    store = create()
    store.close()
    for path in store.directory.glob(file + "*"):
        path.unlink()
    if blob is not None:
        (store.directory / file).write_text(blob)
    with pytest.raises(UserError, match=r"^the run in .* cannot be read: .*[a-z]$") as told:
        Store.open(store.directory)
    assert "\n" not in str(told.value)
