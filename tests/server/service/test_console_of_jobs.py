"""Two jobs of a running server, with real devices over TLS, in a real Chromium."""

import contextlib

import pytest
from tests.free_ports import free_ports
from tests.machine import CHROMIUM, CHROMIUM_OPTIONS, needs_chromium
from tests.server.waiting import wait_until

from isthmus.wire import operator_pb2 as pb
from isthmus_server.fleet.presence import FleetPresence
from isthmus_server.read.console.serving import ConsoleListener

async_api = pytest.importorskip("playwright.async_api", reason="playwright is not installed")

pytestmark = needs_chromium

TOKEN = "t" * 43


@pytest.fixture
async def browser():
    async with async_api.async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_OPTIONS)
        yield await browser.new_context(viewport={"width": 1200, "height": 800})
        await browser.close()


@pytest.fixture
def port():
    return free_ports(1)


async def test_two_jobs_are_followed_side_by_side_through_a_pause_and_a_restart(
    operated, browser, port
):
    expect = async_api.expect
    expect.set_options(timeout=30_000)
    operated.runner._at_once = 2
    presence = FleetPresence(operated.state, operated.link, operated.runner.waiting)
    operated.runner.observers.followers.append(presence.following)

    def console():
        return ConsoleListener(operated.state, "127.0.0.1", port, token=TOKEN).serving()

    async def submit(seed, share):
        job = operated.job("rounds=3", f"seed={seed}")
        asked = pb.SubmitRequest(job=job.model_dump_json(), key=str(seed), share=share)
        return (await operated.ask("Submit", pb.SubmitReply, asked)).id

    await operated.devices()
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(presence.kept())
        restarted = await stack.enter_async_context(contextlib.AsyncExitStack())
        await restarted.enter_async_context(console())
        jobs = await browser.new_page()
        await jobs.goto(f"http://127.0.0.1:{port}/?token={TOKEN}")
        await expect(jobs.locator(".blank")).to_contain_text("No job so far")

        # Submitted while the page is open: both appear, with what the second waits for.
        first, second = await submit(1, 1.0), await submit(2, 2.0)
        rows = jobs.locator("#jobs tbody tr")
        await expect(rows).to_have_count(2)
        # By its link: the row of one that waits names the other as well.
        shown = {
            name: rows.filter(has=jobs.get_by_role("link", name=name, exact=True))
            for name in (first, second)
        }
        await expect(shown[first]).to_contain_text("0 of 3")
        await expect(shown[second].locator("td.n").first).to_have_text("2")
        waits = jobs.get_by_text("waiting for its turn: its participants work for")
        await expect(waits).to_have_count(1)

        # One is paused, the other goes on and ends, on a page of its own.
        await operated.ask("Pause", pb.PauseReply, pb.PauseRequest(id=second))
        await expect(shown[second]).to_contain_text("paused by me")
        run = await browser.new_page()
        await run.goto(f"http://127.0.0.1:{port}/runs/{first}")
        await expect(run.locator("#cards")).to_contain_text("0 of 3")
        for page in (jobs, run):
            await page.evaluate("window.same = true")
            await expect(page.locator("#live")).to_have_text("live")
        operated.gate.set()
        await expect(run.locator("#cards")).to_contain_text("3 of 3")
        await expect(run.locator("#rounds tbody tr")).to_have_count(3)
        await expect(shown[first]).to_contain_text("finished")

        # The server ends and comes back; the pages go on by themselves.
        await restarted.aclose()
        for page in (jobs, run):
            await expect(page.locator("#live")).to_have_text("reconnecting")
        await stack.enter_async_context(console())
        await operated.ask("Resume", pb.ResumeReply, pb.ResumeRequest(id=second))
        await expect(shown[second]).to_contain_text("finished")
        for page in (jobs, run):
            await expect(page.locator("#live")).to_have_text("live")
            assert await page.evaluate("window.same")
        await wait_until(lambda: not operated.runner._running)
