"""The report as a page: everything is in it, nothing is loaded, and no text becomes markup."""

import dataclasses
import html.parser
import io
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner
from rich.console import Console
from tests.server.read.report.test_suspected_devices import rounds
from tests.server.storage.records import (
    FINAL,
    failed_attempt,
    failed_evaluation,
    planned_attempt,
    round_record,
)

from isthmus.errors import UserError
from isthmus_server.cli import run as commands
from isthmus_server.read.pages import report_page
from isthmus_server.read.pages.report_page import html_page
from isthmus_server.read.report.report import Report, read_report, show
from isthmus_server.read.report.suspected_devices import suspicions
from isthmus_server.storage.events import (
    LayoutChanged,
    ParticipantLeft,
    RunAdopted,
    ServerTakenOver,
)
from isthmus_server.storage.records import CommittedState, Receipt
from isthmus_server.storage.store import Store

HOSTILE = "<script>alert(1)</script>\x1b\"'><img src=//evil.example/x>"


class Page(html.parser.HTMLParser):
    """The elements of a page, each closed in its turn, and its text."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.texts, self.titles, self.attributes = [], [], [], []
        self._open = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":  # which has no end
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join(self.texts)


def filled_store(make_job, folder, receipts):
    store = Store.create(folder / "run", make_job("budget=50", "rounds=9"), folder)
    store.plan(planned_attempt(1))
    store.fail(failed_attempt(1, receipts, error=f"the quorum is 3 ({HOSTILE})"))
    for number, (regime, metrics) in enumerate(
        (("federated", {"accuracy": 0.5, "loss": 2.0}), ("datacenter", {"accuracy": 0.75})), 1
    ):
        store.plan(planned_attempt(number, attempt=number + 1))
        record = round_record(
            number,
            receipts if regime == "federated" else (),
            attempt=number + 1,
            regime=regime,
            reason=f"{regime} is better",
            metrics={**metrics, HOSTILE: float("nan")},
            profile={HOSTILE: {"mfu": 0.5}} if regime == "datacenter" else {},
        )
        store.commit(record, CommittedState())
    store.log_event(ParticipantLeft(participant=HOSTILE, reason=HOSTILE))
    return store


def test_a_page_has_everything_and_loads_nothing(make_job, tmp_path):
    receipts = [
        Receipt(participant="a", regime="federated", status="accepted"),
        Receipt(participant="b", regime="federated", status="rejected", reason=HOSTILE),
        Receipt(participant="c", regime="federated", status="dropped", reason="it is gone"),
        Receipt(participant="d", regime="federated", status="dropped", reason="over", late=True),
    ]
    store = filled_store(make_job, tmp_path, receipts)
    running = html_page(read_report(store), now=0.0)
    store.finish("finished", "all rounds are done", FINAL)
    assert FINAL.model_sha256 in Page(html_page(read_report(store))).text
    store.finish("failed", "the disk is full", None)
    store.close()
    file = tmp_path / "page.html"
    arguments = [str(tmp_path / "run"), "--html"]
    result = CliRunner().invoke(commands.report, [*arguments, str(file)], catch_exceptions=False)
    assert result.output == f"the report is in {file}\n"
    CliRunner().invoke(commands.report, arguments)
    by_default = (tmp_path / "run" / "report.html").read_text()
    assert by_default.partition("<footer>")[0] == file.read_text().partition("<footer>")[0]
    with pytest.raises(UserError, match=r"^give --json or --html, and run"):
        CliRunner().invoke(
            commands.report, [*arguments, str(file), "--json"], catch_exceptions=False
        )
    for text in (running, file.read_text()):
        assert "<script" not in text
        assert "\x1b" not in text
        page = Page(text)
        assert {"img", "link", "iframe", "script", "object"}.isdisjoint(page.tags)
        assert {"src", "href", "onload", "style"}.isdisjoint(name for name, _ in page.attributes)
        assert page.tags.count("svg") == 8
        for shown in (
            "2 of 9",
            "federated is better",
            "datacenter is better",
            "cost: 3 of 50",
            "2 accepted, 2 rejected, 2 dropped, 2 late",
            "d",
            "accuracy 75.0%",
            "the quorum is 3 (<script>alert(1)",
        ):
            assert shown in page.text, shown
    assert ": stopped</h1>" in running  # no process works on it
    assert "What else happened" not in running
    assert "the disk is full" in file.read_text()


def test_a_page_says_what_else_happened_as_the_printed_report_does(make_job, tmp_path):
    store = filled_store(make_job, tmp_path, [])
    store.plan(planned_attempt(3))
    failed = failed_evaluation(f"2 of 3 answered {HOSTILE}")
    clipped = round_record(3, training={"federated": {"clipped": 0.25}}, evaluation=failed)
    store.commit(clipped, CommittedState())
    store.log_event(RunAdopted(original=HOSTILE, by="ann", stated="original is gone"))
    takeover = ServerTakenOver(by="process 2 on b", before="process 1 on a", why="ended", round=3)
    store.log_event(takeover)
    store.log_event(LayoutChanged(round=2, changes={"datacenter.ranks": 4}))
    page = html_page(read_report(store))
    text = Page(page).text
    printed = io.StringIO()
    show(read_report(store), Console(file=printed, width=500))
    for sentence in (
        "round 3: 25.00% of the elements of the devices' updates were out of range",
        "round 3: an evaluation on devices failed: 2 of 3 answered <script>alert(1)</script>",
        "ann had this copy take the place of <script>alert(1)</script>",
        takeover.sentence,
        "ranks train in another layout from round 2 on: datacenter.ranks=4",
    ):
        assert sentence in text
        assert sentence in printed.getvalue()
    assert "<script" not in page


def test_the_name_of_a_metric_cannot_change_how_a_line_is_read(make_job, tmp_path):
    store = Store.create(tmp_path / "run", make_job(), tmp_path)
    store.plan(planned_attempt(1))
    store.commit(round_record(1, [], metrics={"a\u202eb\nc": 0.5}), CommittedState())
    printed = io.StringIO()
    show(read_report(store), Console(file=printed, width=500))
    assert "a\\u202eb\\nc 0.5" in printed.getvalue()
    assert "\u202e" not in html_page(read_report(store))


def test_a_page_is_written_without_the_console_and_its_server():
    script = (
        "import sys; import isthmus_server.read.pages.report_page; "
        "others = 'isthmus_server.read.console', 'starlette'; "
        "print([name for name in sys.modules if name.startswith(others)])"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    assert done.stdout.decode().strip() == "[]"


def test_a_long_run_gives_a_page_of_bounded_size(make_job, tmp_path):
    store = Store.create(tmp_path / "run", make_job(), tmp_path)
    empty = read_report(store)
    store.close()
    assert "No round has ended so far." in html_page(empty)
    receipts = [
        Receipt(participant=f"phone-{n}", regime="federated", status="dropped", reason="it is gone")
        for n in range(2)
    ]
    rounds = [round_record(n, receipts, metrics={"accuracy": 0.5}) for n in range(1, 5001)]
    report = Report(**{**vars(empty), "rounds": rounds})
    began = time.process_time()
    page = html_page(report)
    assert time.process_time() - began < 60.0  # a guard against quadratic time
    lines = [value for name, value in Page(page).attributes if name == "points"]
    assert [len(line.split()) for line in lines] == [1000] * 2
    assert len(page) < 3_000_000
    assert "The latest 2,000 attempts; isthmus report --json has all 5,000." in page


def test_a_page_of_many_incidents_still_says_which_devices_to_look_at(
    make_job, tmp_path, monkeypatch
):
    monkeypatch.setattr(report_page, "MAX_ROWS", 2)
    store = Store.create(tmp_path / "run", make_job(), tmp_path)
    empty = read_report(store)
    store.close()
    clipped = {"federated": {"clipped": 0.25}}
    found = [dataclasses.replace(each, training=clipped) for each in rounds(40, ["phone-003"])]
    text = Page(html_page(Report(**{**vars(empty), "rounds": found}))).text
    (sentence,) = suspicions(found)
    assert sentence in text
    assert "round 40: 25.00% of the elements" in text
    assert "round 38: 25.00% of the elements" not in text
