"""The start of a task's process: it leaves the network behind before it loads anything.

    python -m isthmus_clients.device.sandbox.worker SOCKET AGENT SETTINGS

SOCKET is the descriptor of the connection to the agent, AGENT its process id, SETTINGS an encoded
`WorkerSettings`. In namespaces there are two processes: the one started here only waits, with as
little loaded as possible, and its child works as process 1, with which all its descendants end.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from isthmus.system.process import die_with_parent
from isthmus_clients.device.sandbox.namespaces import enter_namespaces


def main(arguments: list[str]) -> int:
    """Run a task's process; returns its exit status."""
    end = socket.socket(fileno=int(arguments[0]))
    agent = int(arguments[1])
    separate = enter_namespaces()
    if separate:
        # Not by `isthmus.system.forked_process`: the child is process 1 of its namespace, and its
        # parent has no process id there that could be compared.
        child = os.fork()
        if child:
            end.close()
            die_with_parent(agent)
            return _end_like(child)
        agent = os.getppid()  # 0: every process outside of the namespace
    die_with_parent(agent)
    from isthmus.system.channel import Channel
    from isthmus_clients.device.sandbox.settings import DATA_NUMBERS, WorkerSettings
    from isthmus_clients.device.sandbox.task_worker import TaskWorker

    settings = WorkerSettings.model_validate_json(arguments[2])
    secret = os.environ.pop(DATA_NUMBERS, None)
    own = None if secret is None else bytes.fromhex(secret)
    TaskWorker(Channel(end), settings, own).run(separate)
    return 0


def _end_like(child: int) -> int:
    """Wait for the task's process, and end in the same way."""
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        os.kill(os.getpid(), os.WTERMSIG(status))
        signal.pause()
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
