"""What the console shows of runs, and how much of them it reads and sends."""

import contextlib
import json
import sqlite3
import time

import pytest
from tests.server.read.console.filled_runs import add_round, filled_run
from tests.server.read.console.serving import ask, rows, served
from tests.server.storage.records import failed_evaluation, planned_attempt, round_record

from isthmus.errors import UserError
from isthmus.system.sealed_files import write_sealed_bytes
from isthmus_server.fleet.presence import FILE
from isthmus_server.fleet.snapshot import FleetSnapshot, Seen
from isthmus_server.read.console.attempt_index import AttemptIndex
from isthmus_server.read.console.pages import PAGE_ROWS
from isthmus_server.read.console.run_page import run_page
from isthmus_server.read.console.shown_run import MAX_POINTS, ShownRun
from isthmus_server.read.console.sources import ConsoleSource
from isthmus_server.storage.events import ServerTakenOver
from isthmus_server.storage.records import CommittedState, Receipt

PRIVACY = 'privacy={mechanism="gaussian", epsilon=8, delta=1e-6}'
HOSTILE = "<script>alert(1)</script>\"'\u202e"


@pytest.fixture
def make_run(make_job, tmp_path):
    stores = []

    def make_run(name, rounds, *settings, **options):
        job = make_job(*settings)
        stores.append(filled_run(tmp_path / "runs" / name, job, tmp_path, rounds, **options))
        return stores[-1]

    yield make_run
    for store in stores:
        store.close()


def test_a_long_run_opens_with_one_page_of_its_rows(make_run):
    store = make_run("long", 120, "rounds=120", devices=20)
    with served(store.directory) as listener:
        status, _, page = ask(listener, "/runs/long")
        assert status == 200
        assert (rows(page, "rounds"), rows(page, "receipts")) == (PAGE_ROWS, PAGE_ROWS)
        assert "of 121 rounds and failed tries" in page
        assert "Charts need JavaScript" in page
        assert "No round was evaluated" not in page  # what only a script knows, it says
        assert len(page) < 60_000
        index = listener.console.source.opened["long"].index
        first = index.rows_read
        assert first < 121 + 2 * PAGE_ROWS  # each row once, and those of the page
        ask(listener, "/runs/long?page=3&receipts=9")
        assert index.rows_read - first < 2 * PAGE_ROWS
        series = ask(listener, "/runs/long/series.json")[2]
        assert len(json.loads(series)["round"]) == 120 <= MAX_POINTS


def test_receipts_are_paged_by_outcome_without_gaps(make_run):
    store = make_run("paged", 40, "rounds=40", devices=7)
    index = AttemptIndex(store.log.connection)
    index.refresh()
    for outcome in ("", "late", "rejected", "reason"):
        total = index.receipts(outcome, 0, 0).total
        found = []
        while len(found) < total:
            page = index.receipts(outcome, len(found), 9).rows
            assert 0 < len(page) <= 9
            found += page
        expected = [
            (record.round, receipt.participant)
            for record in reversed(list(store.attempts()))
            for receipt in record.receipts
            if outcome in ("", receipt.outcome) or (outcome == "reason" and receipt.reason)
        ]
        assert [(row["round"], row["participant"]) for row in found] == expected


def test_text_of_other_machines_is_escaped(make_run):
    store = make_run("hostile", 1, "rounds=3")
    receipt = Receipt(
        participant=HOSTILE, regime="federated", status="rejected", reason=f"no {HOSTILE}"
    )
    store.plan(planned_attempt(2))
    store.commit(round_record(2, [receipt], reason=HOSTILE), CommittedState())
    with served(store.directory) as listener:
        for path in ("/runs/hostile", "/runs/hostile/rounds/2", "/devices"):
            status, _, page = ask(listener, path)
            assert status == 200
            assert "<script>alert" not in page
            assert "\u202e" not in page
        assert "&lt;script&gt;alert(1)" in ask(listener, "/runs/hostile/rounds/2")[2]


@pytest.mark.parametrize("secure", [True, False])
def test_secure_aggregation_hides_figures_of_single_devices(make_run, secure):
    store = make_run("run", 20, "rounds=20", f"federated.secure_aggregation={str(secure).lower()}")
    with served(store.directory) as listener:
        for path in ("/runs/run", "/runs/run/rounds/18"):
            page = ask(listener, path)[2]
            assert (">examples</th>" in page) is not secure
            assert (">loss</th>" in page) is not secure


def test_the_pages_of_a_run_say_what_the_log_says(make_run):
    store = make_run("run", 20, "rounds=24", "budget=400", PRIVACY)
    with served(store.directory) as listener:
        assert ask(listener, "/")[:2][0] == 303
        page = ask(listener, "/runs/run")[2]
        for words in ("too few devices answered", "datacenter, because", "of 400", "(zero-out)"):
            assert words in page
        page = ask(listener, "/runs/run/rounds/3")[2]
        for words in ("What the policy saw", "round 2, datacenter", "try 1 failed", "Round 4"):
            assert words in page
        assert "its owner allows no tasks" in ask(listener, "/devices")[2]
        late = ask(listener, "/runs/run?outcome=late")[2]
        assert rows(late, "receipts") == late.count('data-outcome="late">late</span>') > 0
        rounds = [f"/runs/run/rounds/{number}" for number in ("99", "9" * 18, "9" * 5000, "x")]
        for path in (*rounds, "/runs/other", "/runs/..%2Frun", "/nothing"):
            status, _, text = ask(listener, path)
            assert status == 404
            assert "Back to the start" in text
        assert ask(listener, "/runs/run?page=x&receipts=-4&outcome=1&compare=%00,%22")[0] == 200


def test_the_page_of_a_run_says_who_took_over(make_run):
    store = make_run("run", 3)
    takeover = ServerTakenOver(by="process 2 on b", before="process 1 on a", why="ended", round=3)
    store.log_event(takeover)
    with served(store.directory) as listener:
        assert takeover.sentence in ask(listener, "/runs/run")[2]


def test_the_page_of_a_run_says_in_which_rounds_evaluations_on_devices_failed(make_run):
    store = make_run("run", 3)
    for round_, error in ((4, HOSTILE), (5, "2 of 3 answered"), (6, "2 of 3 answered")):
        store.plan(planned_attempt(round_))
        record = round_record(round_, evaluation=failed_evaluation(error))
        store.commit(record, CommittedState())
    with served(store.directory) as listener:
        page = ask(listener, "/runs/run")[2]
        assert "Rounds 5, 6: evaluations on devices failed: 2 of 3 answered." in page
        assert "Round 4: an evaluation on devices failed: &lt;script&gt;" in page


def test_the_page_of_a_run_reads_its_events_once(make_run):
    store = make_run("run", 3)
    read = []
    with contextlib.closing(ShownRun(store.directory, "run")) as run:
        run.refresh()
        run.store.log.connection.set_trace_callback(read.append)
        run_page(run, {})
    assert sum(" FROM events " in f"{query} " for query in read) == 1


def test_empty_states_have_words(make_run, tmp_path):
    make_run("new", 0, "rounds=5")
    with served(tmp_path / "runs") as listener:
        assert "0 of 5" in ask(listener, "/")[2]
        page = ask(listener, "/runs/new")[2]
        assert "No round is committed so far" in page
        assert "No receipt has this outcome" in page
    with pytest.raises(UserError, match="neither a run"):
        ConsoleSource(tmp_path / "nothing")


def test_participants_that_are_busy_have_what_they_do(tmp_path):
    """Only those that fetch files of a model's start have a note how far they are."""
    trains = {"job": "digits-1", "round": 2, "work": "train_local"}
    fetches = {"job": "digits-2", "round": 0, "work": "prepare", "note": "3 of 8 MB"}
    participants = {
        f"phone-{number}": Seen(kind="client", online=True, busy=[work])
        for number, work in enumerate((trains, fetches))
    }
    found = FleetSnapshot(at=time.time(), running=True, participants=participants, waiting={})
    write_sealed_bytes(tmp_path / FILE, found.to_json())
    with served(tmp_path) as listener:
        status, _, page = ask(listener, "/devices")
    assert status == 200
    assert "<td>digits-1 round 2</td>" in page
    assert "<td>digits-2: 3 of 8 MB</td>" in page


def test_a_console_neither_locks_nor_changes_a_run_that_is_written(make_run):
    store = make_run("run", 5, "rounds=9")
    store.log.connection.execute("PRAGMA busy_timeout=0")  # a lock would be an error at once
    source = ConsoleSource(store.directory)
    for round_ in range(6, 9):
        shown = source.run("run")
        assert len(shown.index.rounds) == round_ - 1
        add_round(store, round_, rounds=9)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        shown.store.log.connection.execute("DELETE FROM attempts")
    store.log.connection.execute("DELETE FROM attempts WHERE round=8")  # as a rollback
    assert len(source.run("run").index.rounds) == 7
    source.close()
