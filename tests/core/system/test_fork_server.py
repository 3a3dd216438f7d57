"""Processes that are forked, and those that a fork server starts."""

import os
import signal
import subprocess
import sys

import pytest

from isthmus.system.fork_server import ForkServer
from isthmus.system.forked_process import described, fork, is_readable


def run(request):
    """A program of the tests."""
    what = request["what"]
    if what == "parent":
        child = subprocess.Popen(["sleep", "1000"])
        os.write(1, f"{child.pid}\n".encode())
    if what == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    if what in ("parent", "wait", "term"):
        signal.pause()
    os.write(1, f"{os.read(0, 1)!r} {os.getsid(0) == os.getpid()}\n".encode())
    raise SystemExit(what)


@pytest.fixture(scope="module", params=["fork", "start_anew"])
def server(request):
    with getattr(ForkServer, request.param)(run, ["isthmus.names"]) as server:
        yield server


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        (0, 0, "exit status 0"),
        (7, 7, "exit status 7"),
        ("a sentence", 1, "exit status 1"),
        (None, 0, "exit status 0"),
        ("term", -15, "signal 15 (SIGTERM)"),
    ],
)
def test_how_a_program_ends_is_reported(server, what, code, words, tmp_path):
    log = tmp_path / "log"
    program = server.start({"what": what}, log)
    assert program.wait() == code
    assert program.wait(0) == code
    assert program.pid is not None
    assert described(code) == words
    program.end()
    # No input, and a session of its own.
    assert log.read_text().startswith("" if what == "term" else "b'' True\n")
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_signal_is_for_one_program(server, tmp_path):
    kept, program = (server.start({"what": "wait"}, tmp_path / "log") for _ in range(2))
    program.receive()
    assert program.wait(0) is None
    program.send_signal(signal.SIGTERM)
    assert program.wait() == -signal.SIGTERM
    program.send_signal(signal.SIGTERM)  # it has ended
    program.close()
    assert kept.wait(0) is None
    kept.end()
    assert kept.code == -signal.SIGKILL


@pytest.mark.parametrize("how", ["end", "close"])
def test_a_program_is_killed_with_what_it_has_started(server, how, tmp_path):
    log = tmp_path / "log"
    os.mkfifo(log)
    program = server.start({"what": "parent"}, log)
    with log.open() as output:
        child = int(output.readline())
    program.receive()
    handles = [os.pidfd_open(pid) for pid in (program.pid, child)]
    getattr(program, how)()
    for handle in handles:
        assert is_readable(handle, 60)
        os.close(handle)


SCRIPT = """
import os, signal, sys
from pathlib import Path
from isthmus.system.fork_server import ForkServer

def show(request):
    files = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.exists()]
    print(*sorted(each for each in files if "socket" in each or "pidfd" in each), flush=True)
    signal.pause()

with ForkServer.fork(show) as server:
    programs = []
    for number in range(3):
        log = Path(str(number))
        os.mkfifo(log)
        programs.append(server.start({}, log))
        with log.open() as output:
            print(output.readline().strip())
    children = Path("/proc/self/task", str(os.getpid()), "children")
    os.kill(int(children.read_text()), signal.SIGKILL)
    print([each.wait() for each in programs])
    try:
        server.start({}, Path("log"))
    except OSError:
        print("killed")
    for each in programs:
        each.close()
"""


def test_programs_have_no_connection_of_others_and_end_with_the_fork_server(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines() == ["", "", "", "[-9, -9, -9]", "killed"]


def test_a_fork_that_does_not_end_is_killed():
    process = fork(signal.pause)
    assert process.wait(0) is None
    assert process.end() == -signal.SIGKILL
    assert process.end() == -signal.SIGKILL


def test_a_fork_that_raises_prints_why(capfd):
    def fail():
        raise ValueError("a mistake")

    assert fork(fail).end(None) == 1
    assert "ValueError: a mistake" in capfd.readouterr().err
