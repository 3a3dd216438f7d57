"""The console in a real Chromium: it shows, follows, and asks nobody else."""

import os
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest
from tests.free_ports import free_ports
from tests.machine import CHROMIUM, CHROMIUM_OPTIONS, needs_chromium
from tests.server.read.console.filled_runs import add_round, filled_run

from isthmus.job import load_job

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

pytestmark = needs_chromium

EXAMPLES = Path(__file__).parents[4] / "examples"

FOLLOW_PROBLEMS = """
window.problems = [];
addEventListener("securitypolicyviolation", (event) => problems.push(event.violatedDirective));
"""


class ConsoleProcess:
    """`isthmus console` in a process, which can be started again at the same port."""

    def __init__(self, path, state):
        self.path, self.state = path, state
        self.port = free_ports(1)
        self.start()

    def start(self):
        command = [Path(sys.executable).with_name("isthmus"), "console", self.path]
        self.process = subprocess.Popen(
            [*command, "--address", f"127.0.0.1:{self.port}"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_STATE_HOME": str(self.state)},
        )
        assert select.select([self.process.stdout], [], [], 60)[0]
        self.url = re.fullmatch(r"console at (\S+)\n", self.process.stdout.readline())[1]

    def stop(self):
        self.process.terminate()
        self.process.wait(30)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_OPTIONS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Two runs: one that can go on, and one with receipts of all outcomes."""
    folder = tmp_path_factory.mktemp("console")
    job = load_job(EXAMPLES / "digits/job.toml", ("rounds=40", "budget=400"))
    stores = [
        filled_run(folder / "runs" / name, job, folder, rounds, devices=5)
        for name, rounds in (("first", 4), ("second", 30))
    ]
    yield stores
    for store in stores:
        store.close()


@pytest.fixture(scope="module")
def console(stores, tmp_path_factory):
    runs = stores[0].directory.parent
    process = ConsoleProcess(runs, tmp_path_factory.mktemp("state"))
    yield process
    process.stop()


@pytest.fixture
def page(browser, console):
    """A page that has logged in; its requests and problems are checked at the end."""
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    context.add_init_script(FOLLOW_PROBLEMS)
    page = context.new_page()
    asked, problems = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(console.url)
    yield page
    assert page.evaluate("window.problems") == []
    assert problems == []
    assert {url.split("/")[2] for url in asked} == {f"127.0.0.1:{console.port}"}
    context.close()


def visit(page, console, path):
    page.goto(f"http://127.0.0.1:{console.port}{path}")


def test_the_first_paint_has_the_runs_and_their_charts(page, console):
    assert "token" not in page.url
    sync_api.expect(page.locator("#jobs tbody tr")).to_have_count(2)
    page.get_by_role("link", name="second").click()
    sync_api.expect(page.locator("h1")).to_contain_text("second")
    assert page.locator(".timeline rect[data-regime]").count() == 3
    for box in page.locator("#quality .plot").all():
        sync_api.expect(box.locator("canvas")).to_be_visible()
        assert box.get_attribute("data-points") == "30"
    sync_api.expect(page.locator("#rates canvas")).to_have_count(3)
    for figure in page.locator("#rates figure").all():
        assert figure.evaluate("each => each.scrollWidth <= each.clientWidth"), "charts overlap"
    sync_api.expect(page.locator("#live")).to_have_text("live")


def test_a_page_follows_a_run_and_a_console_that_is_started_again(page, console, stores):
    visit(page, console, "/runs/first")
    page.evaluate("window.same = true")
    sync_api.expect(page.locator("#live")).to_have_text("live")
    link = page.locator("#rounds a").first
    link.focus()
    add_round(stores[0], 5, rounds=40)
    rounds = page.locator("#rounds tbody tr")
    sync_api.expect(rounds.first).to_contain_text("5", timeout=15_000)
    sync_api.expect(rounds).to_have_count(6)
    sync_api.expect(page.locator("#quality .plot").first).to_have_attribute("data-points", "5")
    assert page.evaluate("document.activeElement.getAttribute('href')") == "/runs/first/rounds/4"
    console.stop()
    sync_api.expect(page.locator("#live")).to_have_text("reconnecting", timeout=15_000)
    add_round(stores[0], 6, rounds=40)
    console.start()
    sync_api.expect(page.locator("#live")).to_have_text("live", timeout=30_000)
    sync_api.expect(rounds).to_have_count(7, timeout=15_000)
    assert page.evaluate("window.same")  # it was not loaded anew


def test_two_runs_are_overlaid_and_shown_next_to_each_other(page, console):
    visit(page, console, "/runs/second")
    page.get_by_label("overlay").select_option("first")
    page.get_by_role("button", name="Show").click()
    legend = page.locator("#quality .u-legend").first
    sync_api.expect(legend).to_contain_text("second")
    sync_api.expect(legend).to_contain_text("first")
    page.locator("#metric").select_option("loss")
    sync_api.expect(page.locator("#quality .plot").first).to_have_attribute(
        "aria-label", re.compile("^loss against round")
    )
    other = page.context.new_page()
    visit(other, console, "/runs/first")
    for each, name in ((page, "second"), (other, "first")):
        sync_api.expect(each.locator("h1")).to_contain_text(name)
        sync_api.expect(each.locator("#live")).to_have_text("live")
    other.close()


def test_receipts_are_filtered_and_paged_by_keyboard_alone(page, console):
    visit(page, console, "/runs/second")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"

    def tab_to(text):
        for _ in range(150):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.textContent").startswith(text):
                outline = page.evaluate("getComputedStyle(document.activeElement).outlineWidth")
                assert outline == "2px"
                return
        raise AssertionError(f"{text!r} cannot be reached")

    tab_to("late")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("outcome=late"))
    outcomes = page.locator("#receipts tbody .outcome")
    assert set(outcomes.all_inner_texts()) == {"late"}
    tab_to("all")
    page.keyboard.press("Enter")
    page.wait_for_url(lambda url: "outcome" not in url)
    before = page.locator("#receipts tbody tr").first.inner_text()
    page.locator("#receipts .filters a").last.focus()
    tab_to("Next")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("receipts=2"))
    assert page.locator("#receipts tbody tr").first.inner_text() != before


def test_a_phone_scrolls_tables_and_no_page(page, console):
    page.set_viewport_size({"width": 360, "height": 700})
    for path in ("/", "/runs/second", "/runs/second/rounds/14"):
        visit(page, console, path)
        sync_api.expect(page.locator("#live")).to_have_text("live")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
