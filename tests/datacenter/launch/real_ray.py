"""A real Ray for tests, which ends with the process that has started it."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "ray_cluster.py"


class RayCluster:
    """Nodes of Ray on this machine, with two processors each."""

    def __init__(self, folder: Path, mode: str = "token", nodes: int = 2) -> None:
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        self.environment = {
            **{key: text for key, text in os.environ.items() if not key.startswith("RAY_")},
            "RAY_AUTH_MODE": mode,
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_TMPDIR": str(folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": "300",  # a busy machine is slow, not wrong
            "GLOO_SOCKET_IFNAME": "lo",
        }
        with (folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(SCRIPT), str(nodes), "2"],
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.address = self._read()
        assert self.address, (folder / "log").read_text()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def ask(self, word: str) -> None:
        """Kill the last node, or add one."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        assert self._read() == "done"

    def close(self) -> None:
        self._process.communicate()
