"""What the options of a command turn on."""

import io
import json
import logging
import threading

import pytest
from rich.console import Console
from tests.server.waiting import wait_until

from isthmus_server.observability.observers import Observers
from isthmus_server.observability.sinks import EventSink
from isthmus_server.storage.events import EventStream, ParticipantDeclined
from isthmus_server.storage.store import Store

DECLINED = ParticipantDeclined(participant="phone-0", reason="no [bold]data[/bold]")


@pytest.fixture
def root(monkeypatch):
    """The root logger, whose handlers and level are restored."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [logging.StreamHandler()])
    monkeypatch.setattr(root, "level", logging.INFO)
    return root


@pytest.fixture
def watch(make_job, tmp_path, root):
    """Have an event of a run shown as options say."""

    async def watch(*options):
        observers = Observers.of_options(*options, None, ())
        store = Store.create(tmp_path / "run", make_job(), tmp_path)
        events = EventStream()
        async with observers.watching(store, events, "table-1"):
            events.publish(DECLINED)
        store.close()
        observers.console.print("report  isthmus report run")

    return watch


async def test_the_next_job_does_not_wait_for_a_sink_that_hangs(make_job, tmp_path, caplog):
    """The log says for whom the server gives the last job's sink more time."""
    released, received = threading.Event(), []

    class HangingSink(EventSink):
        name = "hanging"
        close_seconds = 20.0

        def __init__(self, job):
            self.job = job

        def __call__(self, event):
            if self.job.name == "one":
                released.wait(30.0)
            received.append((self.job.name, event))

    tracked = {"hanging": lambda job, run_id, directory, earlier: HangingSink(job)}
    observers = Observers(Console(file=io.StringIO()), trackers=tracked)
    for name in ("one", "two"):
        store = Store.create(tmp_path / name, make_job(f"name={name}"), tmp_path)
        events = EventStream()
        async with observers.watching(store, events, name, waits=False):
            events.publish(DECLINED)
        store.close()
    await wait_until(lambda: "up to 20 s to handle what is left" in caplog.text)
    assert received == [("two", DECLINED)]
    released.set()
    await observers.ended()
    assert received == [("two", DECLINED), ("one", DECLINED)]


async def test_without_options_events_are_lines(watch, capsys):
    await watch("text", False)
    shown = capsys.readouterr().out
    assert "phone-0 declined: no [bold]data[/bold]" in shown
    assert "report  isthmus report run" in shown


async def test_quiet_shows_warnings_only(watch, capsys, root):
    await watch("text", True)
    assert capsys.readouterr().out == ""
    assert not root.isEnabledFor(logging.INFO)
    assert root.isEnabledFor(logging.WARNING)


@pytest.mark.parametrize("quiet", [False, True])
async def test_json_is_all_that_is_written(watch, capsys, quiet):
    await watch("json", quiet)
    logging.getLogger("isthmus_server.test").warning("the disk is full")
    logging.getLogger().handlers[0].flush()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    shown = [line.get("event", line.get("message")) for line in lines]
    assert shown == ["declined", "report  isthmus report run", "the disk is full"][2 * quiet :]
