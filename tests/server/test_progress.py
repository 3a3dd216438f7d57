"""What a person sees of work under way, without a terminal."""

from io import StringIO

import pytest
from rich.console import Console

import isthmus_server.views.progress
from isthmus.wire import link_pb2
from isthmus_server.views.progress import Progress


@pytest.fixture
def shown(monkeypatch):
    """`shown()`: the lines so far, of a `Progress` whose clock the test sets."""
    output = StringIO()
    with Progress(Console(file=output, width=200)) as progress:

        class Shown:
            now = progress._since

            @staticmethod
            def monotonic():
                return Shown.now

            heard = progress.heard
            event = progress

            def __call__(self):
                return [line.strip() for line in output.getvalue().splitlines()]

        monkeypatch.setattr(isthmus_server.views.progress, "time", Shown)
        yield Shown()


def said(steps, **more):
    return link_pb2.Progress(
        steps=steps, total_steps=50, loss=1.25, examples_per_second=1234.5, **more
    )


def test_a_note_is_shown_at_once_and_once(shown):
    shown.heard("cluster-0", link_pb2.Progress(note="layout: zero_stage=0 [as it fits]"))
    assert shown() == ["cluster-0: layout: zero_stage=0 [as it fits]"]


def test_a_line_now_and_then_for_each(shown):
    shown.heard("cluster-0", said(1))
    assert shown() == []
    for later in (10, 5, 6):
        shown.now += later
        type(shown).now = shown.now
        shown.heard("cluster-0", said(later, units_per_second=9000.0))
    shown.heard("cluster-1", said(7, units_per_second=1234.5))
    assert shown() == [
        "cluster-0: step 10 of 50, loss 1.25, 1,234 examples/s (9,000 scored units/s)",
        "cluster-0: step 6 of 50, loss 1.25, 1,234 examples/s (9,000 scored units/s)",
        "cluster-1: step 7 of 50, loss 1.25, 1,234 examples/s",
    ]


def test_devices_are_many_and_not_shown(shown):
    shown.now = type(shown).now = shown.now + 60
    shown.heard("edge-1", link_pb2.Progress(steps=3))
    assert shown() == []


def test_what_participants_say_is_text_and_nothing_else(shown):
    """Brackets are rich's markup: no sentence from elsewhere may end a run, or look like ours."""
    said = "[/a] is no [/INST] of [red]mine[/red]\\"
    row = {
        "round": 1,
        "attempt": 2,
        "regime": "federated",
        "reason": said,
        "error": said,
        "participant": said,
        "participants": {"accepted": 1, "invited": 2},
        "invited": 2,
        "metrics": {said: 1.0},
        "cost": {"price": 1.0},
        "seconds": 1.0,
        "receipts": [{"participant": said, "status": "rejected", "reason": said}],
        "comparison": None,
        "spent": 1.0,
        "model_path": said,
        "model_sha256": "00",
        "examples": 3,
    }
    for kind in (
        *("declined", "left", "ready", "paused", "round", "committed"),
        *("visited", "attempt_failed", "finished"),
    ):
        shown.event(kind, row)
    assert sum(line.count(said) for line in shown()) == 14
