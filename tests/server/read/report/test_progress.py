"""The lines that `ProgressView` prints without a terminal."""

import dataclasses
import time
from io import StringIO

import pytest
from hypothesis import given, settings
from rich.console import Console
from tests.core.test_printable import ANY_TEXT
from tests.server.storage.records import comparison_record, failed_attempt, round_record

import isthmus_server.read.report.progress
from isthmus.wire import link_pb2
from isthmus_server.read.report.progress import ProgressView, waiting_for
from isthmus_server.storage.events import (
    ModelsCompared,
    ParticipantDeclined,
    ParticipantLeft,
    ParticipantProgress,
    ParticipantReady,
    Paused,
    RoundAttemptFailed,
    RoundCommitted,
    RoundPlanned,
    RunFinished,
    WaitingForParticipants,
)
from isthmus_server.storage.records import (
    FinalModel,
    Receipt,
    StepFigures,
)
from isthmus_server.strategy.policy import Comparison


@pytest.fixture
def shown(monkeypatch):
    """`shown()`: the lines so far, of a `ProgressView` whose clock the test sets."""
    output = StringIO()
    with ProgressView(Console(file=output, width=200)) as view_:

        class Shown:
            now = time.monotonic()

            @staticmethod
            def monotonic():
                return Shown.now

            view = staticmethod(view_)

            def __call__(self):
                return [line.strip() for line in output.getvalue().splitlines()]

        monkeypatch.setattr(isthmus_server.read.report.progress, "time", Shown)
        yield Shown()


def progress(name, steps, **more):
    return ParticipantProgress(
        participant=name,
        steps=steps,
        total_steps=50,
        loss=1.25,
        examples_per_second=1234.5,
        **more,
    )


def test_a_note_is_printed_once_and_without_delay(shown):
    shown.view(
        ParticipantProgress(participant="cluster-0", note="layout: zero_stage=0 [as it fits]")
    )
    assert shown() == ["cluster-0: layout: zero_stage=0 [as it fits]"]


def test_progress_is_printed_at_intervals_for_each_datacenter(shown):
    shown.view(progress("cluster-0", 1))
    assert shown() == []
    for later in (10, 5, 6):
        shown.now += later
        type(shown).now = shown.now
        shown.view(progress("cluster-0", later, units_per_second=9000.0))
    shown.view(progress("cluster-1", 7, units_per_second=1234.5))
    assert shown() == [
        "cluster-0: step 10 of 50, loss 1.25, 1,234 examples/s (9,000 scored units/s)",
        "cluster-0: step 6 of 50, loss 1.25, 1,234 examples/s (9,000 scored units/s)",
        "cluster-1: step 7 of 50, loss 1.25, 1,234 examples/s",
    ]


def test_a_wait_is_printed_again_only_when_it_changes(shown):
    """It is published again every few seconds, for those that have come to watch meanwhile."""
    for ready in (1, 1, 2, 2):
        type(shown).now += 60.0
        shown.view(WaitingForParticipants(clients=3, datacenters=0, ready=ready))
    lines = [f"waiting for 3 devices; ready: {ready} of 3 devices" for ready in (1, 2)]
    assert shown() == lines


def test_figures_of_steps_are_printed_once(shown):
    """Reports repeat the last ones, and the round has all of them."""
    figures = {"loss": 0.5, "gradient_norm": 2.0, "learning_rate": 0.001, "units_per_second": 9e3}
    steps = [{"step": step, **figures} for step in (5, 10, 15)]
    del steps[1]["learning_rate"]
    for first in (0, 1):
        message = link_pb2.Progress(step_figures=steps[first : first + 2])
        shown.view(ParticipantProgress.from_message("dc", message))
    last = StepFigures.of(link_pb2.StepFigures(**{**figures, "step": 20}))
    earlier = [StepFigures.of(link_pb2.StepFigures(**each)) for each in steps]
    record = dataclasses.replace(round_record(1), step_figures={"dc": [*earlier, last]})
    shown.view(RoundCommitted(record=record))
    rate = ", learning rate 0.001"
    assert [line for line in shown() if line.startswith("dc: ")] == [
        f"dc: step {step}: loss 0.5, gradient norm 2{'' if step == 10 else rate}, "
        "9,000 scored units/s"
        for step in (5, 10, 15, 20)
    ]


def test_progress_of_devices_is_not_shown(shown):
    shown.now = type(shown).now = shown.now + 60
    shown.view(ParticipantProgress(participant="edge-1", steps=3))
    assert shown() == []


def test_names_and_reasons_are_shown_as_plain_text(shown):
    """Brackets are rich's markup: no text from participants may end a run or be styled."""
    text = "[/a] is no [/INST] of [red]mine[/red]\\"
    receipt = Receipt(participant=text, regime="federated", status="rejected", reason=text)
    for event in (
        ParticipantDeclined(participant=text, reason=text),
        ParticipantLeft(participant=text, reason=text),
        ParticipantReady(participant=text, examples=3),
        Paused(round=1, seconds=1.0, reason=text),
        RoundPlanned(round=1, attempt=2, regime="federated", reason=text, invited=2),
        RoundCommitted(record=round_record(1, [receipt], reason=text, metrics={text: 1.0})),
        ModelsCompared(record=comparison_record(("current", "served"), error=text)),
        RoundAttemptFailed(record=failed_attempt(1, [receipt], error=text)),
        RunFinished(
            reason=text,
            spent=1.0,
            final=FinalModel(metrics={text: 1.0}, model_sha256="00", model_path=text, round=1),
        ),
    ):
        shown.view(event)
    assert sum(line.count(text) for line in shown()) == 14


@settings(max_examples=30)
@given(ANY_TEXT)
def test_no_event_of_a_server_forges_lines_or_controls_the_terminal(text):
    """`isthmus logs` shows what a server sends; texts come from participants too."""
    receipt = Receipt(participant=text, regime="federated", status="dropped", reason=text)
    final = FinalModel(metrics={text: 1.0}, model_sha256="00", model_path=text, round=1)
    comparison = Comparison(
        models=(text,), devices=1, score={text: 0.1}, difference={}, standard_error={}, price=0.0
    )
    record = comparison_record((text,), comparison)
    events = {
        1: [
            ParticipantDeclined(participant=text, reason=text),
            ParticipantLeft(participant=text, reason=text),
            ParticipantProgress.from_message(text, link_pb2.Progress(note=ascii(text))),
            Paused(round=1, seconds=1.0, reason=text),
            RoundAttemptFailed(record=failed_attempt(1, error=text)),
            ModelsCompared(record=record),
        ],
        2: [RoundCommitted(record=round_record(1, [receipt], reason=text, metrics={text: 1.0}))],
        3: [RunFinished(reason=text, spent=1.0, final=final)],
    }
    for event, count in ((event, count) for count, group in events.items() for event in group):
        output = StringIO()
        with ProgressView(Console(file=output, width=200)) as view:
            view(event)
        lines = output.getvalue().split("\n")[:-1]
        assert all(line.isprintable() for line in lines)
        assert len(lines) <= count


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (WaitingForParticipants(clients=0, datacenters=1), "waiting for 1 datacenter"),
        (
            WaitingForParticipants(clients=4, datacenters=1, ready=1, missing=("a",)),
            "waiting for 4 devices and 1 datacenter; ready: 1 of 4 devices; missing: a",
        ),
        (
            WaitingForParticipants(clients=4, datacenters=0, away=9, check_ins=(60.0, 90.0, 180.0)),
            "waiting for 4 devices; ready: 0 of 4 devices; 9 devices are away until they check in, "
            "the next at 00:01, 00:01 and 00:03 UTC",
        ),
        (
            WaitingForParticipants(clients=4, datacenters=0, ready=5, away=9, check_ins=(60.0,)),
            "waiting for more participants; ready: 5 devices",
        ),
        (
            WaitingForParticipants(clients=4, datacenters=0, ready=5, missing=("phone-1",)),
            "waiting for phone-1; ready: 5 devices",
        ),
        (
            WaitingForParticipants(clients=1, datacenters=1, ready=1, missing=("dc",)),
            "waiting for 1 datacenter; ready: 1 device; missing: dc",
        ),
        (
            WaitingForParticipants(clients=4, datacenters=0, ready=5),
            "waiting for more participants; ready: 5 devices",
        ),
        (
            WaitingForParticipants(clients=4, datacenters=0, ready=5, reason="it needs others"),
            "waiting for more participants; ready: 5 devices; it needs others",
        ),
    ],
)
def test_a_wait_names_only_what_is_needed(event, line):
    assert waiting_for(event) == line


LONG = (
    "the gradients of both sides agree by {} within {} of each other, "
    + "as far as it is known " * 4
)


def test_a_long_reason_is_told_once_and_then_shortened(shown):
    shown.view(RoundCommitted(record=round_record(1, reason=LONG.format(0.25, "3 %"))))
    shown.view(RoundCommitted(record=round_record(1, reason=LONG.format(0.5, "4 %"))))
    shown.view(RoundCommitted(record=round_record(1, reason="a short one")))
    first, second, third = (line for line in shown() if line.startswith("round"))
    assert first.endswith(LONG.format(0.25, "3 %").strip())
    assert second.endswith(f" {LONG.format(0.5, '4 %')[:77].strip()}...")
    assert third.endswith("a short one")


def test_devices_and_datacenters_of_a_hybrid_round_are_counted_apart(shown):
    def receipt(name, regime, status="accepted"):
        return Receipt(participant=name, regime=regime, status=status)

    receipts = [receipt(name, "federated") for name in "abc"]
    receipts += [receipt("d", "federated", "dropped"), receipt("dc", "datacenter")]
    shown.view(RoundCommitted(record=round_record(1, receipts, regime="hybrid")))
    assert " 3/4+1/1 " in shown()[0]
