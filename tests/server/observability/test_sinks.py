"""Sinks get every event, and whatever they do, the run is the same."""

import logging
import threading

import pytest

from isthmus_server.observability.sinks import EventSink, SinkThread, sinks_of
from isthmus_server.storage.events import (
    EventStream,
    ParticipantJoined,
    ParticipantProgress,
    RoundCommitted,
    RunFinished,
)

JOINED = ParticipantJoined(participant="a")
PROGRESS = ParticipantProgress(participant="a")


class RecordingSink(EventSink):
    name = "recording"

    def __init__(self):
        self.events = []
        self.closed = False

    def __call__(self, event):
        self.events.append(event)

    def close(self):
        self.closed = True


class HangingSink(RecordingSink):
    name = "hanging"

    def __init__(self):
        super().__init__()
        self.entered, self.released = threading.Event(), threading.Event()

    def __call__(self, event):
        super().__call__(event)
        self.entered.set()
        self.released.wait()


class RaisingSink(RecordingSink):
    name = "raising"

    def __call__(self, event):
        super().__call__(event)
        raise OSError("no route to the tracker")


@pytest.fixture
def hanging():
    sink = HangingSink()
    yield sink
    sink.released.set()


async def test_sinks_that_hang_or_raise_change_nothing_but_a_warning_each(
    deployment, hanging, caplog
):
    await deployment.start()
    _, alone = await deployment.run("alone", "rounds=2")
    events, recording, raising = EventStream(), RecordingSink(), RaisingSink()
    sinks = (hanging, raising, recording)
    hanging.close_seconds = 0.2
    caplog.clear()
    async with sinks_of(events, sinks) as threads:
        report, observed = await deployment.run("observed", "rounds=2", events=events)
    assert observed.model_sha256 == alone.model_sha256
    assert report["failed_attempts"] == []
    assert isinstance(recording.events[-1], RunFinished)
    assert sum(isinstance(event, RoundCommitted) for event in recording.events) == 2
    assert recording.closed
    assert len(hanging.events) == len(raising.events) == 1
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert sorted(warnings) == [
        "the sink 'hanging' receives no more events of this run: it did not end within 0.2 s",
        (
            "the sink 'raising' receives no more events of this run: it failed: OSError: no route "
            "to the tracker"
        ),
    ]
    lost = len(recording.events) - 1
    assert [thread.dropped for thread in threads] == [lost, lost, 0]


def test_a_sink_that_is_busy_with_one_event_for_too_long_is_given_up(hanging, caplog):
    now = 0.0
    thread = SinkThread(hanging, clock=lambda: now)
    thread(JOINED)
    assert hanging.entered.wait(30.0)
    now = 29.0
    thread(JOINED)
    assert thread.given_up == ""
    now = 31.0
    for _ in range(5):
        thread(JOINED)
    assert thread.given_up == "it was busy with one event for 30 s"
    assert thread.dropped == 6
    hanging.released.set()
    thread.close()
    assert hanging.events == [JOINED]
    assert len(caplog.records) == 1


def test_a_slow_sink_loses_progress_first_and_what_it_loses_is_counted(hanging, caplog):
    thread = SinkThread(hanging, capacity=4)
    thread(JOINED)
    assert hanging.entered.wait(30.0)
    for event in (PROGRESS, PROGRESS, PROGRESS, JOINED, JOINED, JOINED):
        thread(event)
    assert thread.dropped == 2
    hanging.released.set()
    thread.close()
    assert hanging.events == [JOINED, PROGRESS, PROGRESS, JOINED, JOINED]
    assert hanging.closed
    assert [record.message for record in caplog.records] == [
        "the sink 'hanging' was too slow: it missed 2 events"
    ]


def test_a_sink_whose_library_ends_the_thread_is_given_up_with_a_warning(caplog):
    class ExitingSink(RecordingSink):
        def __call__(self, event):
            raise SystemExit("no key")

    thread = SinkThread(ExitingSink())
    thread(JOINED)
    thread.close()
    assert thread.given_up == "it failed: SystemExit: no key"
    assert len(caplog.records) == 1
