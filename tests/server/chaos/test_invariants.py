"""Each violation is found in the files of a deployment, once."""

import json
from types import SimpleNamespace

import pytest
from tests.server.storage.records import planned_attempt, round_record

from isthmus_server.chaos.invariants import InvariantChecker
from isthmus_server.storage.records import CommittedState, Receipt
from isthmus_server.storage.store import Store


class Files:
    """A deployment of which only the files exist."""

    def __init__(self, folder, store):
        self.runs = folder / "runs"
        self.tasks = folder / "tasks"
        self.devices = 1
        self.processes = {"server": SimpleNamespace(failed="", log="server.log")}
        self.state = {store.directory.name: ("running", "")}
        self.folder = folder

    def jobs(self):
        return self.state

    def participant_state(self, name):
        return self.folder / name


def commit(store, round_):
    planned = planned_attempt(round_)
    store.plan(planned)
    receipts = [
        Receipt(participant=name, regime="federated", status="accepted") for name in planned.invited
    ]
    model = store.checkpoints.write_model(round_, bytes(8))
    record = round_record(round_, receipts, 1.0)
    store.commit(record, CommittedState(models={"current": model}))


@pytest.fixture
def deployed(make_job, tmp_path):
    """A store with two committed rounds, and a checker that has seen them."""
    store = Store.create(tmp_path / "runs/digits-1", make_job(), tmp_path)
    for round_ in (1, 2):
        commit(store, round_)
    checker = InvariantChecker(Files(tmp_path, store))
    assert checker.check() == []
    yield store, checker
    store.close()


def only(violations):
    (violation,) = violations
    return violation


def test_a_round_that_is_gone_or_has_another_model_is_found(deployed):
    store, checker = deployed
    changed = "UPDATE attempts SET record=json_set(record, '$.model_sha256', 'x') WHERE round=1"
    store._db.execute(changed)
    assert "round 1 was" in only(checker.check())
    assert checker.check() == []  # it is reported once
    store._db.execute("DELETE FROM attempts WHERE round=2")
    assert "round 2 was" in only(checker.check())


def test_a_missing_receipt_is_found(deployed):
    store, checker = deployed
    store._db.execute("UPDATE attempts SET planned=json_set(planned, '$.invited', json('[\"z\"]'))")
    assert all("invited ['z']" in violation for violation in checker.check())


def test_a_damaged_and_a_missing_checkpoint_are_found(deployed):
    store, checker = deployed
    path = store.directory / "checkpoints" / store.run_state().models["current"].file
    path.write_bytes(b"damaged")
    assert "of the last commit is damaged" in only(checker.check())
    path.unlink()
    assert "of the last commit is missing" in only(checker.check())


def test_a_failed_job_and_an_ended_process_are_found(deployed):
    _, checker = deployed
    checker.deployment.state = {"digits-1": ("failed", "no device")}
    assert only(checker.check()) == "digits-1 is failed: no device"
    checker.deployment.processes["server"].failed = "ended 5 times"
    assert only(checker.check()) == "server ended 5 times: see server.log"


def test_two_sums_for_a_model_and_a_forgotten_one_are_found(deployed):
    _, checker = deployed
    log = checker.deployment.folder / "phone-0/history.log"
    log.parent.mkdir()

    def write(*entries):
        log.write_text("".join(f"hash {json.dumps(entry)}\n" for entry in entries))

    first = ["unmasked", "run", 1, "model", "abc"]
    write(["begun", "run", 1, 1, 1, 0], first)
    assert checker.check() == []
    write(first, ["unmasked", "other run", 4, "model", "ab"])
    assert only(checker.check()) == "phone-0 has unmasked two sums for model"
    write()
    assert only(checker.check()) == "phone-0 has forgotten a sum that it has helped to unmask"
