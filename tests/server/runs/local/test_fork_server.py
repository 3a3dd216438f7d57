"""The fork server of local runs, used in a process of its own, which has PyTorch already."""

import subprocess

SCRIPT = """
import asyncio, os, signal, sys
from pathlib import Path

from isthmus.errors import UserError
from isthmus_server.runs.local.fork_server import ParticipantForkServer


async def main(fork_server):
    log = Path("log")
    program = await fork_server.start(["job", "schema"], log)
    print(await program.ended, '"title": "Job"' in log.read_text())
    program = await fork_server.start(["job", "check", "nowhere.toml"], Path("mistake"))
    print(await program.ended, Path("mistake").read_text().strip())
    waiting = await fork_server.start(
        ["client", "start", "--server", "127.0.0.1:9", "--name", "a", "--die-with-parent"], log
    )
    for line in Path("/proc/self/task", str(os.getpid()), "children").read_text().split():
        os.kill(int(line), signal.SIGKILL)
        os.waitid(os.P_PID, int(line), os.WEXITED | os.WNOWAIT)
    try:
        await fork_server.start(["job", "schema"], log)  # before the signal is noticed
    except UserError as error:
        print(error)
    print(await waiting.ended)
    try:
        await fork_server.start(["job", "schema"], log)
    except UserError as error:
        print(error)


with ParticipantForkServer.fork(ranks=False) as fork_server:
    asyncio.run(main(fork_server))
"""


def test_programs_are_forked_and_end_with_the_fork_server(forked_python, tmp_path):
    ran = subprocess.run(
        [forked_python, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines() == [
        "0 True",
        "1 isthmus: there is no job file nowhere.toml",
        "the process that participants are forked from was killed",
        "-9",
        "the process that participants are forked from was killed",
    ]


MANY = """
import asyncio, socket, sys
from pathlib import Path

from isthmus_server.runs.local.fork_server import ParticipantForkServer


async def main(fork_server):
    # So little room that most requests have to wait for the ones before.
    fork_server._server._channel._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    starts = (fork_server.start([str(number)], Path("log")) for number in range(60))
    programs = await asyncio.wait_for(asyncio.gather(*starts), 100)
    print(sorted(await asyncio.gather(*(program.ended for program in programs))))


with ParticipantForkServer.fork(
    ranks=False, program=lambda: sys.exit(int(sys.argv[1]))
) as fork_server:
    asyncio.run(main(fork_server))
"""


def test_programs_that_are_started_at_once_all_start(forked_python, tmp_path):
    ran = subprocess.run(
        [forked_python, "-c", MANY], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == str(list(range(60)))
