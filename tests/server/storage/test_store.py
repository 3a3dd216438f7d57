"""The round log: what is committed, what is not, and the state to resume from."""

import pickle

import torch
from tests.server.storage.records import failed_attempt, planned_attempt
from tests.server.storage.rounds import attempts_of, checkpoint_files, commit_round, plan_round
from tests.server.strategy.observations import observe

from isthmus_server.storage.events import ParticipantJoined, ParticipantLeft
from isthmus_server.storage.records import FailedAttempt, RoundRecord
from isthmus_server.strategy import Plan


def test_a_new_run_has_no_round(new_run):
    at = new_run().run_state()
    assert (at.round, at.attempts, at.models, at.spent, at.history) == (0, 0, {}, 0, [])
    assert (at.datacenter_step, at.model_in_datacenter, at.policy_state) == (0, False, {})


def test_a_planned_round_has_no_effect_until_it_is_committed(new_run, open_again):
    store = new_run()
    commit_round(store, 1, devices=1, datacenter_step=50, policy_state={"turn": 1})
    plan_round(store, 2)
    store.checkpoints.write_model(2, b"half a round")
    store.checkpoints.write_tensors(2, {"0.momentum": torch.zeros(3)})

    again = open_again(store)
    at = again.run_state()
    assert (at.round, at.attempts, at.spent) == (1, 1, 1.0)
    assert (at.device_bytes, at.elapsed) == (9, 4.0)
    assert (at.models["current"].file, at.datacenter_step) == ("model-000001.safetensors", 50)
    assert at.policy_state == {"turn": 1}
    assert attempts_of(again, None) == [(2, 1)]
    payload = bytearray(8)
    again.checkpoints.read_model(at.models["current"], payload)
    assert payload == b"\1" * 8


def test_a_round_can_be_repeated_over_files_of_an_interrupted_attempt(new_run, open_again):
    store = new_run()
    commit_round(store, 1)
    plan_round(store, 2)
    store.checkpoints.write_model(2, b"an interrupted attempt")
    (store.directory / "checkpoints" / "model-000002.safetensors.tmp").write_bytes(b"cut sho")

    again = open_again(store)
    commit_round(again, 2)
    assert attempts_of(again, None) == []
    assert attempts_of(again, RoundRecord) == [(1, 1), (2, 1)]
    assert checkpoint_files(again) == [
        "model-000001.safetensors",
        "model-000002.safetensors",
        "optimizer-000001.safetensors",
        "optimizer-000002.safetensors",
    ]


def test_checkpoints_that_no_recent_commit_names_are_deleted(new_run):
    store = new_run()
    store.checkpoints.write_model(9, b"of an attempt that ended")
    for round_ in (1, 2, 3):
        commit_round(store, round_)
    assert checkpoint_files(store) == [
        "model-000002.safetensors",
        "model-000003.safetensors",
        "optimizer-000002.safetensors",
        "optimizer-000003.safetensors",
    ]


def test_a_checkpoint_is_kept_while_later_rounds_depend_on_it(new_run):
    store = new_run()
    commit_round(store, 1)
    at = store.run_state()
    files = {"model": at.models["current"], "optimizer": at.optimizer}
    for round_ in (2, 3, 4, 5):
        commit_round(store, round_, **files, model_in_datacenter=True)
    assert checkpoint_files(store) == ["model-000001.safetensors", "optimizer-000001.safetensors"]
    assert store.run_state().model_in_datacenter


def test_failed_attempts_are_counted_and_paid_for(new_run, open_again):
    store = new_run()
    commit_round(store, 1, price=4.0)
    for attempt in (1, 2):
        plan_round(store, 2, attempt)
        store.fail(failed_attempt(2, price=3.0, attempt=attempt))
    at = open_again(store).run_state()
    assert (at.round, at.attempts, at.spent) == (1, 2, 10.0)
    assert [(past.round, past.price) for past in at.history] == [(1, 4.0)]
    commit_round(store, 2, attempt=3, price=1.0)
    at = open_again(store).run_state()
    assert (at.round, at.attempts, at.spent) == (2, 0, 11.0)


def test_the_history_of_a_round_does_not_grow_with_its_devices(new_run, open_again):
    store = new_run()
    for round_, devices in ((1, 1), (2, 1000)):
        commit_round(store, round_, devices=devices)
    few, many = open_again(store).run_state().history
    assert many.accepted == 1000
    assert len(pickle.dumps(many)) < len(pickle.dumps(few)) + 10


def test_a_plan_that_was_given_up_is_not_resumed(new_run, open_again):
    store = new_run()
    plan_round(store, 1, 1)
    store.fail(failed_attempt(1))
    assert open_again(store).run_state().cut_short is not None
    plan_round(store, 1, 2)
    store.fail(failed_attempt(1, attempt=2, given_up=True))
    store.finish("failed", "round 1 failed 2 times", None)
    store.reopen()  # somebody resumes it, and it is killed before it has decided anew
    assert open_again(store).run_state().cut_short is None


def test_an_interrupted_attempt_keeps_its_number(new_run, open_again):
    store = new_run()
    plan_round(store, 1, 1)
    store.fail(failed_attempt(1))
    plan_round(store, 1, 2)
    again = open_again(store)
    assert again.run_state().attempts == 2  # devices refuse an attempt they have seen
    plan_round(again, 1, 3)
    commit_round(again, 1, attempt=3)
    assert attempts_of(again, FailedAttempt) == [(1, 1)]
    assert attempts_of(again, None) == [(1, 2)]
    assert attempts_of(again, RoundRecord) == [(1, 3)]


def test_planned_attempts_are_read_back(new_run):
    store = new_run()
    planned = planned_attempt(1, plan=Plan("hybrid", "why not"), observation=observe(spent=0.5))
    store.plan(planned)
    (logged,) = store.logged_attempts()
    assert (logged.planned.round, logged.planned.attempt, logged.record) == (1, 1, None)
    assert logged.planned.decision.answer == Plan("hybrid", "why not")
    assert logged.planned.to_json() == planned.to_json()


def test_events_are_read_back_in_order(new_run):
    store = new_run()
    events = [ParticipantJoined(participant="a"), ParticipantLeft(participant="a", reason="lost")]
    for event in events:
        store.log_event(event)
    assert store.events() == events
    assert [event.at for event in store.events()] == [event.at for event in events]


def test_events_alone_do_not_wait_for_the_disk(new_run):
    """A fleet of thousands that connects would otherwise wait for each device."""
    store, levels = new_run(), {}
    for operation, commit in (
        ("event", lambda: store.log_event(ParticipantJoined(participant="a"))),
        ("plan", lambda: plan_round(store, 1)),
    ):
        statements: list[str] = []
        store._db.set_trace_callback(statements.append)
        commit()
        store._db.set_trace_callback(None)
        levels[operation] = [each for each in statements if "synchronous" in each]
    assert levels == {"event": ["PRAGMA synchronous=NORMAL", "PRAGMA synchronous=FULL"], "plan": []}
    assert store._db.execute("PRAGMA synchronous").fetchone() == (2,)


def test_an_event_that_cannot_be_stored_is_stored_with_the_next(new_run, open_again):
    store = new_run()
    first = ParticipantJoined(participant="a")
    other = open_again(store)
    store._db.execute("PRAGMA busy_timeout=0")
    other._db.execute("BEGIN IMMEDIATE")  # the log is locked, as if the disk had failed
    store.log_event(first)
    other._db.execute("ROLLBACK")
    assert other.events() == []
    second = ParticipantLeft(participant="a", reason="lost")
    store.log_event(second)
    assert other.events() == [first, second]


def test_an_ended_run_can_be_reopened(new_run, open_again):
    store = new_run()
    store.finish("failed", "too few devices", None)
    assert open_again(store).status() == ("failed", "too few devices", None)
    store.reopen()
    assert open_again(store).status() == ("running", "", None)


def test_the_final_model_is_in_the_run_directory(new_run):
    store = new_run()
    path = store.write_final(b"first")
    assert store.write_final(b"second") == path
    assert path.read_bytes() == b"second"
    assert path == store.directory / "model.safetensors"


def test_a_kill_before_the_last_commit_is_in_the_head_is_made_up_for(new_run, open_again):
    """The run has ended, so nothing else would write the head again."""
    store = new_run()
    head = store.directory / "run.head"
    before = head.read_bytes()
    store.finish("finished", "all rounds are done", None)
    after = head.read_bytes()
    head.write_bytes(before)
    open_again(store)
    assert (before != after, head.read_bytes()) == (True, after)
