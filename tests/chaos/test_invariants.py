"""Each violation is found in the files of a deployment, once."""

import contextlib
import json
from types import SimpleNamespace

import pytest
from tests.privacy.dp.charges import charge
from tests.server.storage.records import planned_attempt, round_record

from isthmus_chaos.invariants import InvariantChecker
from isthmus_privacy.dp.ledger import LEDGER_FILE, Ledger
from isthmus_server.storage.records import CommittedState, Receipt
from isthmus_server.storage.store import Store


class Files:
    """A deployment of which only the files exist."""

    def __init__(self, folder, store):
        self.job = store.job
        self.server_state = folder
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


def test_a_device_of_a_buffered_run_may_have_its_receipt_in_a_later_round(make_job, tmp_path):
    job = make_job("federated.mode=buffered", "federated.buffer.concurrency=4")
    with contextlib.closing(Store.create(tmp_path / "runs/digits-1", job, tmp_path)) as store:
        for round_ in (1, 2):
            commit(store, round_)
        checker = InvariantChecker(Files(tmp_path, store))
        invited = "UPDATE attempts SET planned=json_set(planned, '$.invited', json('[\"{}\"]'))"
        store._db.execute(invited.format("z") + " WHERE round=2")
        assert checker.check() == []
        store._db.execute(invited.format("z"))
        assert all("and ['z'] were invited" in violation for violation in checker.check())


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


def test_an_attempt_that_is_not_charged_and_a_lost_charge_are_found(make_job, tmp_path):
    """In the ledger of the run, and in that of the population."""
    job = make_job(
        "privacy.mechanism=gaussian", "privacy.epsilon=8", "privacy.delta=1e-5", "rounds=4"
    )
    store = Store.create(tmp_path / "runs/digits-1", job, tmp_path)
    checker = InvariantChecker(Files(tmp_path, store))
    assert not checker.repeatable
    (tmp_path / "privacy").mkdir()
    own, shared = store.directory / LEDGER_FILE, tmp_path / "privacy/devices.ledger"
    invited = planned_attempt(1).invited

    def write(path, *rounds):
        path.unlink(missing_ok=True)
        with Ledger.open(path) as ledger:
            for round_ in rounds:
                ledger.reserve(charge(invited, run=store.run_id, round=round_))

    write(own, 1, 2)
    write(shared, 1)
    for round_ in (1, 2):
        commit(store, round_)
    assert only(checker.check()) == f"digits-1: round 2 attempt 1 is not charged to {invited}"
    write(shared, 1, 2)
    assert checker.check() == []
    evaluated = "UPDATE attempts SET record=json_set(record, '$.evaluation', json(?)) WHERE round=2"
    store._db.execute(evaluated, (json.dumps({"devices": len(invited)}),))
    expected = f"digits-1: the evaluation of round 2 is not charged to {len(invited)} devices"
    assert set(checker.check()) == {expected}  # in both ledgers
    write(shared, 1, 3)
    write(own, 2, 1)
    shared.write_bytes(b"damaged" + shared.read_bytes())
    assert "line 1 of the privacy ledger" in only(checker.check())
    write(own, 1)
    write(shared, 1, 2)
    assert any("has lost charges" in each for each in checker.check())
    store.close()


@pytest.mark.parametrize("another", [("ab", "vector"), ("abc", "another vector")])
def test_two_sums_for_a_model_and_a_forgotten_one_are_found(deployed, another):
    _, checker = deployed
    log = checker.deployment.folder / "phone-0/history.log"
    log.parent.mkdir()

    def write(*entries):
        log.write_text("".join(f"hash {json.dumps(entry)}\n" for entry in entries))

    first = ["unmasked", "run", 1, "model", "abc", "vector", 1]
    again = ["unmasked", "run", 1, "another model", "abc", "another vector", 1]
    write(["begun", "run", 1, 1, 1, 0], first, again)
    assert checker.check() == []
    write(first, again, ["unmasked", "other run", 4, "model", *another, 1])
    assert only(checker.check()) == "phone-0 has unmasked two sums for model"
    write()
    assert only(checker.check()) == "phone-0 has forgotten a sum that it has helped to unmask"
