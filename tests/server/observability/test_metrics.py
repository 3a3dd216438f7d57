"""Metrics: what Prometheus reads of runs, and over which listener."""

import asyncio
import contextlib
import io
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from tests.server.storage.records import failed_attempt, round_record

from isthmus.errors import UserError
from isthmus_server.fleet.snapshot import FleetFigures
from isthmus_server.observability import listener as listener_module
from isthmus_server.observability import metrics
from isthmus_server.observability.listener import MetricsListener
from isthmus_server.observability.metrics import METRICS, RunMetrics, ServerFigures
from isthmus_server.observability.observers import Observers
from isthmus_server.observability.run_figures import RunFigures
from isthmus_server.observability.sinks import SinkThread
from isthmus_server.storage.events import (
    ParticipantDeclined,
    ParticipantJoined,
    ParticipantLeft,
    ParticipantReady,
    RoundAttemptFailed,
    RoundCommitted,
    RoundPlanned,
    WaitingForParticipants,
)
from isthmus_server.storage.fence import Takeover
from isthmus_server.storage.records import Receipt
from isthmus_server.transport import event_loop
from isthmus_server.transport.event_loop import LoopNotAnswering, LoopObserver
from isthmus_server.transport.places import least_needed

PRIVACY = 'privacy={mechanism="gaussian", epsilon=8, delta=1e-6}'

RECEIPTS = (
    Receipt(participant="phone-7", regime="federated", status="accepted", bytes_in=5, bytes_out=9),
    Receipt(participant="phone-8", regime="federated", status="dropped", reason="it is gone"),
    Receipt(participant="phone-9", regime="federated", status="dropped", late=True),
)


def samples(text):
    """Values by name and labels, as a scraper reads them."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def value(text, name, **labels):
    return samples(text)[(name, *sorted({"job": "j", **labels}.items()))]


def test_every_metric_has_its_value_and_no_participant_is_named(make_job):
    job = make_job("budget=50", PRIVACY, "rounds=9")
    figures = RunFigures("j", job, clock=lambda: 107.0)
    for event in (
        ParticipantReady(participant="phone-7", examples=3),
        ParticipantReady(participant="phone-8", examples=3),
        ParticipantReady(participant="phone-9", examples=3),
        ParticipantDeclined(participant="phone-6", reason="no data"),
        ParticipantLeft(participant="phone-8", reason="it is gone"),
        RoundAttemptFailed(record=failed_attempt(1, RECEIPTS[1:], 2.0)),
        RoundCommitted(
            record=round_record(
                1,
                RECEIPTS,
                attempt=2,
                started_at=98.0,
                seconds=4.0,
                epsilon=1.5,
                profile={
                    "dc-0": {"units_per_second": 70.0, "mfu": 0.5, "peak_memory_gib": 2.0},
                    "dc-1": {"units_per_second": 30.0, "mfu": 0.4, "peak_memory_gib": 1.0},
                },
            )
        ),
        RoundPlanned(round=2, attempt=1, regime="federated", reason="x", invited=2),
    ):
        figures(event)
    shown = RunMetrics(clock=lambda: 107.0)
    sink = SinkThread(figures)
    shown.add(figures, (sink,))
    shown.lag = lambda: 0.25
    fleet = FleetFigures(enrolled=9, direct=1, aggregated=3, away=4, aggregators={"a.example": 3})
    shown.server = lambda: ServerFigures(jobs={"queued": 2}, fleet=fleet)
    shown.serving = True
    shown.tenure = 5
    shown.taken_over_at = 90.5
    shown.mirrored = lambda: {"mirror": 3, "link": 1}
    text = shown.text()
    sink.close()
    families = {family.name: family for family in text_string_to_metric_families(text.decode())}
    assert {name.removesuffix("_total") for name in METRICS} <= families.keys()
    assert all(families[name.removesuffix("_total")].samples for name in METRICS)
    assert b"phone" not in text
    assert b"dc-0" not in text
    assert value(text, "isthmus_rounds_total", regime="federated") == 1
    assert value(text, "isthmus_round") == 1
    assert value(text, "isthmus_running") == 1
    assert value(text, "isthmus_rounds_planned") == 9
    assert value(text, "isthmus_failed_attempts_total") == 1
    states = {"ready": 2, "declined": 1, "invited": 2}
    assert {s: value(text, "isthmus_participants", state=s) for s in states} == states
    outcomes = {"accepted": 1, "rejected": 0, "dropped": 2, "late": 2}
    assert {o: value(text, "isthmus_receipts_total", outcome=o) for o in outcomes} == outcomes
    assert value(text, "isthmus_bytes_total", direction="up") == 5
    assert value(text, "isthmus_bytes_total", direction="down") == 9
    assert value(text, "isthmus_round_seconds_bucket", le="3.0") == 0
    assert value(text, "isthmus_round_seconds_bucket", le="10.0") == 1
    assert value(text, "isthmus_round_seconds_sum") == 4.0
    assert (value(text, "isthmus_cost_spent"), value(text, "isthmus_cost_limit")) == (3, 50)
    assert (value(text, "isthmus_epsilon_spent"), value(text, "isthmus_epsilon_limit")) == (1.5, 8)
    assert value(text, "isthmus_datacenter_tokens_per_second") == 100
    assert value(text, "isthmus_datacenter_mfu") == 0.4
    assert value(text, "isthmus_datacenter_peak_memory_bytes") == 2 * 2**30
    assert value(text, "isthmus_checkpoint_age_seconds") == 5
    assert value(text, "isthmus_sink_events_dropped_total", sink="prometheus") == 0
    assert samples(text)[("isthmus_jobs", ("state", "queued"))] == 2
    assert samples(text)[("isthmus_link_lag_seconds",)] == 0.25
    assert samples(text)[("isthmus_mirror_blobs_total", ("source", "mirror"))] == 3
    assert samples(text)[("isthmus_mirror_blobs_total", ("source", "link"))] == 1
    states = {"direct": 1, "aggregated": 3, "away": 4}
    found = {state: samples(text)[("isthmus_devices", ("state", state))] for state in states}
    assert found == states
    assert samples(text)[("isthmus_devices_enrolled",)] == 9
    assert samples(text)[("isthmus_aggregators",)] == 1
    assert samples(text)[("isthmus_aggregator_devices", ("aggregator", "a.example"))] == 3
    assert samples(text)[("isthmus_serving",)] == 1
    assert samples(text)[("isthmus_tenure",)] == 5
    assert samples(text)[("isthmus_takeover_timestamp_seconds",)] == 90.5


def test_many_aggregators_have_no_label_each():
    shown = RunMetrics()
    many = {f"sums-{number:03}.example": number for number in range(80)}
    fleet = FleetFigures(enrolled=0, direct=0, aggregated=0, away=0, aggregators=many)
    shown.server = lambda: ServerFigures(fleet=fleet)
    found = {
        dict(key[1:])["aggregator"]: number
        for key, number in samples(shown.text()).items()
        if key[0] == "isthmus_aggregator_devices"
    }
    assert len(found) == metrics.AGGREGATORS_SHOWN + 1
    assert found["sums-049.example"] == 49
    assert found["*"] == sum(range(50, 80))
    assert samples(shown.text())[("isthmus_aggregators",)] == 80


def test_without_a_server_nothing_is_said_about_one():
    names = {key[0] for key in samples(RunMetrics().text())}
    assert not names & {"isthmus_serving", "isthmus_tenure", "isthmus_devices"}


def test_a_standby_says_that_it_does_not_serve_until_it_does():
    shown = RunMetrics()
    listener = MetricsListener("127.0.0.1", 0, shown)
    observers = Observers(Console(file=io.StringIO()), metrics=listener)
    with observers.answering("it is a standby"):
        waiting = samples(get(listener, "/metrics")[1].encode())
        assert waiting[("isthmus_serving",)] == 0
        assert ("isthmus_tenure",) not in waiting
    observers.note_tenure(2, Takeover(90.5, "process 2 on b", "process 1 on a", "was gone"))
    serving = samples(shown.text())
    assert serving[("isthmus_serving",)] == 1
    assert serving[("isthmus_tenure",)] == 2
    assert serving[("isthmus_takeover_timestamp_seconds",)] == 90.5


def test_the_documentation_has_every_metric():
    page = (Path(__file__).parents[3] / "docs/observe.md").read_text()
    for name, (kind, meaning, labels) in METRICS.items():
        shown = ", ".join(f"`{label}`" for label in labels)
        assert f"| `{name}` | {kind} | {shown} | {meaning.rstrip('.')} |" in page


def test_a_continued_run_counts_each_attempt_once_and_waits_until_it_plans(make_job):
    earlier = [round_record(1), failed_attempt(2)]
    figures = RunFigures("j", make_job(), lambda: earlier)
    figures(WaitingForParticipants(clients=3, datacenters=0))
    assert figures.waiting
    figures(ParticipantDeclined(participant="a", reason="no data"))
    figures(ParticipantJoined(participant="a"))
    assert figures.participants["declined"] == 0
    for record in (*earlier, round_record(2, attempt=2)):
        figures(RoundCommitted(record=record))
    assert (figures.rounds["federated"], figures.failed_attempts, figures.spent) == (2, 1, 3.0)
    figures(RoundPlanned(round=3, attempt=1, regime="federated", reason="x", invited=2))
    assert not figures.waiting
    figures.close()
    assert figures.participants["invited"] == 0


def test_runs_that_ended_long_ago_are_not_shown_any_more(make_job, monkeypatch):
    monkeypatch.setattr(metrics, "ENDED_RUNS", 2)
    shown, job = RunMetrics(), make_job()
    for label in ("a", "b", "b", "c", "d"):
        shown.add(RunFigures(label, job))
        shown.end(label)
    running = {
        dict(key[1:])["job"]: number
        for key, number in samples(shown.text()).items()
        if key[0] == "isthmus_running"
    }
    assert running == {"c": 0, "d": 0}


def get(listener, path, **headers):
    request = urllib.request.Request(f"http://127.0.0.1:{listener.port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30.0) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_the_listener_answers_on_loopback_to_callers_that_name_it(make_job):
    problems = ["the queue of jobs cannot be read: it is\ndamaged"]
    listener = MetricsListener("127.0.0.1", 0, RunMetrics())
    with listener.serving(lambda: problems):
        assert "isthmus_build_info" in get(listener, "/metrics")[1]
        assert get(listener, "/healthz") == (200, "ok\n")
        code, answer = get(listener, "/readyz")
        assert (code, answer) == (503, f"{problems[0]}\n".replace("is\nd", "is\\nd"))
        problems.clear()
        assert get(listener, "/readyz") == (200, "ready\n")
        assert get(listener, "/")[0] == 404
        assert get(listener, "/metrics", Host="example.org")[0] == 403
        again = MetricsListener("127.0.0.1", listener.port, RunMetrics())
        with pytest.raises(UserError, match="cannot be used: Address already in use"):
            again.serving().__enter__()


def test_an_address_in_use_is_refused_before_a_run_is_made():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(UserError, match=f"^--metrics {address} cannot be used: Address"):
            Observers.of_options("text", True, address, ())


def test_without_a_certificate_nothing_but_loopback_is_used():
    with pytest.raises(UserError, match=r"0\.0\.0\.0:0 is not loopback, and without a server's"):
        MetricsListener("0.0.0.0", 0, RunMetrics())


async def test_a_busy_loop_is_seen_and_questions_to_it_end(monkeypatch):
    now = 0.0
    loop = LoopObserver(clock=lambda: now)
    assert loop.lag() == 0.0
    now = 2.0
    assert loop.lag() == 1.5  # was due after half a second
    monkeypatch.setattr(event_loop, "ANSWER_SECONDS", 0.05)
    with pytest.raises(LoopNotAnswering, match=r"did not answer within 0\.05 s"):
        loop.ask(lambda: asyncio.sleep(0, "now"))  # this test is busy in the loop
    assert await asyncio.to_thread(loop.ask, lambda: asyncio.sleep(0, "now")) == "now"


def test_who_holds_all_connections_keeps_nobody_out(monkeypatch):
    """32 silent connections of one address, for 15 seconds each, were all that there are."""
    # Connections of the same address are idle at once.
    monkeypatch.setattr(listener_module, "_IDLE_SECONDS", 0.0)
    listener = MetricsListener("127.0.0.1", 0, RunMetrics())
    with listener.serving(), contextlib.ExitStack() as held:
        for _ in range(3 * listener_module.CONNECTIONS):
            address = ("127.0.0.1", listener.port)
            held.enter_context(socket.create_connection(address, timeout=10))
        for _ in range(3):
            assert get(listener, "/healthz") == (200, "ok\n")


def test_an_address_with_many_connections_makes_room_for_others():
    def caller(network, since):
        return listener_module._MetricsCaller(socket.socket(), network, since)

    now = time.monotonic()
    many = [caller("192.0.2.1", now - age) for age in (0.1, 0.4, 0.2)]
    one = caller("192.0.2.2", now - 0.9)
    assert least_needed("192.0.2.3", [one, *many]) is many[1]
    assert least_needed("192.0.2.1", [one, *many]) is None  # none of them is idle
    old = caller("192.0.2.1", now - 5)
    assert least_needed("192.0.2.1", [one, *many, old]) is old
    for each in (one, old, *many):
        each.connection.close()
