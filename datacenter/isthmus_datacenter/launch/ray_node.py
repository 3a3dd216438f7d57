"""One node of a group that Ray starts: the actor that holds its place, and runs its script there.

Ray carries only names of files, addresses and exit statuses. The script, which every node reads
from the directory that all of them share, is compared with its SHA-256.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from isthmus.errors import cause_of
from isthmus.system.private_files import state_file_opener

NUMBER = "ISTHMUS_NODE"
"""Environment variable of a node's script, with its number."""
CONTROL = "ISTHMUS_CONTROL"
"""Environment variable of a node's script, with the first node's address."""
_TAKEN_AWAY = ("OMP_NUM_THREADS", "RAY_AUTH_TOKEN")
"""Variables of Ray's worker: the script sets the threads of ranks; the token is Ray's own."""


class RayNode:
    """An actor; its methods run in threads of one process, which is of this actor alone."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._leave: int | None = None
        """Where the script's guard hears what to do; None while there is none."""
        self._has_left = False
        """Whether the script was to end, perhaps before it began."""
        self._lock = threading.Lock()
        """Guards both: methods run at the same time."""

    def place(self) -> tuple[str, int, int]:
        """This machine's address, a port of it that is free, and the user that Ray has here."""
        import ray

        with socket.create_server(("", 0)) as server:
            port: int = server.getsockname()[1]
        return ray.util.get_node_ip_address(), port, os.getuid()

    def run(self, script: str, digest: str, log: str, control: str) -> tuple[int, str]:
        """Run the script to its end.

        Args:
            script: path of a file.
            digest: its SHA-256.
            log: path of the file to which the output is added.
            control: the first node's address.

        Returns:
            The script's exit status and nothing, or 0 and why it was not started.
        """
        machine = f"node {self._number} ({socket.gethostname()})"
        try:
            found = hashlib.sha256(Path(script).read_bytes()).hexdigest()
        except OSError as error:
            return 0, f"{machine} cannot read {script}: {cause_of(error)}"
        if found != digest:
            return 0, f"{machine} reads another {script} than the one that was launched"
        environment = {key: text for key, text in os.environ.items() if key not in _TAKEN_AWAY}
        environment |= {NUMBER: str(self._number), CONTROL: control}
        try:
            output = open(log, "ab", opener=state_file_opener)  # noqa: SIM115  # closed below
        except OSError as error:
            return 0, f"{machine} cannot write {log}: {cause_of(error)}"
        with output, self._guarded() as hears:
            if hears is None:
                return 0, ""
            guard = subprocess.Popen(
                [sys.executable, "-m", "isthmus_datacenter.launch.node_guard", script],
                stdin=hears,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
            )
            assert guard.stdout is not None
            with guard.stdout:
                status = guard.stdout.read()
            guard.wait()
        return int(status) if status else -9, ""

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[int | None]:
        """What the script's guard hears while `leave` tells it; None if it was to end before."""
        with self._lock:
            if self._has_left:
                hears = None
            else:
                hears, self._leave = os.pipe()
        try:
            yield hears
        finally:
            with self._lock:
                for end in (hears, self._leave):
                    if end is not None:
                        os.close(end)
                self._leave = None  # the number may be another file's from now on

    def leave(self) -> None:
        """Send SIGTERM to the script if it runs; if it does not yet, it will not."""
        with self._lock:
            self._has_left = True
            if self._leave is not None:
                os.write(self._leave, b".")
