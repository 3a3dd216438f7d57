"""What a run says of the server that took over from the one that had it."""

import contextlib
import io

import pytest
from rich.console import Console
from tests.server.storage.records import failed_attempt, planned_attempt
from tests.server.waiting import wait_until

from isthmus_server.observability.observers import Observers
from isthmus_server.read.report.report import read_report
from isthmus_server.runs.jobs.runner import JobRunner
from isthmus_server.runs.jobs.running import note_takeovers
from isthmus_server.storage import audit, recovery
from isthmus_server.storage.events import EventStream, ServerTakenOver
from isthmus_server.storage.fence import Takeover
from isthmus_server.storage.store import Store
from isthmus_server.transport.link import Link

FIRST = Takeover(10.5, "process 2 on b", "process 1 on a", "was gone")
SECOND = Takeover(20.5, "process 3 on a", "process 2 on b", "had ended")


def test_a_takeover_is_in_the_report_once_with_the_attempt_that_it_cut_short(make_job, tmp_path):
    published = []
    events = EventStream()
    events.subscribe(published.append)
    with contextlib.closing(Store.create(tmp_path / "run", make_job(), tmp_path)) as store:
        note_takeovers(store, events, [FIRST])
        store.plan(planned_attempt(1, 1))
        note_takeovers(store, events, [FIRST])  # as after a pause
        note_takeovers(store, events, [FIRST, SECOND])
        store.fail(failed_attempt(1))
        third = Takeover(30.5, "process 4 on b", "process 3 on a", "had ended")
        note_takeovers(store, events, [third])
        found = [each for each in read_report(store).events if isinstance(each, ServerTakenOver)]
        assert [(each.at, each.round, each.attempt) for each in found] == [
            (10.5, 0, 0),
            (20.5, 1, 1),
            (30.5, 0, 0),
        ]
        assert published == found
        assert [each.sentence for each in found[:2]] == [
            "process 2 on b took over from process 1 on a, which was gone, before the first round",
            "process 3 on a took over from process 2 on b, which had ended, in round 1, attempt 1",
        ]
    assert {finding.damage for finding in recovery.verify(tmp_path / "run")} == {""}


@pytest.mark.parametrize("writable", [True, False])
async def test_a_takeover_is_recorded_and_nothing_waits_for_that(tmp_path, caplog, writable):
    if not writable:
        (tmp_path / "audit.log").mkdir()
    observers = Observers(Console(file=io.StringIO()))
    runner = JobRunner(Link(10.0), tmp_path, observers, takeover=FIRST)
    with contextlib.closing(runner.queue):
        runner.leave()
        await runner.run()
        if not writable:
            await wait_until(lambda: "so that 'takeover' is not recorded there" in caplog.text)
            return
        await wait_until(lambda: audit.read(tmp_path))
    (entry,) = audit.read(tmp_path)
    assert (entry.by, entry.action) == ("process 2 on b", "takeover")
    assert entry.details == {"before": "process 1 on a", "why": "was gone", "jobs": "none"}
