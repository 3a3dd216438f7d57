"""Draws the screenshots of docs/console.md: a run with made-up figures, in a real Chromium.

`python benchmarks/console_screenshots.py` needs Debian's `chromium`.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import threading
from pathlib import Path

from harness import code_of_tests
from playwright.sync_api import sync_playwright

from isthmus.job import load_job
from isthmus_server.read.console.serving import ConsoleListener

ROOT = Path(__file__).parents[1]
TOKEN = "t" * 43
SETTINGS = ("rounds=40", "budget=400", 'privacy={mechanism="gaussian", epsilon=8, delta=1e-6}')
SHOTS = (("run", "/runs/digits", "light", 1050), ("round", "/runs/digits/rounds/14", "dark", 900))


def main() -> None:
    code_of_tests.make_importable()
    from tests.server.read.console.filled_runs import filled_run

    chromium = shutil.which("chromium")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        job = load_job(ROOT / "examples/digits/job.toml", SETTINGS)
        store = filled_run(folder / "runs/digits", job, folder, 32, devices=6)
        stack.callback(store.close)
        listener = ConsoleListener(folder / "runs", "127.0.0.1", 0, token=TOKEN)
        thread = threading.Thread(target=lambda: asyncio.run(listener.serve()))
        thread.start()
        stack.callback(thread.join)
        stack.callback(listener.stop)
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        for name, path, scheme, height in SHOTS:
            page = browser.new_page(viewport={"width": 1180, "height": height}, color_scheme=scheme)
            page.goto(f"{listener.address}?token={TOKEN}")
            page.goto(listener.address.rstrip("/") + path)
            page.locator("#live[data-state=on]").wait_for()
            page.wait_for_load_state("load")
            if name == "run":
                page.locator("#rates canvas").last.wait_for()
            page.screenshot(path=ROOT / f"docs/console-{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
