"""The process that embedded participants are forked from, in a process of its own."""

import subprocess
import sys

SCRIPT = """
import asyncio, os, signal, sys
from pathlib import Path

from isthmus.errors import UserError
from isthmus_server.local.fork_server import Template


async def main(template):
    log = Path("log")
    program = await template.start(["job", "schema"], log)
    print(await program.ended, '"title": "Job"' in log.read_text())
    program = await template.start(["job", "check", "nowhere.toml"], Path("mistake"))
    print(await program.ended, Path("mistake").read_text().strip())
    waiting = await template.start(
        ["client", "start", "--server", "127.0.0.1:9", "--name", "a", "--die-with-parent"], log
    )
    for line in Path("/proc/self/task", str(os.getpid()), "children").read_text().split():
        os.kill(int(line), signal.SIGKILL)
        os.waitid(os.P_PID, int(line), os.WEXITED | os.WNOWAIT)
    try:
        await template.start(["job", "schema"], log)  # before anybody has heard of it
    except UserError as error:
        print(error)
    print(await waiting.ended)
    try:
        await template.start(["job", "schema"], log)
    except UserError as error:
        print(error)


with Template.fork(ranks=False) as template:
    asyncio.run(main(template))
"""


def test_programs_are_forked_and_end_with_the_template(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines() == [
        "0 True",
        "1 isthmus: there is no job file nowhere.toml",
        "the process that others are forked from was killed",
        "-9",
        "the process that others are forked from was killed",
    ]
