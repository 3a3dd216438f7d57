"""Events: the stream that passes them on, and their JSON."""

import json
import logging
from typing import get_args

import pytest
from tests.server.storage.records import (
    FINAL,
    comparison_record,
    failed_attempt,
    planned_attempt,
    round_record,
)

from isthmus.wire import link_pb2
from isthmus_server.storage.events import (
    AnyEvent,
    CohortAwaited,
    EventStream,
    JobEnded,
    JobPaused,
    LayoutChanged,
    LoggedEvent,
    ModelsCompared,
    ParticipantDeclined,
    ParticipantJoined,
    ParticipantLate,
    ParticipantLeft,
    ParticipantProgress,
    ParticipantReady,
    ParticipantUnready,
    Paused,
    ReportedEvent,
    RoundAttemptFailed,
    RoundCommitted,
    RoundPlanned,
    RunAdopted,
    RunBranched,
    RunFailed,
    RunFinished,
    RunServed,
    RunStopped,
    ServerTakenOver,
    WaitingForParticipants,
    attempt_event,
    event_from_json,
)

EVENTS = [
    WaitingForParticipants(clients=3, datacenters=1),
    ParticipantJoined(participant="a"),
    ParticipantReady(participant="a", examples=9),
    ParticipantLate(participant="a", seconds=7.5, rounds_missed=2, rounds_full=1),
    ParticipantUnready(participant="a", limit=600.0, in_vain=3, rests=4),
    CohortAwaited(round=2, seconds=8.5, given_up=["b"]),
    ParticipantDeclined(participant="a", reason="no data"),
    ParticipantLeft(participant="a", reason="lost"),
    ParticipantProgress(participant="a", steps=1, total_steps=2, loss=float("inf")),
    Paused(round=1, seconds=2.0, reason="night"),
    ModelsCompared(record=comparison_record(("current", "served"))),
    RoundPlanned(round=1, attempt=1, regime="hybrid", reason="x", invited=4),
    RoundCommitted(record=round_record(1)),
    RoundAttemptFailed(record=failed_attempt(1)),
    LayoutChanged(round=3, changes={"datacenter.ranks": 4}),
    RunAdopted(original="/runs/one", by="ann", stated="original is gone"),
    RunBranched(round=2),
    RunServed(deployment="one"),
    ServerTakenOver(by="process 2 on b", before="process 1 on a", why="was gone", round=2),
    RunStopped(round=2, reason="enough", decision=planned_attempt(2).decision),
    RunFinished(reason="all rounds are done", spent=1.0, final=FINAL),
    RunFailed(reason="the disk is full"),
    JobPaused(reason="too few devices", next_try=1.5),
    JobEnded(state="cancelled", reason="an operator cancelled it"),
]


def members(union):
    """The classes of an annotated union, those of unions inside it included."""
    found = set()
    for member in get_args(get_args(union)[0]):
        found |= {member} if isinstance(member, type) else members(member)
    return found


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.kind)
def test_an_event_survives_json(event):
    text = json.dumps(event.to_json())
    again = event_from_json(json.loads(text))
    assert type(again) is type(event)
    assert json.dumps(again.to_json()) == text
    assert json.loads(text)["kind"] == event.kind


def test_every_event_can_be_read_and_every_reported_one_logged():
    classes = {type(event) for event in EVENTS}
    assert members(AnyEvent) == classes
    assert members(LoggedEvent) == {one for one in classes if issubclass(one, ReportedEvent)}


def test_kinds_are_unique():
    assert len({event.kind for event in EVENTS}) == len(EVENTS)


def test_an_ended_attempt_has_one_event():
    assert attempt_event(round_record(1)) == RoundCommitted(record=round_record(1))
    assert attempt_event(failed_attempt(1)) == RoundAttemptFailed(record=failed_attempt(1))


def test_progress_is_read_from_the_message_of_a_participant():
    message = link_pb2.Progress(steps=3, total_steps=9, loss=0.5, note="layout")
    event = ParticipantProgress.from_message("cluster", message)
    assert (event.participant, event.steps, event.total_steps) == ("cluster", 3, 9)
    assert (event.loss, event.note) == (0.5, "layout")


def test_subscribers_receive_events_in_order_until_they_unsubscribe():
    stream, received = EventStream(), []
    unsubscribe = stream.subscribe(lambda event: received.append(("first", event)))
    stream.subscribe(lambda event: received.append(("second", event)))
    one, two = EVENTS[0], EVENTS[1]
    stream.publish(one)
    unsubscribe()
    unsubscribe()
    stream.publish(two)
    assert received == [("first", one), ("second", one), ("second", two)]


def test_a_subscriber_that_raises_is_dropped_with_a_warning(caplog):
    stream, received, calls = EventStream(), [], []

    def fail(event):
        calls.append(event)
        raise ValueError("this view is broken")

    stream.subscribe(fail)
    stream.subscribe(received.append)
    with caplog.at_level(logging.WARNING):
        for event in EVENTS[:2]:
            stream.publish(event)
    assert (len(calls), received) == (1, EVENTS[:2])
    (warning,) = caplog.records
    assert "is unsubscribed: it failed on" in warning.getMessage()
    assert "this view is broken" in caplog.text


async def test_a_view_that_fails_does_not_end_a_run(deployment):
    await deployment.start()
    events = EventStream()
    events.subscribe(lambda event: 1 / 0)
    report, _ = await deployment.run("run", "rounds=1", events=events)
    assert report["status"] == "finished"
