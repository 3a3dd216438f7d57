"""Every command in the docs does what the page says, in the order of the page."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BACKGROUND = "# in a terminal of its own\n"
# These make an environment from nothing, which a fresh clone in CI does.
ELSEWHERE = {"make demo", "make test"}


def blocks(page: str) -> list[str]:
    """The shell blocks of a page."""
    return re.findall(r"^```sh\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a reader would type: a folder with the examples in it."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    return tmp_path


class Terminal:
    """Types blocks as a reader would; blocks marked so get a terminal of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.own: list[subprocess.Popen[bytes]] = []
        bin_ = str(Path(sys.executable).parent)
        self.environment = {**os.environ, "PATH": f"{bin_}:{os.environ['PATH']}"}

    def type(self, block: str) -> None:
        if block.startswith(BACKGROUND):
            self.own.append(
                subprocess.Popen(
                    ["bash", "-ec", "exec " + block.removeprefix(BACKGROUND)],
                    cwd=self.folder,
                    env=self.environment,
                    start_new_session=True,
                )
            )
            return
        subprocess.run(
            ["bash", "-ec", block], cwd=self.folder, env=self.environment, check=True, timeout=100
        )

    def close(self) -> None:
        for process in self.own:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(30)


@pytest.fixture
def terminal(folder: Path) -> Terminal:
    return Terminal(folder)


@pytest.mark.parametrize("page", ["README.md", "docs/tasks.md", "docs/flower.md"])
def test_the_commands_of_a_page_work(page: str, terminal: Terminal) -> None:
    try:
        for block in blocks(page):
            for line in block.strip().splitlines():
                if line not in ELSEWHERE:
                    terminal.type(line)
    finally:
        terminal.close()


def test_three_people_with_three_pages_train_one_model(terminal: Terminal) -> None:
    """The server's page up to the crash, then the devices' and the datacenter's pages, then on."""
    operate = blocks("docs/operate.md")
    waiting = next(block for block in operate if block.startswith(BACKGROUND))
    before = operate[: operate.index(waiting)]
    (resume,) = operate[operate.index(waiting) + 1 :]
    try:
        for block in before:
            terminal.type(block)
        terminal.type(waiting)
        server = terminal.own[0]
        server.send_signal(signal.SIGSTOP)  # nobody joins before it is killed
        server.kill()
        server.wait()
        for block in blocks("docs/edge.md") + blocks("docs/datacenter.md"):
            terminal.type(block)
        if (terminal.folder / "runs/open/job.json").exists():
            terminal.type(resume)
    finally:
        terminal.close()
