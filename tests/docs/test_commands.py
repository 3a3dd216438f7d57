"""Every command in the docs does what the page says, in the order of the page."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from tests.forked_commands import ForkedCommands

from isthmus.system.process import die_with_parent

ROOT = Path(__file__).parents[2]
BACKGROUND = "# in a terminal of its own\n"
# These make an environment from nothing, which a fresh clone in CI does.
ELSEWHERE = {"make demo", "make test", "make docs"}


def blocks(page: str) -> list[str]:
    """The shell blocks of a page."""
    return re.findall(r"^```sh\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def files(page: str) -> dict[str, str]:
    """The files that a page has its reader save, by name."""
    titled = r'^```\w+ title="(.*?)"\n(.*?)^```'
    return dict(re.findall(titled, (ROOT / page).read_text(), re.DOTALL | re.MULTILINE))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a reader would type: a folder with the examples in it."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    return tmp_path


class Terminal:
    """Types blocks as a reader would; blocks marked so get a terminal of their own."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.own: list[subprocess.Popen[bytes]] = []
        self.environment = environment

    def type(self, block: str) -> None:
        if block.startswith(BACKGROUND):
            self.own.append(
                subprocess.Popen(
                    ["bash", "-ec", "exec " + block.removeprefix(BACKGROUND)],
                    cwd=self.folder,
                    env=self.environment,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
            )
            return
        subprocess.run(
            ["bash", "-ec", block], cwd=self.folder, env=self.environment, check=True, timeout=500
        )

    def read(self, command: str) -> bytes:
        return subprocess.check_output(
            ["bash", "-ec", command], cwd=self.folder, env=self.environment, timeout=500
        )

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what the others make true."""
        end = time.monotonic() + 300
        while not condition():
            assert time.monotonic() < end
            assert [process.poll() for process in self.own] == [None] * len(self.own)
            time.sleep(0.05)  # what other programs leave on disk can only be polled

    def close(self) -> None:
        for process in self.own:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(200)


def committed(run: Path) -> int:
    """Rounds that are committed in a run directory."""
    if not (run / "job.json").exists():
        return 0
    with contextlib.closing(sqlite3.connect(run / "run.sqlite", timeout=100)) as log:
        query = "SELECT count(*) FROM attempts WHERE state='committed'"
        return int(log.execute(query).fetchone()[0])


def listening(port: int) -> bool:
    """Whether a server takes connections on this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def terminal(folder: Path, forked_commands: ForkedCommands) -> Terminal:
    return Terminal(folder, forked_commands.environment())


def test_the_commands_of_the_readme_work_as_installed(folder: Path) -> None:
    """With the installed program, which imports everything anew for each command."""
    installed = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    type_page("README.md", Terminal(folder, {**os.environ, "PATH": installed}))


@pytest.mark.parametrize(
    "page",
    [
        "docs/getting-started.md",
        "docs/tasks.md",
        "docs/start.md",
        "docs/strategy.md",
        "docs/own-policies.md",
        "docs/operations.md",
        "docs/python.md",
        "docs/privacy.md",
        "docs/prove.md",
        "docs/flower.md",
        "docs/chaos.md",
        "docs/observe.md",
        "docs/simulate.md",
    ],
)
def test_the_commands_of_a_page_work(page: str, terminal: Terminal) -> None:
    type_page(page, terminal)


def test_what_if_of_the_guide_has_the_forecasts_that_the_page_shows(terminal: Terminal) -> None:
    type_page("docs/plan.md", terminal)
    found = json.loads(terminal.read("isthmus what-if runs/bandit --json"))
    known = {
        each["policy"]: each["reached"]["median"]
        for each in found["alternatives"]
        if each["reached"] is not None
    }
    shown = re.findall(
        r"^  (\w+) +(0\.\d+) \(0\.\d+ to 0\.\d+\), \d+ rounds",
        (ROOT / "docs/plan.md").read_text(),
        re.MULTILINE,
    )
    assert len(shown) >= 2
    for policy, median in shown:
        assert known[policy] == pytest.approx(float(median), abs=0.02)


def test_the_faulty_device_of_the_guide_is_named_first(terminal: Terminal) -> None:
    type_page("docs/exchange.md", terminal)
    lines = terminal.read("isthmus report runs/faulty").decode().splitlines()
    after = lines[lines.index("what else happened:") + 1]
    assert after.startswith("  client-3: the sum of its random group was left out in 10 of 10")
    report = json.loads(terminal.read("isthmus report runs/faulty --json"))
    assert report["rounds"][-1]["metrics"]["accuracy"] == pytest.approx(0.95, abs=0.02)


def type_page(page: str, terminal: Terminal) -> None:
    """Save the files of a page, and type its commands line by line."""
    for name, text in files(page).items():
        (terminal.folder / name).write_text(text)
    try:
        for block in blocks(page):
            for line in block.strip().splitlines():
                if line not in ELSEWHERE:
                    terminal.type(line)
    finally:
        terminal.close()


def operators_page() -> tuple[list[str], list[str]]:
    """The blocks about one machine, and those about a server that others join."""
    found = blocks("docs/operate.md")
    first = next(i for i, block in enumerate(found) if block.startswith("isthmus server init"))
    fleet = [block for block in found[first:] if block not in authority_blocks()]
    alone = [block for block in fleet if "runs/first" in block]
    return found[:first] + alone, [block for block in fleet if block not in alone]


def authority_blocks() -> list[str]:
    """The blocks about an authority that is separate from the server."""
    page = (ROOT / "docs/operate.md").read_text()
    section = page.partition("## Separate the authority from the server\n")[2].partition("\n## ")[0]
    return re.findall(r"^```sh\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


def test_the_authority_of_a_server_is_another_process(terminal: Terminal) -> None:
    """The tablet connects to the server, until it is revoked at the authority."""
    copy = terminal.folder / "hub/registry.copy"
    try:
        for block in authority_blocks():
            if "revoke" in block:
                terminal.until(lambda: b"tablet-0" in copy.read_bytes())
                tablet = terminal.own.pop()
                terminal.type(block)
                assert tablet.wait(100) == 1  # the server refuses it
                continue
            terminal.type(block)
            if block.startswith(BACKGROUND):
                port = 9503 if "authority" in block else 9422
                terminal.until(lambda port=port: listening(port))
    finally:
        terminal.close()


def test_one_person_trains_on_one_machine(terminal: Terminal) -> None:
    alone, _ = operators_page()
    for block in alone:
        terminal.type(block)


def test_three_people_with_three_pages_train_one_model(terminal: Terminal) -> None:
    """The server's page, then the devices' and the datacenter's, all over mutual TLS.

    The server is killed in the middle of the run and started again while the others keep dialling.
    """
    _, operate = operators_page()
    starting = next(block for block in operate if block.startswith(BACKGROUND))
    run = terminal.folder / "fleet/runs/digits-1"
    try:
        for block in operate:
            terminal.type(block)
            if block == starting:
                terminal.until(lambda: listening(9403))
        for block in blocks("docs/edge.md") + blocks("docs/datacenter.md"):
            terminal.type(block)
        terminal.until(lambda: committed(run) >= 1)
        server = terminal.own.pop(0)
        server.kill()
        server.wait()
        terminal.until(lambda: not listening(9403))  # its forked process has ended as well
        terminal.type(starting)
        terminal.until(lambda: listening(9403))
        said = terminal.read("isthmus logs digits-1 -f --state alice")
        assert said.endswith(b"digits-1 finished: all rounds are done\n"), said
        assert said.count(b" accuracy") == 5
    finally:
        terminal.close()
    found = json.loads(terminal.read("isthmus report fleet/runs/digits-1 --json"))
    assert found["status"] == "finished"
    assert [row["regime"] for row in found["rounds"]] == ["datacenter"] * 2 + ["federated"] * 3
    for row in found["rounds"][2:]:
        accepted = {one["participant"] for one in row["receipts"] if one["status"] == "accepted"}
        assert accepted <= {f"phone-{number}" for number in range(4)}
        assert len(accepted) >= 3, accepted  # the quorum: one may still be about to dial again
    assert found["final"]["metrics"]["accuracy"] > 0.5


def test_the_tutorial_ends_with_a_fleet_that_has_trained(terminal: Terminal) -> None:
    """All blocks in their order, with the files that the page shows."""
    page = "docs/tutorial.md"
    for name, text in files(page).items():
        path = terminal.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    try:
        for block in blocks(page):
            terminal.type(block)
            if block.startswith(BACKGROUND) and "server start" in block:
                terminal.until(lambda: listening(9413))
    finally:
        terminal.close()
    for run in ("runs/first", "fleet/runs/ring-1"):
        found = json.loads(terminal.read(f"isthmus report {run} --json"))
        assert found["status"] == "finished"
        assert len(found["rounds"]) == 12
        assert found["final"]["metrics"]["accuracy"] > 0.9
        row = found["rounds"][0]
        keys = {*found, *found["final"], *row, *row["cost"], *row["participants"]}
        described = set(re.findall(r"`(\w+)`", (ROOT / "docs/reference/report.md").read_text()))
        assert keys <= described, keys - described
