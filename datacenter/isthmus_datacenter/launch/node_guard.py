"""Run the script of a node for a process that may be killed, and end all of it with that process.

    python -m isthmus_datacenter.launch.node_guard SCRIPT

Standard input is what it hears: each byte sends SIGTERM to the script, and the end of the input,
which comes with the end of the process that holds the other side, kills what the script has
started. Its output goes to standard error, and its exit status is written to standard output.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys


def main(script: str) -> None:
    """Run the script until it ends, in a process that is nobody's child.

    Ray kills the children of a worker one by one when it kills the worker: this one could not end
    its own children then.
    """
    if os.fork():
        os._exit(0)
    os.setsid()
    status = run(["bash", script])
    with contextlib.suppress(BrokenPipeError):  # the worker is gone
        os.write(1, str(status).encode())


def run(command: list[str]) -> int:
    """Run a command and pass on what standard input says; returns its exit status.

    When it returns, no process of the command's group is left.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        stderr=sys.stderr,
        process_group=0,
    )
    ended = os.pidfd_open(process.pid)
    while True:
        ready, _, _ = select.select([0, ended], [], [])
        if ended in ready:
            break
        if not os.read(0, 1):
            break
        process.send_signal(signal.SIGTERM)
    # Before the process is waited for: until then its number is not another group's.
    os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


if __name__ == "__main__":
    main(sys.argv[1])
